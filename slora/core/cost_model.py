"""The cost model: estimates the seconds that the parts of a step take, for scheduling decisions.

The runner measures the costs at its start and updates them from the steps that run. A simulator supplies its own
values. The formulas are linear: accurate enough to compare alternatives, but not to predict when work is done.
"""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from slora.core.errors import ConfigError


class StepWork(NamedTuple):
    """The work of one step. Its fields correspond to the fields of `CostModel` after step_s, in the same order."""

    prefill_tokens: int
    decode_rows: int
    context_tokens: int  # Total context length of all decode rows.
    swapped_pages: int  # KV pages copied between device and host, in both directions together.
    loaded_bytes: int  # Adapter bytes copied from the host into the pool.
    prefill_context: int = 0  # Pairs of a prefilled token and a token before it in its prompt.


class StepTimes(NamedTuple):
    """Measured seconds of the parts of one step."""

    compute_s: float
    swap_s: float = 0.0
    load_s: float = 0.0


@dataclass(slots=True)
class CostModel:
    """Costs in seconds. The engine changes those of its own model as it learns from its steps."""

    step_s: float  # Fixed cost of any step.
    token_s: float  # Per prefilled token.
    decode_s: float  # Per decode row.
    context_token_s: float  # Attention over one token of context, per decode row.
    page_copy_s: float  # Per page copied between device and host, in either direction.
    load_byte_s: float  # Per adapter byte copied from the host into the pool.
    prefill_context_s: float = 0.0  # Attention of a prefilled token to one token before it.

    def __post_init__(self) -> None:
        """Checks the costs. Raises ConfigError with the field, its value and the limit."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"the cost {field.name} is {value!r}; it must be a finite number of seconds from 0"
                )
        if self.token_s == 0:
            raise ConfigError(
                "the cost token_s is 0; it must be above 0, because other costs are expressed in tokens"
            )

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """Seconds to prefill the tokens of a prompt from position `start` on, without step_s: these tokens are computed
        in steps that run anyway.
        """
        return num_tokens * self.token_s + count_pairs(num_tokens, start) * self.prefill_context_s

    def row_s(self, context_tokens: int) -> float:
        """Seconds that one decode row with this context adds to a step that runs anyway."""
        return self.decode_s + context_tokens * self.context_token_s

    def step_seconds(self, work: StepWork) -> float:
        """Seconds that a step with this work takes.

        Worked example: step_s 0.01, decode_s 0.001, context_token_s 1e-6, and 4 decode rows of 500 tokens of context
        each: 0.01 + 4 * 0.001 + 2000 * 1e-6 = 0.016 s.
        """
        return (
            self.step_s
            + work.prefill_tokens * self.token_s
            + work.decode_rows * self.decode_s
            + work.context_tokens * self.context_token_s
            + work.swapped_pages * self.page_copy_s
            + work.loaded_bytes * self.load_byte_s
            + work.prefill_context * self.prefill_context_s
        )

    def swap_s(self, num_pages: int) -> float:
        """Seconds to copy the pages to the host and back."""
        return 2 * num_pages * self.page_copy_s

    def load_s(self, num_bytes: int) -> float:
        return num_bytes * self.load_byte_s

    def tokens(self, seconds: float) -> float:
        """Converts seconds to prefill tokens without context: at 0.002 s per token, 0.3 s are 150 tokens."""
        return seconds / self.token_s

    def fit_tokens(self, seconds: float, start: int) -> float:
        """Returns how many tokens of a prompt can be prefilled from position `start` on, so that `prefill_s` is
        `seconds`.

        Worked example: at 0.001 s per token and 1e-6 s per pair, 0.1 s are 95 tokens at the start of a prompt, and 16
        from position 5,000 on.
        """
        if seconds <= 0:
            return 0.0
        # The positive root of half * n^2 + first * n = seconds, in the form without a difference of similar numbers.
        half = self.prefill_context_s / 2
        first = self.token_s + self.prefill_context_s * start - half
        return 2 * seconds / (first + math.sqrt(first * first + 4 * half * seconds))


def count_pairs(num_tokens: int, start: int) -> int:
    """Returns the number of pairs of one of `num_tokens` tokens from position `start` on and a token before it."""
    return num_tokens * start + num_tokens * (num_tokens - 1) // 2
