"""What the engine's work takes, in seconds, as far as a decision needs it. Plain numbers.

The runner measures them when it starts; a simulator brings a table of its own. The formulas are straight lines: they
choose between two ways of doing something, they don't promise when it is done.
"""

import math
from dataclasses import dataclass, fields

from slora.errors import ConfigError


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

    def step_seconds(
        self,
        prefill_tokens: int,
        decode_rows: int,
        context_tokens: int,
        loaded_bytes: int,
        swapped_pages: int,
    ) -> float:
        """One step. context_tokens: of all rows that decode, together. swapped_pages: in either direction.

        Worked example: step_s 0.01, decode_s 0.001, context_token_s 1e-6, and 4 rows of 500 tokens each that decode:
        0.01 + 4 * 0.001 + 2000 * 1e-6 = 0.016 s.
        """
        return (
            self.step_s
            + prefill_tokens * self.token_s
            + decode_rows * self.decode_s
            + context_tokens * self.context_token_s
            + loaded_bytes * self.load_byte_s
            + swapped_pages * self.page_copy_s
        )

    def swap_s(self, num_pages: int) -> float:
        """Out and in again."""
        return 2 * num_pages * self.page_copy_s

    def load_s(self, num_bytes: int) -> float:
        return num_bytes * self.load_byte_s

    def tokens(self, seconds: float) -> float:
        """The same in tokens of prefill: at 0.002 s a token, 0.3 s are 150."""
        return seconds / self.token_s
