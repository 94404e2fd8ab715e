"""A Triton launch as a value: what a launcher decided, ready to be run, or compiled for a GPU that is not
here.

Launchers return it rather than launch, so that ahead-of-time compilation certifies what is really launched:
the same arguments, alignments, constants, warps and stages.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

_TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel[grid](**arguments, **constants); arguments are tensors and run-time scalars, constants
    constexprs."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, object]
    constants: dict[str, object]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Without a program, as for no token at all, there is nothing to launch: a GPU would refuse it."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self._keywords())

    def compile(self) -> Any:
        """Compiles for Triton's active target without running; returns Triton's compiled kernel."""
        return self.kernel.warmup(grid=self.grid, **self._keywords())

    def _keywords(self) -> dict[str, object]:
        # Fused multiply-adds are stated because Triton's default for them is about to change.
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return self.arguments | self.constants | options


def dot_dtype(dtype: torch.dtype) -> Any:
    """What operands of `tl.dot` are cast to: the model dtype, but fp32 when interpreted.

    Triton's interpreter holds bf16 as raw 16-bit integers, and its dot multiplies those (measured with 3.9).
    """
    return tl.float32 if triton.knobs.runtime.interpret else _TRITON_TYPES[dtype]
