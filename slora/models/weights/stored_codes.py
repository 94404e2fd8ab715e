"""Weights that a checkpoint stores in 4 bits, as codes of which eight are in each 32-bit word.

Each number is (code - zero point) * scale, with codes and zero points from 0 to 15. Without zero points, all are 8. A
`CodedWeight` has the same numbers: its table has -8 to 7, and the minimum of a group is (8 - zero point) * scale. This
is exact in float32 if 15 times the scale is, as it always is for scales in 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slora.core.errors import ConfigError
from slora.memory.host_memory import empty_tensor
from slora_kernels.coded_weight import BLOCK_COLUMNS, CodedWeight

_MIDDLE = 8
_LARGEST = 15.0
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNQUANTIZED = "use the unquantized checkpoint, and set quantization to int8 or int4"


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """The scales of a weight [N, K], float16 or float32 [N, groups], and the minimums if there are any."""

    scales: Tensor
    minimums: Tensor | None

    def cut(self, rows: Sequence[range], columns: range) -> "GroupNumbers":
        """Those of the groups in `columns`, which index groups, of these rows in this order."""

        def cut(numbers: Tensor) -> Tensor:
            return torch.cat([numbers[part.start : part.stop, columns.start : columns.stop] for part in rows])

        return GroupNumbers(cut(self.scales), None if self.minimums is None else cut(self.minimums))


def find_group_numbers(name: str, path: Path, scales: Tensor, zeros: Tensor | None) -> GroupNumbers:
    """zeros: uint8 [N, groups] like `scales`. None: all are 8. name, path: of the scales, for errors."""
    if scales.dtype not in _SCALE_DTYPES:
        raise ConfigError(f"{path}: {name} is {scales.dtype}; scales are read in F16, BF16 or F32")
    if not scales.isfinite().all():
        raise ConfigError(f"{path}: {name} contains numbers that are not finite")
    wide = scales.float()
    if zeros is None or bool((zeros == _MIDDLE).all()):
        return GroupNumbers(scales if scales.dtype == torch.float16 else wide, None)
    inexact = (wide * _LARGEST).double() != wide.double() * _LARGEST
    if bool((inexact & (zeros != _MIDDLE)).any()):
        raise ConfigError(
            f"{path}: {name} has float32 scales whose products with zero points are not exact in float32; "
            f"{UNQUANTIZED}"
        )
    return GroupNumbers(wide, (_MIDDLE - zeros.float()) * wide)


def allocate_stored_codes(numbers: Sequence[GroupNumbers], width: int, device: torch.device) -> CodedWeight:
    """A weight with `width` columns, whose rows follow each other as in `numbers`. Its codes are not filled yet."""
    scales = torch.cat([part.scales.float() for part in numbers])
    if any(part.minimums is not None for part in numbers):
        minimums = torch.cat(
            [
                part.minimums if part.minimums is not None else torch.zeros_like(part.scales).float()
                for part in numbers
            ]
        )
    else:
        if all(part.scales.dtype == torch.float16 for part in numbers):
            scales = scales.half()
        minimums = scales.new_empty(0, 0)
    codes = empty_tensor((len(scales), width // 2), torch.uint8, device)
    table = torch.arange(16.0, device=device) - _MIDDLE
    return CodedWeight(codes, scales.to(device), minimums.to(device), table)


def unpack_words(words: Tensor) -> Tensor:
    """The codes of int32 [..., n], the lowest bits of a word first: uint8 [..., 8 * n]."""
    return (words[..., None] >> torch.arange(0, 32, 4) & 15).to(torch.uint8).flatten(-2)


@dataclass(frozen=True, slots=True)
class StoredCodesTarget:
    """Copies stored codes into those of a `CodedWeight`.

    codes: rows of `CodedWeight.codes`. columns: those of the stored tensor that the rows hold, whole blocks of 32.
    """

    codes: Tensor
    columns: range

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        """rows: the bytes of the words [n, K / 2]. Words are little-endian, so a byte has two adjacent columns."""
        halves = rows.view(len(rows), -1, 2, BLOCK_COLUMNS // 4)
        first, second = halves[:, :, 0], halves[:, :, 1]
        codes = torch.stack(((first & 15) | second << 4, first >> 4 | (second & 240)), dim=-1).flatten(1)
        held = codes[:, self.columns.start // 2 : self.columns.stop // 2]
        self.codes[first_row : first_row + len(rows)].copy_(held)
        return True
