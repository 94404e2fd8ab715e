"""The sampler: chooses the next token of every sequence in a step. No row's result depends on other rows.

First the logits get the request's biases, banned tokens and penalties, and tokens that a grammar forbids are masked.
Then each row takes the argmax token or samples one (`Kernels.sample`). The parameters of each row are in the
`SamplingTable`. The random number is a hash of the request's seed and the token's position. So a request gets the same
tokens alone, in any batch and after a preemption, provided the model gives the same logits.

The order is the same as in vLLM (v1/sample/sampler.py: min_tokens and logit_bias, then penalties). The operations that
transformers also has are in transformers' order (generation/utils.py, _get_logits_processor: sequence_bias, then
repetition_penalty):

    l + bias                                     logit_bias; minus infinity for stop tokens below min_tokens
    l / repetition, or l * repetition if l < 0   for tokens in prompt or answer (CTRL, arXiv 1909.05858)
    l - frequency * count                        count: occurrences of the token in the answer (OpenAI's formula)
    l - presence * [count > 0]
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slora.core.request import TokenLogprobs
from slora.core.sampling_params import MAX_LOGPROBS
from slora.sampling.sampling_table import Column, SamplingFeature, SamplingRows, SamplingTable
from slora.sampling.token_masks import TokenMasks
from slora.scheduler.beam_search import Proposal
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import SampledToken
from slora_kernels.host_copies import download, upload
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


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The results of one step's sampling, while the device may still compute them."""

    choice: Tensor  # int64 [B] on the device: the tokens, with 0 for rows whose logits are not finite.
    tokens: Tensor  # int64 [B] on the host, with -1 for these rows.
    scored: Items[int] = ()  # The rows that ask for log-probabilities.
    logprobs: "LogprobRows | None" = None
    proposals: "Items[_ProposalRows]" = ()

    def read(self) -> list[SampledToken]:
        """Returns the sampled tokens. Called when the device has computed them.

        A row whose greatest logit is not finite has None instead of a token: the caller must fail that request. A beam
        has its proposal and also its argmax token, which the caller ignores.
        """
        tokens = [token if token >= 0 else None for token in self.tokens.tolist()]
        found: list[TokenLogprobs] = [] if self.logprobs is None else self.logprobs.read()
        if not (found or self.proposals):
            return [SampledToken(token) for token in tokens]
        logprobs = dict(zip(self.scored, found, strict=True))
        proposals: dict[int, Proposal] = {}
        for rows in self.proposals:
            proposals |= rows.read(logprobs)
        return [
            SampledToken(token, logprobs.get(row), proposals.get(row)) for row, token in enumerate(tokens)
        ]


def sample(
    logits: Tensor,
    table: SamplingTable,
    sequences: list[Sequence],
    kernels: Kernels,
    masks: TokenMasks | None = None,
) -> SampledRows:
    """Chooses a token for each row of `logits` [B, V] and advances `table`. May overwrite `logits`.

    On a GPU, this only launches the work.

    V is the base model's vocabulary size. If the rows' adapters have added tokens, MAX_ADDED_ROWS more columns follow.

    sequences: the sequence of each row. A sequence with drafts has several consecutive rows, one for each position.
    masks: the tokens that the grammars of the sequences allow.
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
    tokens = torch.where(max_logits - max_logits == 0, choice, -1)
    there, choice = download(tokens), tokens.clamp_min(0)
    if rows.is_plain:
        return SampledRows(choice, there)
    asking = rows.rows_with(SamplingFeature.LOGPROBS)
    scored = None if asking is None else _score(logits, choice, rows, asking, sequences)
    return SampledRows(
        choice, there, [] if asking is None else asking.tolist(), scored, _propose(logits, processed, rows)
    )


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of N rows, on the host. See `token_logprobs`."""

    tokens: Tensor  # [N]
    chosen: Tensor  # [N]
    top_ids: Tensor  # [N, K]
    top_values: Tensor  # [N, K]
    labelled: Tensor | None  # [N, most labels]; None if no row has labels.
    counts: list[int]
    labels: list[tuple[int, ...]] | tuple[()]

    @staticmethod
    def compute(
        logits: Tensor, tokens: Tensor, counts: list[int], labels: list[tuple[int, ...]] | tuple[()] = ()
    ) -> "LogprobRows":
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        # Always the same k: the order of equal values must not depend on what other rows ask for.
        top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
        labelled = None
        if labels:
            padded = np.zeros((len(labels), max(map(len, labels))), np.int64)
            for row, ids in enumerate(labels):
                padded[row, : len(ids)] = ids
            labelled = download(logprobs.gather(1, upload(padded, logits.device)))
        return LogprobRows(
            download(tokens),
            download(chosen),
            download(top.indices),
            download(top.values),
            labelled,
            counts,
            labels,
        )

    def read(self) -> list[TokenLogprobs]:
        columns = self.tokens, self.chosen, self.top_ids, self.top_values
        found = [
            TokenLogprobs.list_best(token, logprob, zip(ids[:count], values[:count], strict=True))
            for token, logprob, ids, values, count in zip(
                *(column.tolist() for column in columns), self.counts, strict=True
            )
        ]
        if self.labelled is None:
            return found
        rows = zip(found, self.tokens.tolist(), self.labels, self.labelled.tolist(), strict=True)
        return [
            TokenLogprobs(
                best.logprob, ((token, best.logprob), *_without(token, zip(ids, values, strict=False)))
            )
            if ids
            else best
            for best, token, ids, values in rows
        ]


def token_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of `tokens` int64 [N] under `logits` float32 [N, V]. Waits for the device.

    counts: for each row, how many of its most probable tokens to return as `top`. `LogprobRows` also takes labels: for
        each row, tokens to return as `top` instead, after the row's own token. A row without labels returns its most
        probable tokens. If there are no labels, no row has any.

    As in OpenAI's API, temperature, filters, biases and penalties do not change the log-probabilities.
    """
    rows = LogprobRows.compute(logits, tokens, counts)
    if logits.device.type != "cpu":
        torch.cuda.current_stream(logits.device).synchronize()
    return rows.read()


def _without(token: int, pairs: Iterable[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    return (pair for pair in pairs if pair[0] != token)


def _score(
    logits: Tensor,
    choice: Tensor,
    rows: SamplingRows,
    asking: npt.NDArray[np.int64],
    sequences: list[Sequence],
) -> LogprobRows:
    """Log-probabilities of the rows `asking`."""
    index = upload(asking, logits.device)
    labels = [sequences[row].request.sampling.logprob_token_ids for row in asking]
    counts = rows.ints[asking, Column.NUM_LOGPROBS].tolist()
    return LogprobRows.compute(logits[index], choice[index], counts, labels if any(labels) else ())


@dataclass(frozen=True, slots=True)
class _ProposalRows:
    """The continuations of the beams `places`, on the host: token ids, scores and log-probabilities, [N, count]."""

    places: list[int]
    token_ids: Tensor
    scores: Tensor
    logprobs: Tensor

    def read(self, row_logprobs: dict[int, TokenLogprobs]) -> dict[int, Proposal]:
        """Proposals by row of the batch. row_logprobs: log-probabilities of the rows that ask for them."""
        columns = (self.token_ids.tolist(), self.scores.tolist(), self.logprobs.tolist())
        return {
            place: Proposal(
                token_ids, scores, logprobs, row_logprobs[place].top if place in row_logprobs else None
            )
            for place, token_ids, scores, logprobs in zip(self.places, *columns, strict=True)
        }


def _propose(logits: Tensor, processed: Tensor, rows: SamplingRows) -> list[_ProposalRows]:
    """Computes the proposals of the rows that are beams.

    Rows with equal numbers of proposals share one top-k, so the order of equal values does not depend on other rows.
    """
    searching = rows.rows_with(SamplingFeature.BEAM_SEARCH)
    if searching is None:
        return []
    counts = rows.num_proposed[searching]
    found = []
    for count in np.unique(counts):
        places = searching[counts == count]
        index = upload(places, logits.device)
        plain = logits[index]
        # A single row is computed twice, because torch sums a single long row in another order.
        pair = plain if len(plain) > 1 else plain.repeat(2, 1)
        normaliser = pair.logsumexp(dim=-1, keepdim=True)[: len(plain)]
        top = processed[index].topk(int(count), dim=-1)
        columns = (top.indices, top.values - normaliser, plain.gather(1, top.indices) - normaliser)
        found.append(_ProposalRows(places.tolist(), *(download(column) for column in columns)))
    return found


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
            table.token_counts(rows, penalised, logits.shape[1]),
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
