"""Writes an adapter in the byte order that the kernels read (`slora_kernels.layout`), converted to the served
dtype.

A's rows of a linear group lie one after another, then each module's B transposed; every row is padded with
zeros to whole segments. What comes out needs no further work: loading it into the pool is copying pages.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.adapter import Adapter, LoraPair
from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.module_names import ModuleId
from slora_adapters.number_format import STORAGE, convert, fits, largest_magnitude_bits, may_overflow
from slora_adapters.tensor_file import StoredTensor
from slora_kernels.layout import SEGMENT_BYTES, AdapterLayout, LoraSite, ModelShape, lay_out_adapter

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """scales: float32 [num_modules], 0 where not adapted. buffer: uint8 [layout.num_bytes], possibly shared memory."""

    layout: AdapterLayout
    scales: npt.NDArray[np.float32]
    buffer: ByteArray


def pack(adapter: Adapter, shape: ModelShape, dtype: str) -> PackedAdapter:
    """Packs into new memory. See `pack_into`."""
    layout = lay_out_adapter(shape, adapter.ranks(shape))
    return pack_into(adapter, shape, dtype, layout, np.empty(layout.num_bytes, np.uint8))


def pack_into(
    adapter: Adapter, shape: ModelShape, dtype: str, layout: AdapterLayout, buffer: ByteArray
) -> PackedAdapter:
    """Overwrites all of `buffer`, uint8 [layout.num_bytes], aligned to 4 bytes; nothing of its old content
    stays.

    `dtype` is "float32", "float16" or "bfloat16". Raises AdapterInvalid if a weight overflows in it,
    ValueError if `shape` is for another element size.
    """
    if STORAGE[dtype].itemsize != shape.element_bytes:
        raise ValueError(
            f"{dtype} takes {STORAGE[dtype].itemsize} bytes, the shape says {shape.element_bytes}"
        )
    scales = np.zeros(shape.num_modules, np.float32)
    for site in shape.sites:
        for module_id, width in enumerate(site.widths, site.first_module):
            pair = adapter.pairs.get(module_id)
            if pair is not None:
                scales[module_id] = pair.scale
                _check_overflow(pair, dtype)
                to_a, to_b = _places(site, module_id, width, shape, layout)
                _write_rows(buffer[to_a], site.in_width, _served(pair.a, dtype))
                _write_rows(buffer[to_b], width, _served(pair.b, dtype).T)
    return PackedAdapter(layout, scales, buffer)


def _places(
    site: LoraSite, module_id: ModuleId, width: int, shape: ModelShape, layout: AdapterLayout
) -> tuple[slice, slice]:
    """Where a module's rows of A and of B transposed lie in the buffer, in bytes."""
    a_segments, b_segments = shape.row_segments(site.in_width), shape.row_segments(width)
    rank, first_row, b_start = (int(n) for n in layout.modules[module_id])
    a_start = int(layout.groups[site.group, 1]) + first_row * a_segments
    return _segments(a_start, rank * a_segments), _segments(b_start, rank * b_segments)


def _segments(start: int, count: int) -> slice:
    return slice(start * SEGMENT_BYTES, (start + count) * SEGMENT_BYTES)


def _served(tensor: StoredTensor, dtype: str) -> npt.NDArray[Any]:
    return convert(tensor.values, tensor.dtype, dtype)


def _write_rows(place: ByteArray, width: int, rows: npt.NDArray[Any]) -> None:
    padded = place.view(rows.dtype).reshape(rows.shape[0], -1)
    padded[:, :width] = rows
    padded[:, width:] = 0


def _check_overflow(pair: LoraPair, dtype: str) -> None:
    for tensor in (pair.a, pair.b):
        if may_overflow(tensor.dtype, dtype) and not fits(
            tensor.dtype, largest_magnitude_bits(tensor.values), dtype
        ):
            reason = Reason("overflow", f"a weight of {pair.path} overflows in {dtype}")
            raise AdapterInvalid((reason,))
