"""A linear of the base model in one of its forms: full precision, plain or packed, or 8-bit numbers with scales."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.weights.packed_weight import PackedWeight, pack_weight
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

    weight: Tensor | PackedWeight | QuantizedWeight
    bias: Tensor | None
    site: LoraSite

    def apply(self, x: Tensor, kernels: Kernels) -> Tensor:
        """x [T, in] -> [T, out] of x's dtype, without what adapters add."""
        if isinstance(self.weight, QuantizedWeight):
            return kernels.quantized_linear(x, self.weight.values, self.weight.scales, self.bias)
        return multiply(x, self.weight, self.bias)

    def packed(self) -> "Linear":
        """The same linear as fast as this machine has it."""
        return replace(self, weight=pack_weight(self.weight)) if isinstance(self.weight, Tensor) else self


def multiply(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]: x W^T + b, one row rounded as it would be among others where that costs nothing.

    Measured with oneDNN on AVX-512: rows are the same bits at 2 to 513 rows, but not alone, if they are bfloat16 and
    the weight is plain, or float32 and it is packed; two rows take no longer than one. With a plain weight of float32
    the first three row counts differ, and four rows take twice as long as one.
    """
    is_packed = isinstance(weight, PackedWeight)
    if len(x) == 1 and x.device.type == "cpu" and x.dtype is (torch.float32 if is_packed else torch.bfloat16):
        return _multiply(x.repeat(2, 1), weight, bias)[:1]
    return _multiply(x, weight, bias)


def _multiply(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    return weight.multiply(x, bias) if isinstance(weight, PackedWeight) else F.linear(x, weight, bias)
