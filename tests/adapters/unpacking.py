"""Reads the rows of a packed adapter one by one, directly from the layout. It is slow, and independent of the
packing code."""

import numpy as np
import numpy.typing as npt

from slora_adapters.peft.adapter import ModuleId
from slora_adapters.peft.packing import PackedAdapter
from slora_kernels.layout import SEGMENT_BYTES, ModelShape

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def unpack(
    packed: PackedAdapter, shape: ModelShape, dtype: str, module_id: ModuleId
) -> tuple[npt.NDArray, npt.NDArray]:
    """A [rank, in width] and B [out width, rank] of one module. bfloat16 is returned as bit patterns."""
    site = [site for site in shape.sites if site.first_module <= module_id][-1]
    _, group_start = packed.layout.groups[site.group]
    rank, first_row, b_start = packed.layout.modules[module_id]
    a_width, b_width = shape.modules[module_id].in_width, shape.modules[module_id].out_width
    a_start = group_start + first_row * shape.row_segments(a_width)
    a = [_row(packed, a_start + row * shape.row_segments(a_width), a_width, dtype) for row in range(rank)]
    b = [_row(packed, b_start + row * shape.row_segments(b_width), b_width, dtype) for row in range(rank)]
    return np.stack(a), np.stack(b).T


def _row(packed: PackedAdapter, segment: int, width: int, dtype: str) -> npt.NDArray:
    start = segment * SEGMENT_BYTES
    num_bytes = width * np.dtype(STORAGE[dtype]).itemsize
    padded = packed.buffer[start : start + -(-num_bytes // SEGMENT_BYTES) * SEGMENT_BYTES]
    assert not padded[num_bytes:].any(), "padding must be zero"
    return padded[:num_bytes].view(STORAGE[dtype])
