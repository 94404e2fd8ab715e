"""The probabilities of next tokens without a model. The beams of a simulated search propose these tokens.

The probabilities follow the Poisson-Dirichlet distribution with theta = 1. It is drawn by stick breaking: each token
gets a uniformly distributed share of the probability that is left. On average the most probable token has 0.62. A
search with 16 beams finds text of perplexity 1.49 in this distribution; in GPT-2 large it finds 1.48 (Holtzman et al.,
ICLR 2020, table 1).

Two beams of a real model differ in a few words and expect similar next tokens. The more similar these tokens are, the
longer both beams survive. Here two beams expect the same next tokens if their last `memory_tokens` tokens are equal.
Otherwise their expectations are independent. There are two extremes:

- With 0, all beams expect the same tokens, so the differences between their scores persist.
- With None, beams that differ anywhere are independent. One of them soon falls behind and is dropped, so the beams that
  are left share most of their text.

A sentence (`SENTENCE_TOKENS`) is a realistic value, because language models hardly depend on the order of earlier words
(Khandelwal et al., ACL 2018).

This module does not depend on searches or sequences.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from bench.simulation.traces import FIRST_TOKEN
from slora.scheduler.beam_search import Proposal

SENTENCE_TOKENS = 20
# With this many breaks for each proposed token, the largest shares are almost surely found.
_STICKS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Proposes next tokens. memory_tokens: number of last tokens that determine the probabilities; None: all tokens."""

    memory_tokens: int | None

    def propose(self, thread: int, answer: list[int], count: int) -> Proposal:
        """Returns the `count` most probable tokens after `answer` in the text of this thread. Equal arguments give
        equal results.
        """
        known = len(answer) if self.memory_tokens is None else min(self.memory_tokens, len(answer))
        logprobs = _logprobs(hash((thread, len(answer), *answer[len(answer) - known :])), count)
        return Proposal(list(range(FIRST_TOKEN, FIRST_TOKEN + count)), logprobs, logprobs)


@lru_cache(maxsize=1024)  # Beams of one search often repeat a call.
def _logprobs(seed: int, count: int) -> list[float]:
    random, left, logprobs = Random(seed), 0.0, []
    for _ in range(_STICKS_A_TOKEN * count):
        share = 1.0 - random.random()  # The share is never 0, so its logarithm exists.
        logprobs.append(left + math.log(share))
        left += math.log1p(-share) if share < 1.0 else -math.inf
    return sorted(logprobs, reverse=True)[:count]
