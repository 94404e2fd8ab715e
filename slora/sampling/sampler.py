"""The sampler: chooses the next token of every sequence in a step. No row's result depends on other rows.

First the logits are processed (`logits_processing`), and tokens that a grammar forbids are masked. Then each row takes
the argmax token or samples one (`Kernels.sample`). The parameters of each row are in the `SamplingTable`. The random
number is a hash of the request's seed and the token's position. So a request gets the same tokens alone, in any batch
and after a preemption, provided the model gives the same logits.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from slora.request import TokenLogprobs
from slora.sampling.logits_processing import process_logits
from slora.sampling.sampling_table import Column, SamplingFeature, SamplingRows, SamplingTable
from slora.sampling.token_masks import TokenMasks
from slora.sampling_params import MAX_LOGPROBS
from slora.scheduler.beam_search import Proposal
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import SampledToken
from slora_kernels.ops import Kernels

# Rows with any of these need float32 logits.
_NEEDS_FLOAT32 = (
    SamplingFeature.PENALTIES
    | SamplingFeature.LOGIT_BIAS
    | SamplingFeature.LOGPROBS
    | SamplingFeature.BEAM_SEARCH
)

# Rows with any of these need the model's own logits besides the processed ones.
_NEEDS_RAW_LOGITS = SamplingFeature.LOGPROBS | SamplingFeature.BEAM_SEARCH


def sample(
    logits: Tensor,
    table: SamplingTable,
    sequences: list[Sequence],
    kernels: Kernels,
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """Chooses a token for each row of `logits` [B, vocab_size] and advances `table`. May overwrite `logits`.

    sequences: the sequence of each row. A sequence with drafts has several consecutive rows, one for each position.
    masks: the tokens that the grammars of the sequences allow.

    A row whose greatest logit is not finite gets None instead of a token: the caller must fail that request. A beam
    gets its proposal and also its argmax token, which the caller ignores.
    """
    rows = table.gather(sequences)
    if rows.rows_with(_NEEDS_FLOAT32) is not None:  # All other rows are sampled in the dtype of the logits.
        logits = table.widen(logits)
    processed = process_logits(logits, rows, table)
    if masks is not None:
        if processed is logits and rows.rows_with(_NEEDS_RAW_LOGITS) is not None:
            processed = logits.clone()
        kernels.mask_logits(processed, masks.rows, masks.words)
    max_logits, choice = kernels.argmax(processed)
    sampling = rows.sampling_tensors(logits.device)
    if sampling is not None:
        choice[sampling.rows] = kernels.sample(processed, max_logits, sampling)
    table.advance(rows, choice)
    # This is 0 only for finite numbers, because inf - inf is NaN. `isfinite` would need twice as many operations.
    is_finite = max_logits - max_logits == 0
    # One transfer to the host: the tokens, with -1 for rows that are not finite.
    tokens = [token if token >= 0 else None for token in torch.where(is_finite, choice, -1).tolist()]
    if rows.is_plain:
        return [SampledToken(token) for token in tokens]
    logprobs = _logprobs(logits, choice, rows, sequences)
    proposals = _proposals(logits, processed, rows, logprobs)
    return [SampledToken(token, logprobs.get(row), proposals.get(row)) for row, token in enumerate(tokens)]


def token_logprobs(
    logits: Tensor, tokens: Tensor, counts: list[int], labels: list[tuple[int, ...]] | tuple[()] = ()
) -> list[TokenLogprobs]:
    """Returns the log-probabilities of `tokens` int64 [N] under `logits` float32 [N, V].

    counts: for each row, how many of its most probable tokens to return as `top`.
    labels: for each row, tokens to return as `top` instead, after the row's own token. A row without labels returns its
        most probable tokens. If `labels` is empty, no row has labels.

    As in OpenAI's API, temperature, filters, biases and penalties do not change the log-probabilities.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    # Always the same k: the order of equal values must not depend on what other rows ask for.
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    pairs = zip(chosen, top.indices.tolist(), top.values.tolist(), counts, strict=True)
    found = [
        TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, ids, values, count in pairs
    ]
    if not labels:
        return found
    width = max(map(len, labels))
    padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in labels], device=logits.device)
    rows = zip(found, tokens.tolist(), labels, logprobs.gather(1, padded).tolist(), strict=True)
    return [
        TokenLogprobs(one.logprob, ((token, one.logprob), *_without(token, zip(ids, values, strict=False))))
        if ids
        else one
        for one, token, ids, values in rows
    ]


def _without(token: int, pairs: Iterable[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    return (pair for pair in pairs if pair[0] != token)


def _logprobs(
    logits: Tensor, choice: Tensor, rows: SamplingRows, sequences: list[Sequence]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row of the batch, for the rows that ask for them."""
    asking = rows.rows_with(SamplingFeature.LOGPROBS)
    if asking is None:
        return {}
    index = torch.from_numpy(asking).to(logits.device)
    counts = rows.int_column(Column.NUM_LOGPROBS, index).squeeze(1).tolist()
    labels = [sequences[row].request.sampling.logprob_token_ids for row in asking]
    found = token_logprobs(logits[index], choice[index], counts, labels if any(labels) else ())
    return dict(zip(asking.tolist(), found, strict=True))


def _proposals(
    logits: Tensor, processed: Tensor, rows: SamplingRows, row_logprobs: dict[int, TokenLogprobs]
) -> dict[int, Proposal]:
    """Proposals by row of the batch, for the rows that are beams.

    row_logprobs: log-probabilities of the rows that ask for them.

    Rows with equal numbers of proposals share one top-k, so the order of equal values does not depend on other rows.
    """
    searching = rows.rows_with(SamplingFeature.BEAM_SEARCH)
    if searching is None:
        return {}
    counts = rows.num_proposed[searching]
    proposals: dict[int, Proposal] = {}
    for count in np.unique(counts):
        places = searching[counts == count]
        index = torch.from_numpy(places).to(logits.device)
        plain = logits[index]
        normaliser = plain.logsumexp(dim=-1, keepdim=True)
        top = processed[index].topk(int(count), dim=-1)
        columns = (top.indices, top.values - normaliser, plain.gather(1, top.indices) - normaliser)
        lists = zip(places.tolist(), *(column.tolist() for column in columns), strict=True)
        for place, token_ids, scores, logprobs in lists:
            asked = row_logprobs[place].top if place in row_logprobs else None
            proposals[place] = Proposal(token_ids, scores, logprobs, asked)
    return proposals
