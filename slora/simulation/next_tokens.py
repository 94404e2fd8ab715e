"""How likely each next token is, without a model: what the beams of a simulated search propose by.

Sticks are broken off one after another, each a uniform share of what is left (the Poisson-Dirichlet distribution with
theta = 1): the likeliest token has 0.62 of the probability on average. A search of 16 beams finds text of perplexity
1.49 in it; that of GPT-2 large finds 1.48 (Holtzman et al., ICLR 2020, table 1).

Two beams of a real model differ in a few words and expect much the same to come; how much the same decides how long
both live. Here all beams that end in the same `memory_tokens` tokens expect the same, and any two others expect nothing
in common. The extremes: alike (0), all beams of a request stay apart by whatever once told them apart; independent
(None), of two that differ anywhere one soon falls behind, and what is left has a common past. In between, a sentence
(20): language models hardly tell in which order the words before it came (Khandelwal et al., ACL 2018).

Knows no search and no sequence.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from slora.scheduler.beam_search import Proposal
from slora.simulation.traces import FIRST_TOKEN

SENTENCE_TOKENS = 20
_STICKS_A_TOKEN = (
    4  # of so many sticks broken off for each token wanted, those that are left out have no chance
)


@dataclass(frozen=True, slots=True)
class NextTokens:
    """memory_tokens: how many of the last tokens tell what comes next; None: all."""

    memory_tokens: int | None

    def propose(self, thread: int, answer: list[int], count: int) -> Proposal:
        """The `count` likeliest tokens behind `answer`, in the text of this thread. The same for the same arguments."""
        known = len(answer) if self.memory_tokens is None else min(self.memory_tokens, len(answer))
        logprobs = _logprobs(hash((thread, len(answer), *answer[len(answer) - known :])), count)
        return Proposal(list(range(FIRST_TOKEN, FIRST_TOKEN + count)), logprobs, logprobs)


@lru_cache(maxsize=1024)  # beams side by side ask for the same
def _logprobs(seed: int, count: int) -> list[float]:
    random, left, logprobs = Random(seed), 0.0, []
    for _ in range(_STICKS_A_TOKEN * count):
        share = 1.0 - random.random()  # never 0, whose logarithm is none
        logprobs.append(left + math.log(share))
        left += math.log1p(-share) if share < 1.0 else -math.inf
    return sorted(logprobs, reverse=True)[:count]
