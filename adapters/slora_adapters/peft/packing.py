"""Packs an adapter in the byte order that the kernels read (`slora_kernels.layout`), converted to the served dtype.

The A rows of all modules of a site are stored one after another, followed by each module's B, transposed. Every row is
padded with zeros to whole segments. Loading a packed adapter into the page pool only copies pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.peft.adapter import Adapter, Factor, LoraPair
from slora_adapters.peft.module_names import ModuleId
from slora_adapters.peft.number_format import STORAGE, convert, fits, largest_magnitude_bits, may_overflow
from slora_kernels.layout import SEGMENT_BYTES, AdapterLayout, LoraSite, ModelShape, lay_out_adapter

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """A packed adapter.

    scales: float32 [num_modules], 0 for modules that are not adapted. buffer: uint8 [layout.num_bytes], possibly shared
    memory.
    """

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
    """Packs into `buffer` and overwrites all of it. Raises what `Packer` raises."""
    packer = Packer(adapter.pairs, shape, dtype, layout, buffer)
    for pair in adapter.pairs.values():
        packer.write(pair.a, 0, pair.a.values)
        packer.write(pair.b, 0, pair.b.values)
    return PackedAdapter(layout, packer.scales, buffer)


class Packer:
    """Writes an adapter's tensors into a buffer, some rows at a time, in any order.

    buffer: uint8 [layout.num_bytes], aligned to 4 bytes. It is completely overwritten once all tensors are written.
    dtype: "float32", "float16" or "bfloat16".
    scales: float32 [num_modules], 0 for modules that are not adapted.

    Raises ValueError if `dtype` does not have the element size of `shape`.
    """

    def __init__(
        self,
        pairs: Mapping[ModuleId, LoraPair[Any]],
        shape: ModelShape,
        dtype: str,
        layout: AdapterLayout,
        buffer: ByteArray,
    ) -> None:
        if STORAGE[dtype].itemsize != shape.element_bytes:
            raise ValueError(
                f"an element of {dtype} takes {STORAGE[dtype].itemsize} bytes, but the model shape "
                f"has {shape.element_bytes}"
            )
        self.scales = np.zeros(shape.num_modules, np.float32)
        self._dtype = dtype
        self._destinations: dict[str, _Destination] = {}
        for site in shape.sites:
            for module_id, width in enumerate(site.widths, site.first_module):
                pair = pairs.get(module_id)
                if pair is not None:
                    self.scales[module_id] = pair.scale
                    for_a, for_b = _find_slices(site, module_id, width, shape, layout)
                    rows = (
                        buffer[destination].view(STORAGE[dtype]).reshape(pair.rank, -1)
                        for destination in (for_a, for_b)
                    )
                    self._destinations[pair.a.name] = _Destination(
                        next(rows), site.in_width, pair.path, is_transposed=False
                    )
                    self._destinations[pair.b.name] = _Destination(
                        next(rows), width, pair.path, is_transposed=True
                    )

    def write(self, tensor: Factor, first_row: int, values: npt.NDArray[Any]) -> None:
        """Writes rows of a tensor, starting at `first_row`. `values` has the rows as the file stores them. Raises
        AdapterInvalid if a value overflows.
        """
        destination = self._destinations[tensor.name]
        _check_overflow(tensor, values, destination.path, self._dtype)
        served = convert(values, tensor.dtype, self._dtype)
        if destination.is_transposed:
            destination.rows[:, first_row : first_row + len(values)] = served.T
            if first_row == 0:
                destination.rows[:, destination.width :] = 0
        else:
            rows = destination.rows[first_row : first_row + len(values)]
            rows[:, : destination.width] = served
            rows[:, destination.width :] = 0


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where a tensor is written. rows: [rank, width and padding]. is_transposed: whether the tensor is a B, [width,
    rank].
    """

    rows: npt.NDArray[Any]
    width: int
    path: str
    is_transposed: bool


def _find_slices(
    site: LoraSite, module_id: ModuleId, width: int, shape: ModelShape, layout: AdapterLayout
) -> tuple[slice, slice]:
    """Returns the byte ranges of a module's A rows and of its transposed B in the buffer."""
    a_segments, b_segments = shape.row_segments(site.in_width), shape.row_segments(width)
    rank, first_row, b_start = (int(n) for n in layout.modules[module_id])
    a_start = int(layout.groups[site.group, 1]) + first_row * a_segments
    return _segments(a_start, rank * a_segments), _segments(b_start, rank * b_segments)


def _segments(start: int, count: int) -> slice:
    return slice(start * SEGMENT_BYTES, (start + count) * SEGMENT_BYTES)


def _check_overflow(tensor: Factor, values: npt.NDArray[Any], path: str, dtype: str) -> None:
    if may_overflow(tensor.dtype, dtype) and not fits(tensor.dtype, largest_magnitude_bits(values), dtype):
        raise AdapterInvalid((Reason("overflow", f"a weight of {path} overflows in {dtype}"),))
