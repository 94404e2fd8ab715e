"""What a request asks to be changed about logits before a token is chosen: biases, barred tokens, penalties.

In this order, which is that of vLLM (v1/sample/sampler.py: min_tokens and logit_bias, then penalties) and, for what
it has of them, of transformers (generation/utils.py, _get_logits_processor: sequence_bias, then repetition_penalty):

    l + bias                                     logit_bias; minus infinity for stop tokens below min_tokens
    l / repetition, or l * repetition if l < 0   for tokens in prompt or answer (CTRL, arXiv 1909.05858)
    l - frequency * count                        count: times that the answer has the token (OpenAI's formula)
    l - presence * [count > 0]

Element by element: what one row becomes depends on no other.
"""

import torch
from torch import Tensor

from slora.sampling.sampling_table import Column, SamplingRows, SamplingTable, Want


def edit_logits(logits: Tensor, rows: SamplingRows, table: SamplingTable) -> Tensor:
    """logits [B, vocab_size], float32 if anybody asked for edits, untouched; the edited ones come back, or the same."""
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
    """In place, the rows `index` int64 [N] of logits [B, V]. seen int32 [N, V]: twice the count in the answer, plus 1
    if in the prompt; the others [N, 1].

    On a CPU only the tokens that were seen are touched: hundreds of a vocabulary of many thousands. A GPU would have
    to tell the host how many these are.
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
    """See `penalise`: bit for bit the same, going over whole rows."""
    values = logits[index]
    logits[index] = torch.where(seen > 0, _penalised(values, seen, repetition, presence, frequency), values)


def _penalised(
    values: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    counts = seen >> 1
    scaled = torch.where(values < 0, values * repetition, values / repetition)
    return scaled - frequency * counts - presence * (counts > 0)
