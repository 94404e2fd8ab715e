"""Chooses the next token of every sequence of a step at once. Each row depends on nothing but itself, bit for bit.

Edits of the logits come first (`logit_edits`), then the likeliest token is taken, or one is drawn (`Kernels.draw`).
What each row wants lies in the `SamplingTable`; chance is a hash of the request's seed and the token's position, so the
same request gives the same tokens alone, in any batch, and after a preemption, if the model gives the same logits.
"""

import numpy as np
import torch
from torch import Tensor

from slora.request import TokenLogprobs
from slora.sampling.logit_edits import edit_logits
from slora.sampling.sampling_table import Column, SamplingRows, SamplingTable, Want
from slora.sampling_params import MAX_LOGPROBS
from slora.scheduler.beam_search import Proposal
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Sampled
from slora_kernels.ops import Kernels

# What is computed from logits in float32.
_WIDE = Want.PENALTIES | Want.EDITS | Want.LOGPROBS | Want.SEARCH


def sample(
    logits: Tensor, table: SamplingTable, sequences: list[Sequence], kernels: Kernels
) -> list[Sampled]:
    """Chooses a token for each row of `logits` [B, vocab_size], and counts it in `table`. logits stay as they are.

    A row whose greatest logit is not finite gets no token: the caller must fail that request. A beam gets its likeliest
    one, which means nothing, and what it proposes.
    """
    rows = table.gather([sequence.row for sequence in sequences])
    if rows.wanting(_WIDE) is not None:  # to take or to draw a token, their own dtype does
        logits = table.widen(logits)
    edited = edit_logits(logits, rows, table)
    best, choice = kernels.likeliest(edited)
    draws = rows.draws(logits.device)
    if draws is not None:
        choice[draws.rows] = kernels.draw(edited, best, draws)
    table.advance(rows, choice)
    # Infinite less itself is no number. `isfinite` takes twice as many operations for it.
    is_sound = best - best == 0
    # One transfer to the host: the tokens, and -1 where a row was not sound.
    tokens = [token if token >= 0 else None for token in torch.where(is_sound, choice, -1).tolist()]
    if rows.is_plain:
        return [Sampled(token) for token in tokens]
    logprobs = _logprobs(logits, choice, rows)
    proposals = _proposals(logits, edited, rows, logprobs)
    return [Sampled(token, logprobs.get(row), proposals.get(row)) for row, token in enumerate(tokens)]


def token_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Of `tokens` int64 [N] under `logits` float32 [N, V], each with its own number of likeliest tokens.

    From the untouched distribution, as OpenAI reports them: temperature, filters and edits leave it alone.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    # Always as many: how many others want must not decide which of two equals comes first.
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    pairs = zip(chosen, top.indices.tolist(), top.values.tolist(), counts, strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, ids, values, count in pairs
    ]


def _logprobs(logits: Tensor, choice: Tensor, rows: SamplingRows) -> dict[int, TokenLogprobs]:
    """By place in the batch, for those who asked."""
    wanting = rows.wanting(Want.LOGPROBS)
    if wanting is None:
        return {}
    index = torch.from_numpy(wanting).to(logits.device)
    counts = rows.whole(Column.NUM_LOGPROBS, index).squeeze(1).tolist()
    return dict(zip(wanting.tolist(), token_logprobs(logits[index], choice[index], counts), strict=True))


def _proposals(
    logits: Tensor, edited: Tensor, rows: SamplingRows, told: dict[int, TokenLogprobs]
) -> dict[int, Proposal]:
    """By place in the batch, for beams. told: of those who want log-probabilities.

    Rows that propose as many are ranked together: how many others propose must not decide which of two equals is first.
    """
    searching = rows.wanting(Want.SEARCH)
    if searching is None:
        return {}
    counts = rows.num_proposed[searching]
    proposals: dict[int, Proposal] = {}
    for count in np.unique(counts):
        places = searching[counts == count]
        index = torch.from_numpy(places).to(logits.device)
        plain = logits[index]
        normaliser = plain.logsumexp(dim=-1, keepdim=True)
        best = edited[index].topk(int(count), dim=-1)
        columns = (best.indices, best.values - normaliser, plain.gather(1, best.indices) - normaliser)
        lists = zip(places.tolist(), *(column.tolist() for column in columns), strict=True)
        for place, token_ids, scores, logprobs in lists:
            top = told[place].top if place in told else None
            proposals[place] = Proposal(token_ids, scores, logprobs, top)
    return proposals
