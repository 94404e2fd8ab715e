"""A weight as the checkpoint stores it: plain numbers, or 8-bit numbers with scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora.core.errors import ConfigError
from slora.weights.safetensors_file import StoredTensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8,
}  # fmt: skip
QUANTIZED = ("I8", "F8_E4M3")
# The number of rows and columns of a block that shares one scale.
ScaleBlock = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A stored weight and its scales.

    scales: float32 [N], one per row; or one per block, float32 [ceil(N / block rows), ceil(K / block columns)]. None:
        no scales.
    packed_width: K, if int8 numbers are stored four to an int32, each increased by 128. None: numbers are not packed.
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
        """Decodes stored rows [n, K] from `first_row` on.

        Returns the rows, and float32 [n] scales that are not yet applied. The argument `rows` may be overwritten.
        """
        if self.packed_width is not None:
            # Adding or subtracting 128 flips the top bit. Words are little-endian, so the bytes are in column order.
            rows = rows.bitwise_xor_(-128)[:, : self.packed_width]
        if self.scales is None:
            return rows, None
        if self.block is None:
            return rows, self.scales[first_row : first_row + len(rows)]
        height, width = self.block
        lines = torch.arange(first_row, first_row + len(rows)) // height
        factors = self.scales[lines].repeat_interleave(width, dim=1)[:, : rows.shape[1]]
        return rows.float().mul_(factors), None


def expand_scales(stored: StoredTensor, scales: Tensor, block: ScaleBlock | None) -> Tensor:
    """Converts scales per tensor, per row or per block to the shapes of `WeightSource.scales`."""
    num_rows, num_columns = stored.shape
    if block is not None:
        wanted = (-(-num_rows // block[0]), -(-num_columns // block[1]))
        if scales.shape != wanted:
            raise ConfigError(f"{_where(stored)} {list(scales.shape)}; blocks of {block} need {list(wanted)}")
        return scales
    if scales.numel() not in (1, num_rows) or (scales.dim() > 1 and scales.shape[0] != scales.numel()):
        raise ConfigError(
            f"{_where(stored)} {list(scales.shape)}; only one scale for each row, or one for all, is "
            "supported: use the unquantized checkpoint with --quantization"
        )
    return scales.flatten().expand(num_rows)


def _where(stored: StoredTensor) -> str:
    return f"{stored.path}: {stored.name} {list(stored.shape)} has scales of shape"
