"""A linear of the base model: unquantized, with plain or packed weights, or as 8-bit numbers with scales."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.weights.packed_weight import PackedWeight, pack_weight, split_weight
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels
from slora_kernels.torch.row_blocks import multiply_rows


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
        if not isinstance(self.weight, Tensor):
            return self
        return replace(self, weight=pack_weight(self.weight, is_biased=self.bias is not None))


def multiply(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]: x W^T + b. On a CPU, the bits of a row do not depend on the other rows."""
    if isinstance(weight, PackedWeight):
        return weight.multiply(x, bias)
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    pieces = split_weight(weight)
    widths = [len(piece) for piece in pieces]
    biases = [None] * len(widths) if bias is None else torch.split(bias, widths)
    products = [multiply_rows(x, piece, part) for piece, part in zip(pieces, biases, strict=True)]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)
