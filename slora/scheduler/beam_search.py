"""Beam search: the beams' scores, the hypotheses that ended, and which continuations go on.

As transformers defines it (generation/utils.py, _beam_search), which is what our tests compare with. In each step all
continuations of all beams are ranked by the sum of their log-probabilities. Those of the first `width` that end, by a
stop token or by their length, become hypotheses, ranked by sum / length ** length_penalty, of which the best `width`
are kept. The first `width` that do not end are the next beams.

The search is over when every beam has reached the greatest length, or with `width` hypotheses if `early_stopping`, or
else when the best beam, ended as long as it is now, would not beat the worst of them.

Worked example, width 2, length_penalty 1: "a b </s>" with log-probabilities -0.5, -0.5, -0.2 scores -1.2 / 3 = -0.4 and
beats "c </s>" with -0.4, -0.6, which scores -1.0 / 2 = -0.5.

Knows no sequence, no page and no tensor.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from slora.request import FinishReason, TokenLogprobs
from slora.sampling_params import SamplingParams


class Proposal(NamedTuple):
    """The likeliest continuations of one beam, best first: at least `width` that do not end it, and all before these.

    scores: what counts, the log-probability plus what the request adds to the token's logit; minus infinity is never
    taken. logprobs: from the untouched distribution. top: (token id, logprob) of the likeliest, if they were asked for.
    """

    token_ids: list[int]
    scores: list[float]
    logprobs: list[float]
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that has ended. token_ids: the generated ones, with the stop token if one ended it."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason


class Fork(NamedTuple):
    """`beam` is a new one: what `parent` was before this step, and `token_id`."""

    parent: int
    beam: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Survivors:
    """kept: beams that go on, each with its next token. forks: further continuations of these. dropped: beams that
    nothing continues; their numbers may be those of forks."""

    kept: dict[int, int]
    forks: list[Fork]
    dropped: list[int]


@dataclass(frozen=True, slots=True)
class _Beam:
    """Its last token, and what it continues; the first beam is the prompt, which has none. total: the sum so far."""

    total: float = 0.0
    token_id: int = 0
    logprobs: TokenLogprobs | None = None
    parent: "_Beam | None" = None


class _Continuation(NamedTuple):
    """Place `place` of a beam's proposal. total: the sum with it."""

    total: float
    beam: int
    place: int


class BeamSearch:
    """One request's. Beams have numbers below `width`; at first there is beam 0 alone."""

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
        self._length = 0  # of every beam
        self._beams: dict[int, _Beam] = {0: _Beam()}  # best first
        self._proposals: dict[int, Proposal] = {}
        self._finished: list[Hypothesis] = []  # best first

    @property
    def beams(self) -> list[int]:
        """The numbers of those that go on, best first."""
        return list(self._beams)

    @property
    def is_ready(self) -> bool:
        """Whether each beam has proposed."""
        return len(self._proposals) == len(self._beams)

    def has_proposed(self, beam: int) -> bool:
        return beam in self._proposals

    def propose(self, beam: int, proposal: Proposal) -> None:
        assert beam in self._beams, f"beam {beam} is not one of {self.beams}"
        self._proposals[beam] = proposal

    def withdraw(self, beam: int) -> None:
        """What it proposed, if it did, will be proposed again."""
        self._proposals.pop(beam, None)

    def advance(self, max_tokens: int) -> Survivors | None:
        """Takes all proposals in. None: the search is over. max_tokens: the greatest length."""
        assert self.is_ready, "a beam has not proposed yet"
        self._length += 1
        is_last = self._length >= max_tokens
        going_on: list[_Continuation] = []
        for rank, one in enumerate(self._ranked()):
            token_id = self._proposals[one.beam].token_ids[one.place]
            if token_id in self._stop_ids or is_last:
                if rank < self.width:
                    self._finish(one, token_id)
            else:
                going_on.append(one)
            if len(going_on) == self.width or (is_last and rank + 1 == self.width):
                break
        if not going_on or self._is_decided(going_on[0].total):
            return None
        return self._follow(going_on)

    def best(self, count: int) -> list[Hypothesis]:
        """Of those that ended, the best first."""
        return self._finished[:count]

    def _ranked(self) -> Iterator[_Continuation]:
        """All continuations, best first; of equals, that of the better beam."""
        return heapq.merge(*map(self._continuations, self._beams), key=lambda one: -one.total)

    def _continuations(self, beam: int) -> Iterator[_Continuation]:
        total = self._beams[beam].total
        scores = self._proposals[beam].scores
        return (
            _Continuation(total + score, beam, place)
            for place, score in enumerate(scores)
            if score > float("-inf")
        )

    def _finish(self, one: _Continuation, token_id: int) -> None:
        reason = FinishReason.STOP if token_id in self._stop_ids else FinishReason.LENGTH
        token_ids, logprobs = _walk(self._extended(one))
        score = one.total / self._length**self._length_penalty
        self._finished.append(Hypothesis(score, token_ids, logprobs, reason))
        # Stable, so of equals the one that ended first stays.
        self._finished.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self._finished[self.width :]

    def _is_decided(self, best_total: float) -> bool:
        if len(self._finished) < self.width:
            return False
        return (
            self._early_stopping
            or best_total / self._length**self._length_penalty <= self._finished[-1].score
        )

    def _follow(self, going_on: list[_Continuation]) -> Survivors:
        parents = {one.beam for one in going_on}
        free = iter(sorted(set(range(self.width)) - parents))
        survivors = Survivors({}, [], [beam for beam in self._beams if beam not in parents])
        beams: dict[int, _Beam] = {}
        for one in going_on:
            token_id = self._proposals[one.beam].token_ids[one.place]
            beam = one.beam
            if beam in survivors.kept:
                beam = next(free)
                survivors.forks.append(Fork(one.beam, beam, token_id))
            else:
                survivors.kept[beam] = token_id
            beams[beam] = self._extended(one)
        self._beams, self._proposals = beams, {}
        return survivors

    def _extended(self, one: _Continuation) -> _Beam:
        proposal = self._proposals[one.beam]
        logprobs = None
        if proposal.top is not None:
            logprobs = TokenLogprobs(proposal.logprobs[one.place], proposal.top)
        return _Beam(one.total, proposal.token_ids[one.place], logprobs, self._beams[one.beam])


def _walk(beam: _Beam) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
    """All its tokens, in order, and their log-probabilities, if there are any."""
    links: list[_Beam] = []
    link = beam
    while link.parent is not None:
        links.append(link)
        link = link.parent
    links.reverse()
    logprobs = tuple(link.logprobs for link in links if link.logprobs is not None)
    return tuple(link.token_id for link in links), logprobs or None
