"""Weights that a checkpoint stores in 4 bits, as codes of which eight are in each 32-bit word.

Each number is (code - zero point) * scale, with codes and zero points from 0 to 15. Without zero points, all are 8. A
`CodedWeight` has the same numbers: its table has -8 to 7, and the minimum of a group is (8 - zero point) * scale. This
is exact in float32 if 15 times the scale is, as it always is for scales in 16 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.core.errors import ConfigError
from slora.memory.host_memory import empty_tensor
from slora.models.stored_quantization import CodeFormat, StoredCodes
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.tensor_place import TensorPlace
from slora.models.weights.weight_blocks import WeightTarget, read_tensor
from slora_kernels.coded_weight import BLOCK_COLUMNS, CodedWeight

_MIDDLE = 8
_LARGEST = 15
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
REMEDY = "use the unquantized checkpoint, and set quantization to int8 or int4"
# Locates a tensor of the checkpoint by name and shape.
FindTensor = Callable[[str, tuple[int, ...]], TensorPlace]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tensors of a linear [N, K]. Their names follow that of the linear."""

    codes: str
    scales: str
    zeros: str
    groups: str  # The group of each column. It may be absent.
    is_transposed: bool = False  # Whether the tensors have columns before rows: [K, N].
    has_words_of_rows: bool = (
        False  # Whether a word has codes of adjacent rows. Otherwise, of adjacent columns.
    )
    places: tuple[int, ...] = _IN_ORDER  # Of eight adjacent codes in a word, the lowest bits first.
    added: int = 0  # To the zero points that are stored.

    def count_columns(self) -> int:
        """The columns in one index of the first axis, if the codes are transposed."""
        return 1 if self.has_words_of_rows else 8


_GPTQ = ("qweight", "scales", "qzeros", "g_idx")
_LAYOUTS: dict[CodeFormat, _Layout] = {
    "compressed-tensors": _Layout("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "gptq": _Layout(*_GPTQ, is_transposed=True, added=1),
    "gptq_v2": _Layout(*_GPTQ, is_transposed=True),
    "awq": _Layout(*_GPTQ, is_transposed=True, has_words_of_rows=True, places=(0, 4, 1, 5, 2, 6, 3, 7)),
}


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """The scales of a weight [N, K], float16 or float32 [N, groups], and the minimums if there are any."""

    scales: Tensor
    minimums: Tensor | None

    def cut(self, rows: Sequence[range], groups: range) -> "GroupNumbers":
        """Those of these rows, in this order, and of these groups."""

        def cut(numbers: Tensor) -> Tensor:
            return torch.cat([numbers[part.start : part.stop, groups.start : groups.stop] for part in rows])

        return GroupNumbers(cut(self.scales), None if self.minimums is None else cut(self.minimums))


def refuse_matrix(checkpoint: Checkpoint, name: str) -> ConfigError:
    """The error for an embedding, a head or a router that is stored in 4 bits."""
    return ConfigError(
        f"{checkpoint.directory}: {name} is stored in 4 bits, but embeddings, heads and routers are served only "
        f"unquantized; use a checkpoint that leaves them so, or {REMEDY}"
    )


def is_zero(place: TensorPlace) -> bool:
    """Whether all numbers of a stored tensor are 0."""
    if place.dtype not in _FLOATS:
        return False
    tensor = torch.empty(place.shape, dtype=_FLOATS[place.dtype])
    read_tensor(place, tensor)
    return not tensor.any()


class WordsReader:
    """Reads linears of which eight codes are in each 32-bit word. A linear is named as its unquantized weight would be.

    table: float32 [16], the number of each code. `BlocksReader` has the same methods for the format of bitsandbytes.
    """

    def __init__(self, checkpoint: Checkpoint, stored: StoredCodes, find: FindTensor) -> None:
        self.table = torch.arange(16.0) - _MIDDLE
        self._checkpoint = checkpoint
        self._stored = stored
        self._layout = _LAYOUTS[stored.format]
        self._find = find

    def holds(self, name: str) -> bool:
        """Whether the linear is stored in 4 bits."""
        return _name(name, self._layout.codes) in self._checkpoint

    def find_codes(self, name: str, shape: tuple[int, int], columns: range) -> TensorPlace:
        """Locates the codes. columns: those that this process computes."""
        check_columns(f"{self._checkpoint.directory}: {name}", shape[1], columns, self._stored.group)
        num_rows, width = shape
        words = (-(-num_rows // 8), width) if self._layout.has_words_of_rows else (num_rows, width // 8)
        place = self._locate(name, self._layout.codes, words)
        if place.dtype != "I32":
            raise _not_int32(place)
        if f"{name}_shape" in self._checkpoint:
            self._find(f"{name}_shape", (2,))  # The decoder knows the shape.
        return place

    def read_numbers(
        self, name: str, shape: tuple[int, int], rows: Sequence[range], columns: range
    ) -> GroupNumbers:
        """Reads scales and zero points of these rows and columns, after `find_codes`."""
        num_rows, width = shape
        group = self._stored.group or width
        self._check_order(name, width, group)
        numbers = _multiply(*self._read_scales(name, (num_rows, width // group)))
        return numbers.cut(rows, range(columns.start // group, -(-columns.stop // group)))

    def make_target(
        self, codes: Tensor, rows: Sequence[range], columns: range
    ) -> tuple[WeightTarget, Sequence[range], int]:
        """Returns the target of a tensor's blocks, the ranges of the tensor's first axis to read, and what their sizes
        are a multiple of.

        codes: those of a `CodedWeight` for these rows and columns of the linear.
        """
        if not self._layout.is_transposed:
            return StoredCodesTarget(codes, columns), rows, 1
        size = self._layout.count_columns()
        target = TransposedCodesTarget(codes, rows, self._layout)
        return target, [range(columns.start // size, columns.stop // size)], BLOCK_COLUMNS // size

    def _check_order(self, name: str, width: int, group: int) -> None:
        if _name(name, self._layout.groups) not in self._checkpoint:
            return
        place = self._find(_name(name, self._layout.groups), (width,))
        if not torch.equal(_read_int32(place), torch.arange(width, dtype=torch.int32) // group):
            raise ConfigError(
                f"{place.path}: {place.name} groups columns that are not adjacent (activation order), which is not "
                f"served; {REMEDY}"
            )

    def _read_scales(self, name: str, shape: tuple[int, int]) -> tuple[TensorPlace, Tensor, Tensor | None]:
        """Returns the place of the scales, the scales, and the zero points of the groups. shape: [N, groups]."""
        layout = self._layout
        place = self._locate(name, layout.scales, shape)
        if place.dtype not in _FLOATS:
            raise ConfigError(
                f"{place.path}: {place.name} is {place.dtype}; scales are read in {', '.join(_FLOATS)}"
            )
        scales = torch.empty(place.shape, dtype=_FLOATS[place.dtype])
        read_tensor(place, scales)
        scales = scales.T if layout.is_transposed else scales
        if not self._stored.has_zero_points and _name(name, layout.zeros) not in self._checkpoint:
            return place, scales, None
        zeros = self._locate(name, layout.zeros, (-(-shape[0] // 8), shape[1]))
        words = _read_int32(zeros)
        # Words have adjacent rows in all formats.
        codes = _unpack_words(words if layout.is_transposed else words.T, layout.places).T[: shape[0]]
        if layout.added and bool((codes == _LARGEST).any()):
            raise ConfigError(
                f"{zeros.path}: {zeros.name} has zero points of 15, which some programs read as 16 and others as 0; "
                f"{REMEDY}"
            )
        codes = codes + layout.added
        if not self._stored.has_zero_points and bool((codes != _MIDDLE).any()):
            raise ConfigError(
                f"{zeros.path}: {zeros.name} has zero points other than {_MIDDLE}, but quantization_config says that "
                f"the weights are symmetric; {REMEDY}"
            )
        return place, scales, codes

    def _locate(self, name: str, end: str, shape: tuple[int, int]) -> TensorPlace:
        return self._find(_name(name, end), shape[::-1] if self._layout.is_transposed else shape)


def check_columns(linear: str, width: int, columns: range, group: int | None) -> None:
    """Raises ConfigError if a process would hold a part of a group. group: None if a row has one scale."""
    unit, where = group or BLOCK_COLUMNS, f"{linear} has {width} columns"
    if width % unit:
        raise ConfigError(f"{where}; weights that are stored in 4 bits need a multiple of {unit}: {REMEDY}")
    if columns.start % unit or columns.stop % unit:
        raise ConfigError(
            f"{where}, of which this process computes {columns.start} to {columns.stop - 1}; they are stored in "
            f"groups of {unit}, which can't be cut: choose a smaller --tensor-parallel-size"
        )


def _name(weight: str, end: str) -> str:
    return f"{weight.removesuffix('weight')}{end}"


def _read_int32(place: TensorPlace) -> Tensor:
    if place.dtype != "I32":
        raise _not_int32(place)
    tensor = torch.empty(place.shape, dtype=torch.int32)
    read_tensor(place, tensor)
    return tensor


def _not_int32(place: TensorPlace) -> ConfigError:
    return ConfigError(f"{place.path}: {place.name} is {place.dtype}; it must be I32")


def _multiply(place: TensorPlace, scales: Tensor, zeros: Tensor | None) -> GroupNumbers:
    """zeros: uint8 like `scales`. None: all are 8. place: of the scales."""
    if not scales.isfinite().all():
        raise ConfigError(f"{place.path}: {place.name} contains numbers that are not finite")
    wide = scales.float()
    if zeros is None or bool((zeros == _MIDDLE).all()):
        return GroupNumbers(scales if scales.dtype == torch.float16 else wide, None)
    inexact = (wide * _LARGEST).double() != wide.double() * _LARGEST
    if bool((inexact & (zeros != _MIDDLE)).any()):
        raise ConfigError(
            f"{place.path}: {place.name} has float32 scales whose products with zero points are not exact in float32; "
            f"{REMEDY}"
        )
    return GroupNumbers(wide, (_MIDDLE - zeros.float()) * wide)


def allocate_stored_codes(
    numbers: Sequence[GroupNumbers], width: int, table: Tensor, device: torch.device
) -> CodedWeight:
    """A weight with `width` columns, whose rows follow each other as in `numbers`. Its codes are not filled yet."""
    scales = torch.cat([part.scales.float() for part in numbers])
    if any(part.minimums is not None for part in numbers):
        zeros = [torch.zeros_like(part.scales, dtype=torch.float32) for part in numbers]
        minimums = torch.cat(
            [
                zero if part.minimums is None else part.minimums
                for part, zero in zip(numbers, zeros, strict=True)
            ]
        )
    else:
        if all(part.scales.dtype == torch.float16 for part in numbers):
            scales = scales.half()
        minimums = scales.new_empty(0, 0)
    codes = empty_tensor((len(scales), width // 2), torch.uint8, device)
    return CodedWeight(codes, scales.to(device), minimums.to(device), table.to(device))


def _unpack_words(words: Tensor, places: Sequence[int] = _IN_ORDER) -> Tensor:
    """The codes of int32 [..., n]: uint8 [..., 8 * n]. places: those of eight adjacent codes, the lowest bits first."""
    return (
        (words[..., None] >> torch.tensor([4 * place for place in places]) & 15).to(torch.uint8).flatten(-2)
    )


def _join_columns(rows: Tensor, *, is_first_high: bool = False) -> Tensor:
    """Codes as `CodedWeight` has them, of contiguous bytes [n, K / 2] with two adjacent columns each.

    is_first_high: whether the first of the two columns is in the high bits.
    """
    halves = rows.view(len(rows), -1, 2, BLOCK_COLUMNS // 4)
    first, second = halves[:, :, 0], halves[:, :, 1]
    pairs = (first & 15) | second << 4, first >> 4 | (second & 240)
    return torch.stack(pairs[::-1] if is_first_high else pairs, dim=-1).flatten(1)


def _join_words_of_rows(words: Tensor, places: Sequence[int]) -> Tensor:
    """Codes as `CodedWeight` has them, [N, n / 2], of contiguous words [n, N / 8] with eight adjacent rows each."""
    first, second = words.view(torch.uint8).view(-1, 2, BLOCK_COLUMNS // 2, 4 * words.shape[1]).unbind(1)
    pairs = torch.stack(((first & 15) | second << 4, first >> 4 | (second & 240)), dim=-1)
    eights = pairs.view(-1, words.shape[1], 8).permute(1, 2, 0)
    return eights[:, list(places)].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class StoredCodesTarget:
    """Copies words [N, K / 8] or bytes [N, K / 2] into the codes of a `CodedWeight`.

    codes: rows of `CodedWeight.codes`. columns: those of the stored tensor that the rows hold, whole blocks of 32.
    """

    codes: Tensor
    columns: range
    is_first_high: bool = False  # Whether the high bits of a byte have the first of its two columns.

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        """rows: bytes with two adjacent columns each. Those of words are such, as words are little-endian."""
        joined = _join_columns(rows, is_first_high=self.is_first_high)
        held = joined[:, self.columns.start // 2 : self.columns.stop // 2]
        self.codes[first_row : first_row + len(rows)].copy_(held)
        return True


@dataclass(frozen=True, slots=True)
class TransposedCodesTarget:
    """Copies words that have columns before rows: [K / 8, N], or [K, N / 8].

    codes: as in `StoredCodesTarget`. rows: those of the linear that `codes` has, in this order.
    """

    codes: Tensor
    rows: Sequence[range]
    layout: _Layout

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        """rows: the bytes of whole blocks of 32 columns. first_row: indexes the first axis of the words."""
        words = rows.view(torch.int32)
        if self.layout.has_words_of_rows:
            codes = _join_words_of_rows(words, self.layout.places)
        else:
            codes = _join_columns(words.T.contiguous().view(torch.uint8))
        start = first_row * self.layout.count_columns() // 2
        target = self.codes[:, start : start + codes.shape[1]]
        sizes = [len(part) for part in self.rows]
        for held, part in zip(torch.split(target, sizes), self.rows, strict=True):
            held.copy_(codes[part.start : part.stop])
        return True
