"""How beams die, without a model: which of the beams the next ones continue, step by step.

A beam's next token has random probabilities: sticks broken off one after another, each a uniform share of what is left
(the Poisson-Dirichlet distribution with theta = 1). The likeliest token has 0.62 of the probability on average, about
what language models give theirs in free text. Each step takes, of all beams' continuations together, the `width` with
the greatest sum of log-probabilities, as beam search does without a length penalty.

Two beams of a real model differ in a few words and expect much the same to come; how much the same decides how long
both live. The process has the two extremes. Independent: each beam draws its own probabilities, so one of two soon
falls behind, and what is left has a common past. Alike: all beams of a request have the same probabilities in every
step, and stay apart by whatever once told them apart. Real beams lie in between.
"""

import numpy as np


class BeamProcess:
    """The beams of one request."""

    def __init__(self, width: int, random: np.random.Generator, *, is_alike: bool) -> None:
        self.width = width
        self._random = random
        self._is_alike = is_alike
        self._scores = np.zeros(1)  # one beam at first: the prompt

    def next_parents(self) -> list[int]:
        """For each of the `width` beams after this step, the beam that it continues, in ascending order."""
        num_sticks = 4 * self.width  # what is left beyond them has no chance
        num_draws = 1 if self._is_alike else len(self._scores)
        breaks = self._random.random((num_draws, num_sticks))
        left = np.cumprod(1 - breaks, axis=1)
        sticks = breaks.copy()
        sticks[:, 1:] *= left[:, :-1]
        scores = (self._scores[:, None] + np.log(sticks)).ravel()
        best = np.sort(np.argpartition(-scores, self.width - 1)[: self.width])
        self._scores = scores[best]
        parents: list[int] = (best // num_sticks).tolist()
        return parents
