"""Packs an adapter in the byte order that the kernels read (`slora_kernels.layout`), converted to the served dtype.

The A rows of all modules of a site are stored one after another, followed by each module's B, transposed. The scales
and offsets of a module's output columns follow its B, if it has any (`slora_kernels.layout.Affine`). Every row is
padded with zeros to whole segments. Loading a packed adapter into the page pool only copies pages.

With tensor parallelism, the parts of all ranks are packed one after another (`slora_kernels.partition`). They have one
layout, and the same scales.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

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
from slora_kernels.cpu.matrix_copies import MatrixCopies, Place, round_to_bfloat16
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
    """Packs into `buffer` and overwrites all of it. Raises what `Packer` and its plan raise."""
    plan = PackingPlan(adapter.tensors, partition, dtype, layout)
    packer = Packer(plan, buffer)
    for tensor in adapter.tensors.list_all():
        packer.write(
            plan.plan_pieces([TensorPiece(tensor, 0, tensor.shape[0], 0)]), tensor.values.reshape(-1)
        )
    return PackedAdapter(layout, packer.scales, buffer, partition.size)


class TensorPiece(NamedTuple):
    """A piece of a tensor: some of its rows, in an array of values. The rows of a vector have one element each."""

    tensor: Factor
    first_row: int
    num_rows: int
    start: int  # the index of its first element in the array

    @property
    def row_elements(self) -> int:
        return math.prod(self.tensor.shape[1:])

    def values(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the rows, [num_rows, row_elements]."""
        end = self.start + self.num_rows * self.row_elements
        return array[self.start : end].reshape(self.num_rows, -1)


@dataclass(frozen=True, slots=True)
class PlannedPieces:
    """Pieces in one array, whose tensors have the same dtype. Several adapters may share the plan."""

    dtype: str  # as files name it
    copied: list[TensorPiece]
    copies: MatrixCopies  # of `copied`, from an array of the served dtype to the buffer
    others: list[TensorPiece]


class PackingPlan:
    """Where the tensors of an adapter go in its buffer. Adapters whose tensors only differ in values can share it.

    layout: of each rank's part.
    dtype: the served one, "float32", "float16" or "bfloat16".
    scales: float32 [num_modules], 0 for modules that are not adapted. They are read-only, because adapters share them.

    Raises ValueError if `dtype` does not have the element size of `shape`.
    """

    def __init__(
        self, tensors: AdapterTensors[Any], partition: Partition, dtype: str, layout: AdapterLayout
    ) -> None:
        shape, (pairs, biases, vocabulary, norms, *_) = partition.rank_shape, tensors
        if STORAGE[dtype].itemsize != shape.element_bytes:
            raise ValueError(
                f"an element of {dtype} takes {STORAGE[dtype].itemsize} bytes, but the model shape "
                f"has {shape.element_bytes}"
            )
        self.scales = np.zeros(shape.num_modules, np.float32)
        self.dtype = dtype
        self.num_bytes = partition.size * layout.num_bytes
        self._partition = partition
        self._layout = layout
        self._paths: dict[str, str] = {}
        # For each tensor, one destination for each rank.
        self._destinations: defaultdict[str, list[_Destination | _RowDestination]] = defaultdict(list)
        # The tensors of norms. They are rounded to the served dtype, as those of the base model are.
        self.rounded = {tensor.name for norm in norms.values() for tensor in norm.tensors}
        vectors = [vector for pair in pairs.values() for vector in (pair.magnitude, pair.b_bias)]
        # For each tensor of a norm, magnitude and bias, a destination for each rank that needs it.
        self.columns: dict[str, list[_ColumnDestination]] = {
            vector.name: [] for vector in (*vectors, *biases.values()) if vector is not None
        } | {name: [] for name in self.rounded}
        # What is written before the tensors: places in a buffer of float32 or int32, and their content.
        self.fills: list[tuple[slice, float | npt.NDArray[np.int32]]] = []
        for norm_id, norm in norms.items():
            self._place_norm(norm_id, norm)
        for index, token_rows in enumerate(vocabulary):
            if token_rows is not None:
                self._place_rows(token_rows, layout.rows[index].tolist())
        for site in shape.sites:
            for module_id, width in enumerate(site.widths, site.first_module):
                pair = pairs.get(module_id)
                self._place_columns(module_id, pair, biases.get(module_id))
                if pair is not None:
                    self.scales[module_id] = pair.scale
                    self._place_pair(site, module_id, width, pair)
        self.scales.flags.writeable = False

    def plan_pieces(self, pieces: Sequence[TensorPiece]) -> PlannedPieces:
        """Plans the writing of pieces, whose tensors have the same dtype."""
        copies, copied, others = MatrixCopies(), [], []
        for piece in pieces:
            destinations = self._destinations.get(piece.tensor.name, ())
            matrices = [one for one in destinations if isinstance(one, _Destination) and one.num_experts == 1]
            if matrices:
                copied.append(piece)
                for matrix in matrices:
                    matrix.add_copies(piece, copies)
            else:
                others.append(piece)
        return PlannedPieces(pieces[0].tensor.dtype, copied, copies, others)

    def find_path(self, tensor: Factor) -> str:
        """Returns the path of the module of a tensor, for people."""
        return self._paths.get(tensor.name, tensor.name)

    def find_destinations(self, tensor: Factor) -> "Sequence[_Destination | _RowDestination]":
        """Returns where a tensor of two dimensions is written."""
        return self._destinations.get(tensor.name, ())

    def _place_pair(self, site: LoraSite, module_id: ModuleId, width: int, pair: LoraPair[Any]) -> None:
        self._paths |= {pair.a.name: pair.path, pair.b.name: pair.path}
        shape, layout, size = self._partition.rank_shape, self._layout, STORAGE[self.dtype].itemsize
        num_rows = pair.num_experts * pair.rank
        a_place, b_place = (
            Place(where.start // size, num_rows, pitch, pitch)
            for where in _find_slices(site, module_id, width, shape, layout)
            for pitch in [(where.stop - where.start) // (num_rows * size)]
        )
        for rank in range(self._partition.size):
            part, first = self._partition.part(module_id, rank), rank * layout.num_bytes // size
            own = [
                (place._replace(start=first + place.start), parts)
                for place, parts in ((a_place, (part.inputs,)), (b_place, part.outputs))
            ]
            a_own, b_own = own[::-1] if pair.is_transposed else own
            self._destinations[pair.a.name].append(_Destination(*a_own, is_transposed=False))
            self._destinations[pair.b.name].append(
                _Destination(*b_own, is_transposed=True, num_experts=pair.num_experts)
            )

    def _place_rows(self, token_rows: TrainedRows[Any], place: list[int]) -> None:
        """Notes the token ids of replaced rows, and where the rows are written. All ranks hold all rows."""
        count, first_id, first_row = place
        ids = np.arange(count) if token_rows.token_ids is None else np.array(token_rows.token_ids)
        order = ids.argsort()
        shape, size = self._partition.shape, STORAGE[self.dtype].itemsize
        pitch = shape.row_segments(shape.hidden_size) * SEGMENT_BYTES // size
        padded = np.zeros((first_row - first_id) * SEGMENT_BYTES // 4, np.int32)
        padded[:count] = ids[order]
        for rank in range(self._partition.size):
            begin = rank * self._layout.num_bytes
            first = (begin + first_id * SEGMENT_BYTES) // 4
            self.fills.append((slice(first, first + len(padded)), padded))
            rows = Place((begin + first_row * SEGMENT_BYTES) // size, count, pitch, pitch)
            self._destinations[token_rows.tensor.name].append(_RowDestination(rows, order.argsort()))

    def _place_norm(self, norm_id: int, norm: NormTensors[Any]) -> None:
        """Notes where the tensors of a norm are written. All ranks hold all of them."""
        shape, start = self._partition.shape.norms[norm_id], int(self._layout.norms[norm_id, 1])
        count = affine_segments(shape.width)
        for rank in range(self._partition.size):
            for index, tensor in enumerate(norm.tensors):
                row = self._find_floats(rank, start + index * count, count)
                self.fills.append((row, 1.0 if shape.adds_one and tensor is norm.weight else 0.0))
                self.columns[tensor.name].append(_ColumnDestination(row.start, (range(shape.width),)))

    def _place_columns(self, module_id: ModuleId, pair: LoraPair[Any] | None, bias: Factor | None) -> None:
        """Fills a module's scales with ones and its offsets with zeros, and notes where its tensors are written."""
        is_affine, start, *_ = (int(number) for number in self._layout.affine[module_id])
        if not is_affine:
            return
        partition = self._partition
        in_width = partition.shape.modules[module_id].in_width
        count = affine_segments(partition.rank_shape.modules[module_id].out_width)
        for rank in range(partition.size):
            part = partition.part(module_id, rank)
            scales = self._find_floats(rank, start, count)
            offsets = self._find_floats(rank, start + count, count)
            has_magnitude = pair is not None and pair.magnitude is not None
            self.fills += [(scales, 0.0 if has_magnitude else 1.0), (offsets, 0.0)]
            if pair is not None and pair.magnitude is not None:
                self.columns[pair.magnitude.name].append(_ColumnDestination(scales.start, part.outputs))
            # The outputs of the ranks are summed where their inputs are divided, so only one rank adds offsets.
            if rank == 0 or len(part.inputs) == in_width:
                if pair is not None and pair.b_bias is not None:
                    self.columns[pair.b_bias.name].append(
                        _ColumnDestination(offsets.start, part.outputs, pair.scale)
                    )
                if bias is not None:
                    self.columns[bias.name].append(_ColumnDestination(offsets.start, part.outputs))

    def _find_floats(self, rank: int, first_segment: int, num_segments: int) -> slice:
        """Returns a place in the buffer in elements of float32."""
        start = (rank * self._layout.num_bytes + first_segment * SEGMENT_BYTES) // 4
        return slice(start, start + num_segments * SEGMENT_BYTES // 4)


class Packer:
    """Writes the tensors of an adapter into a buffer, some rows at a time, in any order, on several threads at once.

    buffer: uint8 [plan.num_bytes], aligned to 4 bytes. It is completely overwritten once all tensors are written.
    scales: float32 [num_modules], 0 for modules that are not adapted.
    """

    def __init__(self, plan: PackingPlan, buffer: ByteArray) -> None:
        assert buffer.size == plan.num_bytes, f"{buffer.size} bytes instead of {plan.num_bytes}"
        self.scales = plan.scales.copy()
        self._plan = plan
        self._elements, self._floats = buffer.view(STORAGE[plan.dtype]), buffer.view(np.float32)
        # Two tensors may be added to the same columns.
        self._adding = Lock()
        for place, content in plan.fills:
            words = self._floats if isinstance(content, float) else self._floats.view(np.int32)
            words[place] = content

    def write(self, planned: PlannedPieces, values: npt.NDArray[Any]) -> None:
        """Writes pieces that the plan of this packer has planned. Raises AdapterInvalid if a value overflows.

        values: the array that has the pieces, one-dimensional, as the file stores it.
        """
        if planned.copied:
            planned.copies.run(self._convert_copied(planned, values), self._elements)
        for piece in planned.others:
            if piece.tensor.name in self._plan.columns:
                self._add_columns(piece, values)
            else:
                served = self._convert(piece, values)
                for destination in self._plan.find_destinations(piece.tensor):
                    destination.write(piece, served, self._elements)

    def _convert_copied(self, planned: PlannedPieces, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the whole array in the served dtype. Only pieces that are copied are checked for overflow."""
        dtype, served = planned.dtype, self._plan.dtype
        rounded = round_to_bfloat16(values) if (dtype, served) == ("F32", "bfloat16") else None
        if rounded is None:
            converted, is_fitting = convert(values, dtype, served), self._fits(dtype, values)
        else:
            converted, is_fitting = rounded[0], fits(dtype, rounded[1], served)
        if not is_fitting:
            for piece in planned.copied:
                self._check(piece, values)
        return converted

    def _fits(self, dtype: str, values: npt.NDArray[Any]) -> bool:
        served = self._plan.dtype
        return not may_overflow(dtype, served) or fits(dtype, largest_magnitude_bits(values), served)

    def _check(self, piece: TensorPiece, values: npt.NDArray[Any]) -> None:
        if not self._fits(piece.tensor.dtype, piece.values(values)):
            path = self._plan.find_path(piece.tensor)
            raise AdapterInvalid((Reason("overflow", f"a weight of {path} overflows in {self._plan.dtype}"),))

    def _convert(self, piece: TensorPiece, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the rows in the served dtype."""
        self._check(piece, values)
        return convert(piece.values(values), piece.tensor.dtype, self._plan.dtype)

    def _add_columns(self, piece: TensorPiece, values: npt.NDArray[Any]) -> None:
        numbers, dtype = piece.values(values), piece.tensor.dtype
        if piece.tensor.name in self._plan.rounded:
            numbers, dtype = self._convert(piece, values), STORED_NAMES[self._plan.dtype]
        floats = convert(numbers.reshape(-1), dtype, "float32")
        with self._adding:
            for column in self._plan.columns[piece.tensor.name]:
                column.write(piece.first_row, floats, self._floats)


@dataclass(frozen=True, slots=True)
class _ColumnDestination:
    """Where one rank's part of a magnitude, a bias or a norm is added."""

    start: int  # the index of the first column in the buffer, in elements of float32
    parts: tuple[range, ...]  # the columns to write
    factor: float = 1.0

    def write(self, first: int, values: npt.NDArray[np.float32], buffer: npt.NDArray[np.float32]) -> None:
        end, width = first + len(values), self.start
        for part in self.parts:
            begin, stop = max(first, part.start), min(end, part.stop)
            if begin < stop:
                place = slice(width + begin - part.start, width + stop - part.start)
                buffer[place] += values[begin - first : stop - first] * np.float32(self.factor)
            width += len(part)


@dataclass(frozen=True, slots=True)
class _RowDestination:
    """Where one rank's copy of replaced rows is written."""

    place: Place  # [n, hidden and padding]
    order: npt.NDArray[np.int64]  # the place of each row of the tensor

    def write(self, piece: TensorPiece, values: npt.NDArray[Any], buffer: npt.NDArray[Any]) -> None:
        rows, order = self.place.view(buffer), self.order[piece.first_row : piece.first_row + piece.num_rows]
        rows[order, : values.shape[1]], rows[order, values.shape[1] :] = values, 0


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where one rank's part of a tensor of a pair is written."""

    place: Place  # [num_experts * rank, width and padding]
    parts: tuple[range, ...]  # of an A, the columns to write; of a B, the rows
    is_transposed: bool  # whether the tensor is a B, [width, num_experts * rank]
    num_experts: int = 1  # of a B. If there are several, `write` has to order its columns.

    def add_copies(self, piece: TensorPiece, copies: MatrixCopies) -> None:
        """Adds the copies of what this rank holds of a piece."""
        first_row, pitch, end, width = piece.first_row, piece.row_elements, self._count_width(), 0
        for part in self.parts:
            stop = width + len(part)
            if not self.is_transposed:
                # The padding comes with the last part.
                stop_columns = stop if part is not self.parts[-1] else self.place.num_columns
                copies.copy(
                    Place(piece.start + part.start, piece.num_rows, len(part), pitch),
                    self._cut(first_row, piece.num_rows, width, stop_columns),
                )
            elif rows := self._find_rows(piece, part):
                copies.transpose(
                    Place(piece.start + (rows.start - first_row) * pitch, len(rows), pitch, pitch),
                    self._cut(
                        0, self.place.num_rows, *(width + row - part.start for row in (rows.start, rows.stop))
                    ),
                )
            width = stop
        if self.is_transposed and first_row == 0 and end < self.place.num_columns:
            nothing = Place(piece.start, self.place.num_rows, 0, 0)
            copies.copy(nothing, self._cut(0, self.place.num_rows, end, self.place.num_columns))

    def write(self, piece: TensorPiece, values: npt.NDArray[Any], buffer: npt.NDArray[Any]) -> None:
        """Writes what this rank holds of a piece of a B of experts, whose columns are in the order [rank, expert]."""
        target, width = self.place.view(buffer), 0
        for part in self.parts:
            if rows := self._find_rows(piece, part):
                first = width + rows.start - part.start
                own = values[rows.start - piece.first_row : rows.stop - piece.first_row]
                by_expert = own.reshape(len(rows), -1, self.num_experts).transpose(2, 1, 0)
                target[:, first : first + len(rows)] = by_expert.reshape(len(target), -1)
            width += len(part)
        if piece.first_row == 0:
            target[:, width:] = 0

    def _count_width(self) -> int:
        return sum(map(len, self.parts))

    def _cut(self, first_row: int, num_rows: int, first_column: int, end_column: int) -> Place:
        start = self.place.start + first_row * self.place.pitch + first_column
        return Place(start, num_rows, end_column - first_column, self.place.pitch)

    @staticmethod
    def _find_rows(piece: TensorPiece, part: range) -> range:
        """Returns the rows of the tensor that a piece and a part have in common."""
        return range(max(piece.first_row, part.start), min(piece.first_row + piece.num_rows, part.stop))


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
