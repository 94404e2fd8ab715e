"""Where a tensor is in a checkpoint's file, and how its bytes become the weights of transformers' class."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

# Bytes of one element. Other dtypes of safetensors can't be used as weights.
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in a file. The last three fields are about GGUF files only."""

    name: str
    path: Path
    dtype: str  # safetensors' name, or GGUF's name of a type with blocks.
    shape: tuple[int, ...]  # Row-major.
    offset: int  # Of the first of `num_bytes` bytes.
    block: tuple[int, int] | None = None  # Numbers and bytes of a block. None: one element each.
    # Rows of a head if they are stored in the order of the pairs that rotate together. 0: the halves follow each other.
    paired_rows: int = 0
    added: float = 0.0  # What was added to each number before it was stored.

    @property
    def num_bytes(self) -> int:
        return self._measure(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is one index of the first axis."""
        return self._measure(self.shape[1:])

    def item(self, index: int) -> "TensorPlace":
        """The part of the tensor at one index of the first axis."""
        return replace(self, shape=self.shape[1:], offset=self.offset + index * self.row_bytes)

    def _measure(self, shape: tuple[int, ...]) -> int:
        numbers, num_bytes = self.block or (1, ELEMENT_BYTES[self.dtype])
        return math.prod(shape) // numbers * num_bytes
