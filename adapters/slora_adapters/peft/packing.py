"""Packs an adapter in the byte order that the kernels read (`slora_kernels.layout`), converted to the served dtype.

The A rows of all modules of a site are stored one after another, followed by each module's B, transposed. The scales
and offsets of a module's output columns follow its B, if it has any (`slora_kernels.layout.Affine`). Every row is
padded with zeros to whole segments. Loading a packed adapter into the page pool only copies pages.

With tensor parallelism, the parts of all ranks are packed one after another (`slora_kernels.partition`). They have one
layout, and the same scales.
"""

from collections import defaultdict
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.peft.adapter import Adapter, AdapterTensors, LoraPair, ModuleId, NormTensors, TrainedRows
from slora_adapters.peft.tensor_file import (
    STORAGE,
    STORED_NAMES,
    Factor,
    convert,
    fits,
    largest_magnitude_bits,
    may_overflow,
)
from slora_kernels.cpu.transposition import copy_transposed
from slora_kernels.layout import SEGMENT_BYTES, AdapterLayout, LoraSite, ModelShape, affine_segments
from slora_kernels.partition import Partition

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """A packed adapter."""

    layout: AdapterLayout  # of each rank's part
    scales: npt.NDArray[np.float32]  # float32 [num_modules], 0 for modules that are not adapted
    buffer: ByteArray  # uint8 [num_ranks * layout.num_bytes], possibly shared memory
    num_ranks: int = 1

    @property
    def num_bytes(self) -> int:
        """The bytes of all ranks' parts."""
        return self.num_ranks * self.layout.num_bytes

    def part(self, rank: int) -> ByteArray:
        """The part of one rank, uint8 [layout.num_bytes]."""
        return self.buffer[rank * self.layout.num_bytes : (rank + 1) * self.layout.num_bytes]


def pack(adapter: Adapter, shape: ModelShape, dtype: str, num_ranks: int = 1) -> PackedAdapter:
    """Packs into new memory. See `pack_into`."""
    partition = Partition(shape, num_ranks)
    layout = adapter.tensors.lay_out(partition.rank_shape)
    return pack_into(adapter, partition, dtype, layout, np.empty(num_ranks * layout.num_bytes, np.uint8))


def pack_into(
    adapter: Adapter, partition: Partition, dtype: str, layout: AdapterLayout, buffer: ByteArray
) -> PackedAdapter:
    """Packs into `buffer` and overwrites all of it. Raises what `Packer` raises."""
    packer = Packer(adapter.tensors, partition, dtype, layout, buffer)
    for tensor in adapter.tensors.list_all():
        packer.write(tensor, 0, tensor.values)
    return PackedAdapter(layout, packer.scales, buffer, partition.size)


class Packer:
    """Writes an adapter's tensors into a buffer, some rows at a time, in any order, on several threads at once.

    layout: of each rank's part.
    buffer: uint8 [num_ranks * layout.num_bytes], aligned to 4 bytes. It is completely overwritten once all tensors are
    written.
    dtype: "float32", "float16" or "bfloat16".
    scales: float32 [num_modules], 0 for modules that are not adapted.

    Raises ValueError if `dtype` does not have the element size of `shape`.
    """

    def __init__(
        self,
        tensors: AdapterTensors[Any],
        partition: Partition,
        dtype: str,
        layout: AdapterLayout,
        buffer: ByteArray,
    ) -> None:
        shape, (pairs, biases, vocabulary, norms, *_) = partition.rank_shape, tensors
        if STORAGE[dtype].itemsize != shape.element_bytes:
            raise ValueError(
                f"an element of {dtype} takes {STORAGE[dtype].itemsize} bytes, but the model shape "
                f"has {shape.element_bytes}"
            )
        self.scales = np.zeros(shape.num_modules, np.float32)
        self._dtype = dtype
        self._paths: dict[str, str] = {}
        # For each tensor, one destination for each rank.
        self._destinations: defaultdict[str, list[_Destination | _RowDestination]] = defaultdict(list)
        vectors = [vector for pair in pairs.values() for vector in (pair.magnitude, pair.b_bias)]
        # The tensors of norms. They are rounded to the served dtype, as those of the base model are.
        self._rounded = {tensor.name for norm in norms.values() for tensor in norm.tensors}
        # For each tensor of a norm, magnitude and bias, a destination for each rank that needs it.
        self._columns: dict[str, list[_ColumnDestination]] = {
            vector.name: [] for vector in (*vectors, *biases.values()) if vector is not None
        } | {name: [] for name in self._rounded}
        # Two tensors may be added to the same columns.
        self._adding = Lock()
        for norm_id, norm in norms.items():
            self._place_norm(norm_id, norm, partition, layout, buffer)
        for index, token_rows in enumerate(vocabulary):
            if token_rows is not None:
                self._place_rows(token_rows, layout.rows[index].tolist(), partition, layout, buffer)
        for site in shape.sites:
            for module_id, width in enumerate(site.widths, site.first_module):
                pair = pairs.get(module_id)
                self._place_columns(module_id, pair, biases.get(module_id), partition, layout, buffer)
                if pair is not None:
                    self.scales[module_id] = pair.scale
                    self._paths |= {pair.a.name: pair.path, pair.b.name: pair.path}
                    slices = _find_slices(site, module_id, width, shape, layout)
                    num_rows = pair.num_experts * pair.rank
                    for rank in range(partition.size):
                        part = partition.part(module_id, rank)
                        memory = buffer[rank * layout.num_bytes : (rank + 1) * layout.num_bytes]
                        for_a, for_b = (
                            memory[where].view(STORAGE[dtype]).reshape(num_rows, -1) for where in slices
                        )
                        own = (for_a, (part.inputs,)), (for_b, part.outputs)
                        (a_rows, a_parts), (b_rows, b_parts) = own[::-1] if pair.is_transposed else own
                        self._destinations[pair.a.name].append(
                            _Destination(a_rows, a_parts, is_transposed=False)
                        )
                        self._destinations[pair.b.name].append(
                            _Destination(b_rows, b_parts, is_transposed=True, num_experts=pair.num_experts)
                        )

    def write(self, tensor: Factor, first_row: int, values: npt.NDArray[Any]) -> None:
        """Writes rows of a tensor, starting at `first_row`. `values` has the rows as the file stores them. Raises
        AdapterInvalid if a value overflows.
        """
        if tensor.name in self._columns:
            numbers, dtype = values.reshape(-1), tensor.dtype
            if tensor.name in self._rounded:
                _check_overflow(tensor, values, tensor.name, self._dtype)
                numbers, dtype = convert(numbers, dtype, self._dtype), STORED_NAMES[self._dtype]
            numbers = convert(numbers, dtype, "float32")
            with self._adding:
                for column in self._columns[tensor.name]:
                    column.write(first_row, numbers)
            return
        _check_overflow(tensor, values, self._paths.get(tensor.name, tensor.name), self._dtype)
        served = convert(values, tensor.dtype, self._dtype)
        for destination in self._destinations[tensor.name]:
            destination.write(first_row, served)

    def _place_rows(
        self,
        token_rows: TrainedRows[Any],
        place: list[int],
        partition: Partition,
        layout: AdapterLayout,
        buffer: ByteArray,
    ) -> None:
        """Writes the token ids of replaced rows, and notes where the rows are written. All ranks hold all rows."""
        count, first_id, first_row = place
        ids = np.arange(count) if token_rows.token_ids is None else np.array(token_rows.token_ids)
        order = ids.argsort()
        row_segments = partition.shape.row_segments(partition.shape.hidden_size)
        for rank in range(partition.size):
            memory = buffer[rank * layout.num_bytes : (rank + 1) * layout.num_bytes]
            own_ids = memory[_segments(first_id, first_row - first_id)].view(np.int32)
            own_ids[:count], own_ids[count:] = ids[order], 0
            rows = memory[_segments(first_row, count * row_segments)].view(STORAGE[self._dtype])
            self._destinations[token_rows.tensor.name].append(
                _RowDestination(rows.reshape(count, -1), order.argsort())
            )

    def _place_norm(
        self,
        norm_id: int,
        norm: NormTensors[Any],
        partition: Partition,
        layout: AdapterLayout,
        buffer: ByteArray,
    ) -> None:
        """Notes where the tensors of a norm are written. All ranks hold all of them."""
        shape, start = partition.shape.norms[norm_id], int(layout.norms[norm_id, 1])
        for rank in range(partition.size):
            memory = buffer[rank * layout.num_bytes : (rank + 1) * layout.num_bytes]
            rows = memory[_segments(start, len(norm.tensors) * affine_segments(shape.width))]
            for tensor, row in zip(
                norm.tensors, rows.view(np.float32).reshape(len(norm.tensors), -1), strict=True
            ):
                row[:] = 1.0 if shape.adds_one and tensor is norm.weight else 0.0
                self._columns[tensor.name].append(_ColumnDestination(row, (range(shape.width),)))

    def _place_columns(
        self,
        module_id: ModuleId,
        pair: LoraPair[Any] | None,
        bias: Factor | None,
        partition: Partition,
        layout: AdapterLayout,
        buffer: ByteArray,
    ) -> None:
        """Fills a module's scales with ones and its offsets with zeros, and notes where its tensors are written."""
        is_affine, start, *_ = (int(number) for number in layout.affine[module_id])
        if not is_affine:
            return
        shape = partition.rank_shape
        width, in_width = shape.modules[module_id].out_width, partition.shape.modules[module_id].in_width
        count = affine_segments(width)
        for rank in range(partition.size):
            part = partition.part(module_id, rank)
            memory = buffer[rank * layout.num_bytes : (rank + 1) * layout.num_bytes]
            rows = memory[_segments(start, 2 * count)].view(np.float32).reshape(2, -1)
            rows[0], rows[1] = 1.0, 0.0
            scales, offsets = rows
            if pair is not None and pair.magnitude is not None:
                scales[:] = 0.0
                self._columns[pair.magnitude.name].append(_ColumnDestination(scales, part.outputs))
            # The outputs of the ranks are summed where their inputs are divided, so only one rank adds offsets.
            if rank == 0 or len(part.inputs) == in_width:
                if pair is not None and pair.b_bias is not None:
                    self._columns[pair.b_bias.name].append(
                        _ColumnDestination(offsets, part.outputs, pair.scale)
                    )
                if bias is not None:
                    self._columns[bias.name].append(_ColumnDestination(offsets, part.outputs))


@dataclass(frozen=True, slots=True)
class _ColumnDestination:
    """Where one rank's part of a magnitude, a bias or a norm is added."""

    row: npt.NDArray[np.float32]  # [width and padding]
    parts: tuple[range, ...]  # the columns to write
    factor: float = 1.0

    def write(self, first: int, values: npt.NDArray[np.float32]) -> None:
        end, width = first + len(values), 0
        for part in self.parts:
            begin, stop = max(first, part.start), min(end, part.stop)
            if begin < stop:
                place = slice(width + begin - part.start, width + stop - part.start)
                self.row[place] += values[begin - first : stop - first] * np.float32(self.factor)
            width += len(part)


@dataclass(frozen=True, slots=True)
class _RowDestination:
    """Where one rank's copy of replaced rows is written."""

    rows: npt.NDArray[Any]  # [n, hidden and padding]
    places: npt.NDArray[np.int64]  # the place of each row of the tensor

    def write(self, first_row: int, values: npt.NDArray[Any]) -> None:
        places = self.places[first_row : first_row + len(values)]
        self.rows[places, : values.shape[1]], self.rows[places, values.shape[1] :] = values, 0


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where one rank's part of a tensor is written."""

    rows: npt.NDArray[Any]  # [num_experts * rank, width and padding]
    parts: tuple[range, ...]  # of an A, the columns to write; of a B, the rows
    is_transposed: bool  # whether the tensor is a B, [width, num_experts * rank]
    num_experts: int = 1

    def write(self, first_row: int, values: npt.NDArray[Any]) -> None:
        """Writes what this rank holds of rows [first_row, first_row + n) of the tensor."""
        end = first_row + len(values)
        width = 0
        for part in self.parts:
            if self.is_transposed:
                first, stop = max(first_row, part.start), min(end, part.stop)
                if first < stop:
                    place = slice(width + first - part.start, width + stop - part.start)
                    columns = values[first - first_row : stop - first_row]
                    if self.num_experts > 1:
                        # The columns of the file are in the order [rank, num_experts].
                        by_expert = columns.reshape(stop - first, -1, self.num_experts).transpose(2, 1, 0)
                        self.rows[:, place] = by_expert.reshape(len(self.rows), -1)
                    else:
                        copy_transposed(columns, self.rows[:, place])
            else:
                self.rows[first_row:end, width : width + len(part)] = values[:, part.start : part.stop]
            width += len(part)
        if not self.is_transposed:
            self.rows[first_row:end, width:] = 0
        elif first_row == 0:
            self.rows[:, width:] = 0


def _find_slices(
    site: LoraSite, module_id: ModuleId, width: int, shape: ModelShape, layout: AdapterLayout
) -> tuple[slice, slice]:
    """Returns the byte ranges of a module's A rows and of its transposed B in the buffer."""
    a_segments, b_segments = shape.row_segments(site.in_width), shape.row_segments(width)
    rank, first_row, b_start = (int(n) for n in layout.modules[module_id])
    a_start, num_rows = int(layout.groups[site.group, 1]) + first_row * a_segments, site.num_experts * rank
    return _segments(a_start, num_rows * a_segments), _segments(b_start, num_rows * b_segments)


def _segments(start: int, count: int) -> slice:
    return slice(start * SEGMENT_BYTES, (start + count) * SEGMENT_BYTES)


def _check_overflow(tensor: Factor, values: npt.NDArray[Any], path: str, dtype: str) -> None:
    if may_overflow(tensor.dtype, dtype) and not fits(tensor.dtype, largest_magnitude_bits(values), dtype):
        raise AdapterInvalid((Reason("overflow", f"a weight of {path} overflows in {dtype}"),))
