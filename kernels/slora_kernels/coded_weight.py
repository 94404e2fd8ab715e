"""Weights of 4 bits for each number: codes, the numbers that they stand for, and a scale for each group of a row."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

# Columns whose codes are stored together. Groups have a multiple of this many columns.
BLOCK_COLUMNS = 32
_HALF = BLOCK_COLUMNS // 2
# Bytes of codes whose numbers are added up at a time.
_SUMMED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [N, K]: table[code] * scale + minimum, in float32.

    codes: uint8 [N, K / 2]. Byte i of a block of 32 columns has the code of column i in its low bits, and the code of
        column 16 + i in its high bits.
    scales: float32 or float16 [N, K / group], one for each group of adjacent columns. A group has 32 columns or a
        multiple of that.
    minimums: of the shape and dtype of `scales`; or empty, [0, 0]: all are 0.
    table: float32 [16], the number of each code.
    numbers: those of the table on the host, so that a launch does not wait for the device. Read from the table once.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    table: Tensor
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(self.table.tolist()))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def rows(self, first: int, end: int) -> "CodedWeight":
        """The weight's rows from `first` to `end`, in the same memory."""
        return replace(
            self,
            codes=self.codes[first:end],
            scales=self.scales[first:end],
            minimums=self.minimums[first:end],
        )

    def decode(self) -> Tensor:
        """Returns the weight, float32 [N, K]."""
        numbers = self.table[unpack_codes(self.codes).int()].view(*self.scales.shape, -1)
        numbers *= self.scales.float()[:, :, None]
        if self.minimums.numel():
            numbers += self.minimums.float()[:, :, None]
        return numbers.view(self.shape)

    def sum_squares(self) -> Tensor:
        """The sum of the squares of each row, float32 [N]. Decoding the weight takes five times as long.

        A byte has two codes. A table gives the sum of their numbers t, and of t^2, for each byte. The squares of a
        group of g columns add up to scale^2 * sum(t^2) + 2 * scale * minimum * sum(t) + g * minimum^2.
        """
        low, high = self.table.repeat(16), self.table.repeat_interleave(16)
        sums_of_byte = torch.stack((low + high, low * low + high * high), dim=1)
        groups = [
            F.embedding_bag(codes.view(-1, self.group // 2).int(), sums_of_byte, mode="sum")
            for codes in torch.split(self.codes, max(1, _SUMMED_BYTES // max(1, self.codes.shape[1])))
        ]
        sums, squares = torch.cat(groups).view(*self.scales.shape, 2).unbind(-1)
        scales = self.scales.float()
        squares = scales * scales * squares
        if self.minimums.numel():
            minimums = self.minimums.float()
            squares += 2 * scales * minimums * sums + self.group * minimums * minimums
        return squares.sum(1)


def pack_codes(codes: Tensor) -> Tensor:
    """Packs codes [N, K], each from 0 to 15, as `CodedWeight` has them: uint8 [N, K / 2]."""
    blocks = codes.to(torch.uint8).view(len(codes), -1, 2, _HALF)
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1)


def unpack_codes(packed: Tensor) -> Tensor:
    """The codes [N, K] of uint8 [N, K / 2], one in each byte."""
    blocks = packed.view(len(packed), -1, _HALF)
    return torch.cat((blocks & 15, blocks >> 4), dim=2).flatten(1)
