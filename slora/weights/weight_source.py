"""A weight as the checkpoint holds it: numbers, or 8-bit numbers that mean something only with their scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora.errors import ConfigError
from slora.weights.safetensors_file import StoredTensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8,
}  # fmt: skip
QUANTIZED = ("I8", "F8_E4M3")
# A scale for each square of so many rows and columns.
ScaleBlock = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """scales: None, float32 [N] for the rows, or float32 [N / block rows, K / block columns], rounded up.

    packed_width: K of int8 numbers that are stored four to an int32, each 128 greater; None: they are stored as such.
    """

    stored: StoredTensor
    scales: Tensor | None = None
    block: ScaleBlock | None = None
    packed_width: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.packed_width is not None else DTYPES[self.stored.dtype]

    @property
    def is_quantized_by_row(self) -> bool:
        return self.scales is not None and self.block is None

    def decode(self, first_row: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stored rows [n, K] from `first_row` on -> rows, and the float32 [n] that they are still to be times.

        Rows may be overwritten.
        """
        if self.packed_width is not None:
            # 128 more or less is the topmost bit; words are little-endian, so bytes are in the order of the columns.
            rows = rows.bitwise_xor_(-128)[:, : self.packed_width]
        if self.scales is None:
            return rows, None
        if self.block is None:
            return rows, self.scales[first_row : first_row + len(rows)]
        height, width = self.block
        lines = torch.arange(first_row, first_row + len(rows)) // height
        factors = self.scales[lines].repeat_interleave(width, dim=1)[:, : rows.shape[1]]
        return rows.float().mul_(factors), None


def spread_scales(stored: StoredTensor, scales: Tensor, block: ScaleBlock | None) -> Tensor:
    """The scales of a stored weight as `WeightSource` wants them, from one for all, one for each row, or blocks."""
    num_rows, num_columns = stored.shape
    if block is not None:
        wanted = (-(-num_rows // block[0]), -(-num_columns // block[1]))
        if scales.shape != wanted:
            raise ConfigError(f"{_where(stored)} {list(scales.shape)}; blocks of {block} need {list(wanted)}")
        return scales
    if scales.numel() not in (1, num_rows) or (scales.dim() > 1 and scales.shape[0] != scales.numel()):
        raise ConfigError(
            f"{_where(stored)} {list(scales.shape)}; only one for each row or one for all are served: "
            f"give the unquantized model and --quantization"
        )
    return scales.flatten().expand(num_rows)


def _where(stored: StoredTensor) -> str:
    return f"{stored.path}: {stored.name} {list(stored.shape)} has scales of shape"
