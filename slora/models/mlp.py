"""The weights of the part of a layer that follows attention: an MLP, or experts and their router."""

from dataclasses import dataclass, replace

from torch import Tensor

from slora.weights.expert_linear import ExpertLinear
from slora.weights.linear import Linear
from slora.weights.packed_weight import PackedWeight, pack_weight


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated MLP that computes all tokens."""

    gate_up: Linear
    down: Linear

    def packed(self) -> "DenseMlp":
        return DenseMlp(self.gate_up.packed(), self.down.packed())


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that computes all tokens. gate: its one output scales the expert's output for the token."""

    mlp: DenseMlp
    gate: Linear

    def packed(self) -> "SharedExpert":
        return SharedExpert(self.mlp.packed(), self.gate.packed())


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Experts of which each token uses a few. router [E, H]: its outputs are the logits of the experts."""

    router: Tensor | PackedWeight
    gate_up: ExpertLinear
    down: ExpertLinear
    shared: SharedExpert | None

    def packed(self) -> "SparseMlp":
        return replace(
            self,
            router=pack_weight(self.router) if isinstance(self.router, Tensor) else self.router,
            gate_up=self.gate_up.packed(),
            down=self.down.packed(),
            shared=None if self.shared is None else self.shared.packed(),
        )


Mlp = DenseMlp | SparseMlp
