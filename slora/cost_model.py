"""What the engine's work takes, in seconds, as far as a decision needs it. Plain numbers.

The runner measures them when it starts and learns them from the steps that run; a simulator brings its own table. The
formulas are straight lines: they choose between two ways of doing something, and do not promise when it is done.
"""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from slora.errors import ConfigError


class Costs(Protocol):
    """What a scheduler asks of costs, whether they are fixed or learned. See `CostModel`."""

    @property
    def step_s(self) -> float: ...

    @property
    def decode_s(self) -> float: ...

    def prefill_s(self, num_tokens: int) -> float: ...

    def swap_s(self, num_pages: int) -> float: ...

    def load_s(self, num_bytes: int) -> float: ...

    def tokens(self, seconds: float) -> float: ...


class StepWork(NamedTuple):
    """What one step does. context_tokens: of all rows that decode, together. loaded_bytes: of adapters, host to pool.
    swapped_pages: in either direction. In the order of the fields of `CostModel` behind step_s."""

    prefill_tokens: int
    decode_rows: int
    context_tokens: int
    swapped_pages: int
    loaded_bytes: int


class StepTimes(NamedTuple):
    """Seconds that the parts of one step took."""

    compute_s: float
    swap_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """step_s: of any step. token_s: of a token that is prefilled. decode_s: of a row that decodes. context_token_s: of
    attention over one token of context, per row that decodes. page_copy_s: of one page, device to host or back.
    load_byte_s: of a byte of an adapter, host to pool.
    """

    step_s: float
    token_s: float
    decode_s: float
    context_token_s: float
    page_copy_s: float
    load_byte_s: float

    def __post_init__(self) -> None:
        """Raises ConfigError with the field, its value and the limit."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"the cost {field.name} is {value!r}; it must be from 0 and finite, in seconds"
                )
        if self.token_s == 0:
            raise ConfigError("the cost token_s is 0; it must be above 0: other costs are told in tokens")

    def prefill_s(self, num_tokens: int) -> float:
        """In steps that run anyway: what each step takes by itself is not counted."""
        return num_tokens * self.token_s

    def step_seconds(self, work: StepWork) -> float:
        """Worked example: step_s 0.01, decode_s 0.001, context_token_s 1e-6, and 4 rows of 500 tokens each that decode:
        0.01 + 4 * 0.001 + 2000 * 1e-6 = 0.016 s.
        """
        return (
            self.step_s
            + work.prefill_tokens * self.token_s
            + work.decode_rows * self.decode_s
            + work.context_tokens * self.context_token_s
            + work.swapped_pages * self.page_copy_s
            + work.loaded_bytes * self.load_byte_s
        )

    def swap_s(self, num_pages: int) -> float:
        """Out and in again."""
        return 2 * num_pages * self.page_copy_s

    def load_s(self, num_bytes: int) -> float:
        return num_bytes * self.load_byte_s

    def tokens(self, seconds: float) -> float:
        """The same in tokens of prefill: at 0.002 s a token, 0.3 s are 150."""
        return seconds / self.token_s
