"""A Triton launch as a value that can be run, or compiled for a GPU that is not present.

Launchers return a `Launch` instead of launching. Ahead-of-time compilation therefore compiles exactly what is launched:
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
    """One launch of a kernel, as the call `kernel[grid](**arguments, **constants)`.

    arguments: tensors and run-time scalars. constants: constexprs.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, object]
    constants: dict[str, object]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Launches the kernel. Skips an empty grid, as for a step without tokens, because a GPU rejects it."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self._keywords())

    def compile(self) -> Any:
        """Compiles for Triton's active target without running. Returns Triton's compiled kernel."""
        return self.kernel.warmup(grid=self.grid, **self._keywords())

    def _keywords(self) -> dict[str, object]:
        # enable_fp_fusion is set explicitly because Triton is about to change its default.
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return self.arguments | self.constants | options


def dot_dtype(dtype: torch.dtype) -> Any:
    """The dtype that operands of `tl.dot` are cast to: the model dtype, or fp32 in Triton's interpreter.

    The interpreter holds bf16 as raw 16-bit integers, and its dot multiplies those integers (measured with 3.9).
    """
    return tl.float32 if triton.knobs.runtime.interpret else _TRITON_TYPES[dtype]
