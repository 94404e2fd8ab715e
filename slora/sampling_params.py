"""How one request wants its tokens chosen. Knows no model: limits that depend on one are the engine's."""

import math
from dataclasses import dataclass

from slora.errors import RequestRefused

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
_MAX_SEED = 2**63
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Raises RequestRefused, naming the field, when a value is out of range.

    max_tokens: None means as many as the context and the pool allow.
    temperature: 0 is greedy; then top_p, top_k and seed change nothing.
    top_k: 0 is off.
    seed: the same seed gives the same tokens, whatever else shares the batch.
    stop: strings that end the text; matched on decoded text, outside the engine.
    logprobs: None is off; k gives the chosen token's log-probability and the k most likely ones.
    n: answers to the one prompt, each drawn with a seed of its own (`choice_seed`); the prompt is computed once.
    best_of: answers that are drawn, of which the n likeliest are kept (by the sum of their tokens'
        log-probabilities); None means n. The engine draws them all, whoever collects them chooses.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestRefused(f"max_tokens is {self.max_tokens}; it must be at least 1", "max_tokens")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise RequestRefused(
                f"temperature is {self.temperature}; it must be between 0 and 2", "temperature"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestRefused(f"top_p is {self.top_p}; it must be above 0 and at most 1", "top_p")
        if self.top_k < 0:
            raise RequestRefused(f"top_k is {self.top_k}; it must be 0 (off) or positive", "top_k")
        if self.seed is not None and not -_MAX_SEED <= self.seed < _MAX_SEED:
            raise RequestRefused(f"seed is {self.seed}; it must fit in 64 bits", "seed")
        self._check_stops()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestRefused(f"logprobs is {self.logprobs}; it must be 0 to {MAX_LOGPROBS}", "logprobs")
        self._check_choices()

    @property
    def num_choices(self) -> int:
        """Answers that the engine draws for this request."""
        return self.n if self.best_of is None else self.best_of

    def _check_choices(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestRefused(f"n is {self.n}; it must be 1 to {MAX_CHOICES}", "n")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_CHOICES:
            raise RequestRefused(
                f"best_of is {self.best_of}; it must be at least n ({self.n}) and at most {MAX_CHOICES}",
                "best_of",
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestRefused(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS}", "stop")
        if any(not text for text in self.stop):
            raise RequestRefused("stop has an empty string; every stop string needs a character", "stop")
        if any(token < 0 for token in self.stop_token_ids):
            raise RequestRefused("stop_token_ids has a negative id; ids start at 0", "stop_token_ids")


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `seed`; choice 0 has the request's own.

    A request of its own with that seed gives the same tokens. Mixed as in SplitMix64 (Steele et al., 2014).
    """
    if index == 0:
        return seed
    state = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1
