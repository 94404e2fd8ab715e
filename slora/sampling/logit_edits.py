"""Logit edits that a request asks for: biases, barred tokens and penalties, applied before a token is chosen.

The order is that of vLLM (v1/sample/sampler.py: min_tokens and logit_bias, then penalties). For the edits that
transformers also has, it is transformers' order too (generation/utils.py, _get_logits_processor: sequence_bias, then
repetition_penalty):

    l + bias                                     logit_bias; minus infinity for stop tokens below min_tokens
    l / repetition, or l * repetition if l < 0   for tokens in prompt or answer (CTRL, arXiv 1909.05858)
    l - frequency * count                        count: occurrences of the token in the answer (OpenAI's formula)
    l - presence * [count > 0]

All operations are elementwise: the result of one row does not depend on other rows.
"""

import torch
from torch import Tensor

from slora.sampling.sampling_table import Column, SamplingRows, SamplingTable, Want


def edit_logits(logits: Tensor, rows: SamplingRows, table: SamplingTable) -> Tensor:
    """Returns edited logits [B, vocab_size]. `logits` itself is not changed, and is returned if no row has edits.

    logits: float32 if any row has edits.
    """
    edited, penalised = rows.wanting(Want.EDITS), rows.wanting(Want.PENALTIES)
    if edited is None and penalised is None:
        return logits
    logits = logits.clone()
    if edited is not None:
        index = torch.from_numpy(edited).to(logits.device)
        tokens, values = table.edits(rows, edited)
        logits[index] = logits[index].scatter_add_(1, tokens, values)
    if penalised is not None:
        index = torch.from_numpy(penalised).to(logits.device)
        penalise(
            logits,
            index,
            table.seen(rows, penalised),
            rows.fraction(Column.REPETITION, index),
            rows.fraction(Column.PRESENCE, index),
            rows.fraction(Column.FREQUENCY, index),
        )
    return logits


def penalise(
    logits: Tensor, index: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Applies the penalties in place to rows `index` int64 [N] of `logits` [B, V].

    seen: int32 [N, V]: 2 * count of the token in the answer, plus 1 if the prompt has the token.
    repetition, presence, frequency: [N, 1].

    On a CPU only seen tokens are computed: a few hundred in a vocabulary of many thousands. On a GPU this would require
    a transfer of their number to the host.
    """
    columns = repetition, presence, frequency
    if logits.device.type != "cpu":
        penalise_all(logits, index, seen, *columns)
        return
    rows, tokens = seen.nonzero(as_tuple=True)
    places = (index[rows], tokens)
    logits[places] = _penalised(logits[places], seen[rows, tokens], *(c.squeeze(1)[rows] for c in columns))


def penalise_all(
    logits: Tensor, index: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Like `penalise`, computed over whole rows. The results are equal bit for bit."""
    values = logits[index]
    logits[index] = torch.where(seen > 0, _penalised(values, seen, repetition, presence, frequency), values)


def _penalised(
    values: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    counts = seen >> 1
    scaled = torch.where(values < 0, values * repetition, values / repetition)
    return scaled - frequency * counts - presence * (counts > 0)
