"""A linear of the base model: unquantized, with plain or packed weights, or as 8-bit numbers with scales."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.weights.packed_weight import PackedWeight, pack_weight
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels

# A bfloat16 row with more elements than this is summed by oneDNN in another order if it is alone in its batch.
_MAX_ALONE = 1024


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight: values * scales[:, None].

    values: int8 or float8_e4m3fn [out, in]. scales: float32 [out].
    """

    values: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in]: the stacked weights of all modules of the site. bias [out] is never quantized."""

    weight: Tensor | PackedWeight | QuantizedWeight
    bias: Tensor | None
    site: LoraSite

    def apply(self, x: Tensor, kernels: Kernels) -> Tensor:
        """x [T, in] -> [T, out] in x's dtype, without LoRA."""
        if isinstance(self.weight, QuantizedWeight):
            return kernels.quantized_linear(x, self.weight.values, self.weight.scales, self.bias)
        return multiply(x, self.weight, self.bias)

    def packed(self) -> "Linear":
        """Returns the same linear with packed weights, if this machine supports them."""
        return replace(self, weight=pack_weight(self.weight)) if isinstance(self.weight, Tensor) else self


def multiply(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]: x W^T + b.

    One row is rounded as it would be in a batch of rows, except with a plain float32 weight.

    Measured with oneDNN on AVX-512: a row has the same bits in batches of 2 to 513 rows. If a row would have other bits
    when it is alone, it is computed twice, as a batch of two rows. The second row makes the product up to 16% slower
    with a packed bfloat16 weight, and not slower otherwise. With a plain float32 weight, batches of 1, 2 and 3 rows all
    have other bits than larger batches. A single row is computed alone in this case, because four rows take twice as
    long.
    """
    if len(x) == 1 and x.device.type == "cpu" and _differs_alone(x, isinstance(weight, PackedWeight)):
        return _multiply(x.repeat(2, 1), weight, bias)[:1]
    return _multiply(x, weight, bias)


def _differs_alone(x: Tensor, is_packed: bool) -> bool:
    if x.dtype is torch.bfloat16:
        return not is_packed or x.shape[1] > _MAX_ALONE
    return is_packed and x.dtype is torch.float32


def _multiply(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    return weight.multiply(x, bias) if isinstance(weight, PackedWeight) else F.linear(x, weight, bias)
