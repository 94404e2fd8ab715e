"""Destinations of a checkpoint's rows: a weight in the served dtype, or a weight that is quantized while it is read."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slora.weights.linear import QuantizedWeight
from slora.weights.quantization import quantize_rows


class WeightTarget(Protocol):
    """The rows of a weight that one tensor of the checkpoint fills, block by block.

    A target may hold only some columns of the tensor. Rows are quantized before their columns are cut, so that the
    parts of all ranks together equal the weight of a single rank.
    """

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        """The memory of these rows, if bytes of `dtype` may be read directly into it; otherwise None."""

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        """Writes rows [n, K], multiplied by scales float32 [n] if given. Returns False if a number is not finite.

        The rows may be overwritten, and the caller reuses their memory.
        """


@dataclass(frozen=True, slots=True)
class PlainTarget:
    """columns: the columns of the tensor that the weight holds. num_columns: all columns of the tensor."""

    weight: Tensor
    columns: range
    num_columns: int

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        suits = self.weight.dtype == dtype and self.weight.device.type == "cpu"
        return self.weight if suits and len(self.columns) == self.num_columns else None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        exact = rows if scales is None else rows.float().mul_(scales[:, None])
        self.weight[first_row : first_row + len(rows)].copy_(exact[:, self.columns.start : self.columns.stop])
        return True


@dataclass(frozen=True, slots=True)
class QuantizedTarget:
    """Copies numbers that are already stored in the target format. Quantizes all others, on the GPU if there is one."""

    weight: QuantizedWeight
    columns: range

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        values, form = self.weight.values, self.weight.values.dtype
        if scales is None or rows.dtype != form:
            exact = rows.to(values.device, torch.float32)
            if scales is not None:
                exact = exact.mul_(scales.to(values.device)[:, None])
            rows, scales = quantize_rows(exact, form)
        block = slice(first_row, first_row + len(rows))
        values[block].copy_(rows[:, self.columns.start : self.columns.stop])
        self.weight.scales[block].copy_(scales)
        return bool(scales.isfinite().all())
