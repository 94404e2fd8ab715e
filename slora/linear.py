"""A linear of the base model in one of its forms: full precision, or 8-bit numbers with a scale for each row."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight is values * scales[:, None]: values int8 or float8_e4m3fn [out, in], scales float32 [out]."""

    values: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], out being all modules of the site side by side. bias [out] is never quantized."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    site: LoraSite

    def apply(self, x: Tensor, kernels: Kernels) -> Tensor:
        """x [T, in] -> [T, out] of x's dtype, without what adapters add."""
        if isinstance(self.weight, QuantizedWeight):
            return kernels.quantized_linear(x, self.weight.values, self.weight.scales, self.bias)
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]: x W^T + b, one row rounded as it would be among others where that costs nothing.

    Measured with oneDNN on AVX-512: bfloat16 rows are the same bits at 2 to 513 rows, but not alone, and two rows take
    no longer than one. In float32 the first three row counts differ, and four rows take twice as long as one.
    """
    if len(x) == 1 and x.dtype is torch.bfloat16 and x.device.type == "cpu":
        return F.linear(x.repeat(2, 1), weight, bias)[:1]
    return F.linear(x, weight, bias)
