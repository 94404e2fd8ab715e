"""Beam search: the scores of the beams, the finished hypotheses, and the choice of continuations.

The search follows transformers (generation/utils.py, _beam_search), which our tests compare with. In each step all
continuations of all beams are ranked by the sum of their log-probabilities. The first `width` continuations of this
ranking become hypotheses if they end with a stop token or reach the maximum length. Hypotheses are ranked by
sum / length ** length_penalty, and the best `width` are kept. The first `width` continuations that do not end are the
next beams.

The search is over when every beam has reached the maximum length. Once there are `width` hypotheses, the search is also
over in two cases: `early_stopping` is set, or the best beam, scored at its current length, would not beat the worst
hypothesis.

Worked example, width 2, length_penalty 1: "a b </s>" with log-probabilities -0.5, -0.5, -0.2 scores -1.2 / 3 = -0.4. It
beats "c </s>" with -0.4, -0.6, which scores -1.0 / 2 = -0.5.

This module does not depend on sequences, pages or tensors.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from slora.core.request import FinishReason, TokenLogprobs
from slora.core.sampling_params import SamplingParams


class Proposal(NamedTuple):
    """The most probable continuations of one beam, best first.

    They include at least `width` continuations that do not end the beam, and every continuation that ranks before
    these.
    """

    token_ids: list[int]  # One per continuation.
    # Log-probability plus the biases and penalties of the request; a continuation with minus infinity is never used.
    scores: list[float]
    logprobs: list[float]  # Log-probabilities from the model's own logits.
    # (token id, logprob) of the most probable tokens; None unless the request asks for log-probabilities.
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer. token_ids: its generated tokens, including the stop token if one ended it."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason


class Fork(NamedTuple):
    """A new beam, number `beam`: the tokens that `parent` had before this step, followed by `token_id`."""

    parent: int
    beam: int
    token_id: int


@dataclass(frozen=True, slots=True)
class NextBeams:
    """The beams after a step."""

    kept: dict[int, int]  # Beam -> its next token, for beams that continue.
    forks: list[Fork]  # Further continuations of kept beams.
    dropped: list[int]  # Beams that no continuation extends; forks may reuse their numbers.


@dataclass(frozen=True, slots=True)
class _Beam:
    """The last token of a beam, linked to the beam that it extends. The first beam is the prompt and has no token."""

    total: float = 0.0  # Sum of the log-probabilities so far.
    token_id: int = 0
    logprobs: TokenLogprobs | None = None
    parent: "_Beam | None" = None


class _Continuation(NamedTuple):
    """Continuation number `place` of a beam's proposal. total: the beam's sum including this token."""

    total: float
    beam: int
    place: int


class BeamSearch:
    """The beam search of one request. Beam numbers are less than `width`. At first there is only beam 0."""

    __slots__ = (
        "_beams",
        "_early_stopping",
        "_finished",
        "_length",
        "_length_penalty",
        "_proposals",
        "_stop_ids",
        "width",
    )

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        self.width = params.width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._stop_ids = stop_ids
        # The number of generated tokens of every beam.
        self._length = 0
        self._beams: dict[int, _Beam] = {0: _Beam()}  # Best first.
        self._proposals: dict[int, Proposal] = {}
        self._finished: list[Hypothesis] = []  # best first

    @property
    def beams(self) -> list[int]:
        """The numbers of the current beams, best first."""
        return list(self._beams)

    @property
    def is_ready(self) -> bool:
        """Whether every beam has proposed its continuations, so that `advance` can choose the next beams."""
        return len(self._proposals) == len(self._beams)

    def has_proposed(self, beam: int) -> bool:
        return beam in self._proposals

    def propose(self, beam: int, proposal: Proposal) -> None:
        assert beam in self._beams, f"beam {beam} is not one of {self.beams}"
        self._proposals[beam] = proposal

    def withdraw(self, beam: int) -> None:
        """Removes the beam's proposal, if there is one. The beam will propose again."""
        self._proposals.pop(beam, None)

    def advance(self, max_tokens: int) -> NextBeams | None:
        """Applies all proposals. Returns None when the search is over. max_tokens: the maximum length."""
        assert self.is_ready, "a beam has no proposal yet"
        self._length += 1
        is_last = self._length >= max_tokens
        continuing: list[_Continuation] = []
        for rank, continuation in enumerate(self._ranked()):
            token_id = self._proposals[continuation.beam].token_ids[continuation.place]
            if token_id in self._stop_ids or is_last:
                if rank < self.width:
                    self._finish(continuation, token_id)
            else:
                continuing.append(continuation)
            if len(continuing) == self.width or (is_last and rank + 1 == self.width):
                break
        if not continuing or self._is_over(continuing[0].total):
            return None
        return self._make_next_beams(continuing)

    def count_min_steps(self, max_tokens: int) -> int:
        """Returns the minimum number of steps until the search is over. Only a stop token can end a beam early."""
        return 1 if self._stop_ids else max(1, max_tokens - self._length)

    def best(self, count: int) -> list[Hypothesis]:
        """The best `count` hypotheses, best first."""
        return self._finished[:count]

    def _ranked(self) -> Iterator[_Continuation]:
        """All continuations, best first. Among equal sums, the continuation of the better beam comes first."""
        return heapq.merge(
            *map(self._continuations, self._beams), key=lambda continuation: -continuation.total
        )

    def _continuations(self, beam: int) -> Iterator[_Continuation]:
        total = self._beams[beam].total
        scores = self._proposals[beam].scores
        return (
            _Continuation(total + score, beam, place)
            for place, score in enumerate(scores)
            if score > float("-inf")
        )

    def _finish(self, continuation: _Continuation, token_id: int) -> None:
        reason = FinishReason.STOP if token_id in self._stop_ids else FinishReason.LENGTH
        token_ids, logprobs = _collect_tokens(self._extended(continuation))
        score = continuation.total / self._length**self._length_penalty
        self._finished.append(Hypothesis(score, token_ids, logprobs, reason))
        # The sort is stable: among equal scores, the hypothesis that ended first is kept.
        self._finished.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self._finished[self.width :]

    def _is_over(self, best_total: float) -> bool:
        if len(self._finished) < self.width:
            return False
        return (
            self._early_stopping
            or best_total / self._length**self._length_penalty <= self._finished[-1].score
        )

    def _make_next_beams(self, continuing: list[_Continuation]) -> NextBeams:
        parents = {continuation.beam for continuation in continuing}
        free = iter(sorted(set(range(self.width)) - parents))
        next_beams = NextBeams({}, [], [beam for beam in self._beams if beam not in parents])
        beams: dict[int, _Beam] = {}
        for continuation in continuing:
            token_id = self._proposals[continuation.beam].token_ids[continuation.place]
            beam = continuation.beam
            if beam in next_beams.kept:
                beam = next(free)
                next_beams.forks.append(Fork(continuation.beam, beam, token_id))
            else:
                next_beams.kept[beam] = token_id
            beams[beam] = self._extended(continuation)
        self._beams, self._proposals = beams, {}
        return next_beams

    def _extended(self, continuation: _Continuation) -> _Beam:
        proposal = self._proposals[continuation.beam]
        logprobs = None
        if proposal.top is not None:
            logprobs = TokenLogprobs.list_best(
                proposal.token_ids[continuation.place], proposal.logprobs[continuation.place], proposal.top
            )
        return _Beam(
            continuation.total,
            proposal.token_ids[continuation.place],
            logprobs,
            self._beams[continuation.beam],
        )


def _collect_tokens(beam: _Beam) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
    """All generated tokens of a beam in order, and their log-probabilities, or None if there are none."""
    links: list[_Beam] = []
    link = beam
    while link.parent is not None:
        links.append(link)
        link = link.parent
    links.reverse()
    logprobs = tuple(link.logprobs for link in links if link.logprobs is not None)
    return tuple(link.token_id for link in links), logprobs or None
