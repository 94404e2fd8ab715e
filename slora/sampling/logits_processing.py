"""Applies a request's biases, banned tokens and penalties to its logits, before a token is chosen.

The order is the same as in vLLM (v1/sample/sampler.py: min_tokens and logit_bias, then penalties). The operations that
transformers also has are in transformers' order (generation/utils.py, _get_logits_processor: sequence_bias, then
repetition_penalty):

    l + bias                                     logit_bias; minus infinity for stop tokens below min_tokens
    l / repetition, or l * repetition if l < 0   for tokens in prompt or answer (CTRL, arXiv 1909.05858)
    l - frequency * count                        count: occurrences of the token in the answer (OpenAI's formula)
    l - presence * [count > 0]

All operations are elementwise: the result of one row does not depend on other rows.
"""

import torch
from torch import Tensor

from slora.sampling.sampling_table import Column, SamplingFeature, SamplingRows, SamplingTable
from slora_kernels.host_copies import upload


def process_logits(logits: Tensor, rows: SamplingRows, table: SamplingTable) -> Tensor:
    """Returns processed logits [B, vocab_size]. `logits` itself is not changed, and is returned if no row needs
    processing.

    logits: float32 if any row needs processing.
    """
    biased, penalised = rows.rows_with(SamplingFeature.LOGIT_BIAS), rows.rows_with(SamplingFeature.PENALTIES)
    if biased is None and penalised is None:
        return logits
    logits = logits.clone()
    if biased is not None:
        index = upload(biased, logits.device)
        tokens, values = table.logit_biases(rows, biased)
        logits[index] = logits[index].scatter_add_(1, tokens, values)
    if penalised is not None:
        index = upload(penalised, logits.device)
        apply_penalties(
            logits,
            index,
            table.token_counts(rows, penalised),
            rows.float_column(Column.REPETITION, index),
            rows.float_column(Column.PRESENCE, index),
            rows.float_column(Column.FREQUENCY, index),
        )
    return logits


def apply_penalties(
    logits: Tensor,
    index: Tensor,
    token_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Applies the penalties in place to rows `index` int64 [N] of `logits` [B, V].

    token_counts: int32 [N, V]: 2 * count of the token in the answer, plus 1 if the prompt has the token.
    repetition, presence, frequency: [N, 1].

    On a CPU, only tokens with a count are computed: a few hundred in a vocabulary of many thousands. On a GPU, all
    tokens are computed, because selecting some would require a transfer of their number to the host.
    """
    columns = repetition, presence, frequency
    if logits.device.type != "cpu":
        apply_penalties_to_all_tokens(logits, index, token_counts, *columns)
        return
    rows, tokens = token_counts.nonzero(as_tuple=True)
    places = (index[rows], tokens)
    logits[places] = _compute_penalised(
        logits[places], token_counts[rows, tokens], *(c.squeeze(1)[rows] for c in columns)
    )


def apply_penalties_to_all_tokens(
    logits: Tensor,
    index: Tensor,
    token_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Like `apply_penalties`, but computes all tokens of each row. The results of both are equal bit for bit."""
    values = logits[index]
    logits[index] = torch.where(
        token_counts > 0, _compute_penalised(values, token_counts, repetition, presence, frequency), values
    )


def _compute_penalised(
    values: Tensor, token_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    counts = token_counts >> 1
    scaled = torch.where(values < 0, values * repetition, values / repetition)
    return scaled - frequency * counts - presence * (counts > 0)
