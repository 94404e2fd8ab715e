"""Linears of the base model: unquantized, with plain or packed weights, or as 8-bit numbers with scales."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.models.weights.packed_weight import PackedWeight, pack_weight, split_weight
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels
from slora_kernels.torch.grouped_matmuls import multiply_groups
from slora_kernels.torch.row_blocks import multiply_rows

# For each name in the settings, the dtype of the numbers and its largest value.
FORMS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def quantize_rows(rows: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes float32 [N, K], which is overwritten, to numbers of `form` [N, K] and float32 scales [N].

    A row with NaN or infinity gets a scale that is not finite.
    """
    largest = dict(FORMS.values())[form]
    scales = rows.abs().amax(dim=1).div_(largest)
    # A scale that is 0 or underflows is replaced by 1, because dividing by it could give NaN. Numbers of such rows are
    # so small that they round to 0.
    scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
    rows.div_(scales[:, None]).clamp_(-largest, largest)
    return (rows.round_() if form == torch.int8 else rows).to(form), scales


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


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One linear of E experts, without biases. Adapters can't change it.

    weight: [E * out, in], the experts' weights below each other; or the packed weight of each expert.
    """

    weight: Tensor | QuantizedWeight | tuple[PackedWeight, ...]
    num_experts: int

    def apply(self, x: Tensor, starts: Tensor, kernels: Kernels) -> Tensor:
        """x [S, in] -> [S, out]. Expert e multiplies the rows from `starts[e]` to `starts[e + 1]`."""
        weight = self.weight
        if isinstance(weight, tuple):
            return multiply_groups(x, starts, lambda expert, rows: multiply(rows, weight[expert]))
        if isinstance(weight, QuantizedWeight):
            scales = weight.scales.view(self.num_experts, -1)
            return kernels.grouped_linear(x, self._stack(weight.values), scales, starts)
        return kernels.grouped_linear(x, self._stack(weight), None, starts)

    def packed(self) -> "ExpertLinear":
        """Returns the same linear with packed weights, if this machine supports them."""
        if not isinstance(self.weight, Tensor):
            return self
        packed = tuple(map(pack_weight, self._stack(self.weight)))
        packed_only = tuple(weight for weight in packed if isinstance(weight, PackedWeight))
        return replace(self, weight=packed_only) if len(packed_only) == len(packed) else self

    def _stack(self, weight: Tensor) -> Tensor:
        """Views a weight [E * out, in] as [E, out, in]."""
        return weight.view(self.num_experts, -1, weight.shape[1])
