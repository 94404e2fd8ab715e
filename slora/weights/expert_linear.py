"""The same linear of all experts of a layer: stacked weights, unquantized or as 8-bit numbers, or packed weights."""

from dataclasses import dataclass, replace

from torch import Tensor

from slora.weights.linear import QuantizedWeight, multiply
from slora.weights.packed_weight import PackedWeight, pack_weight
from slora_kernels.ops import Kernels
from slora_kernels.torch.grouped_matmuls import multiply_groups


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
