"""Where a checkpoint stores the experts of a layer.

Checkpoints for transformers 4 have a tensor for each linear of each expert, and transformers 5 writes the same by
default. It can also write the parameters of its own modules: a stack of all experts' matrices, in which the rows of
gate precede those of up.
"""

from dataclasses import dataclass

from slora.models.expert_config import ExpertConfig
from slora.weights.weight_reader import LinearPart, WeightReader


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The tensors of a layer's experts. block: prefix of the router and of the shared expert.

    gate_up: for each expert, gate and then up. down: one part for each expert.
    """

    block: str
    gate_up: list[LinearPart]
    down: list[LinearPart]


def find_expert_parts(
    reader: WeightReader, layer: str, experts: ExpertConfig, hidden_size: int, cut: range
) -> ExpertParts:
    """layer: prefix of the layer's tensors. cut: the rank's part of each expert's intermediate columns."""
    facts, width, whole = experts.facts, experts.width, range(hidden_size)
    stacks = f"{layer}.mlp.experts"
    if f"{stacks}.gate_up_proj" in reader:
        rows = (cut, range(width + cut.start, width + cut.stop))
        places = [(expert, experts.count) for expert in range(experts.count)]
        return ExpertParts(
            block=f"{layer}.mlp",
            gate_up=[
                LinearPart(f"{stacks}.gate_up_proj", (2 * width, hidden_size), rows, whole, place)
                for place in places
            ],
            down=[
                LinearPart(f"{stacks}.down_proj", (hidden_size, width), (whole,), cut, place)
                for place in places
            ],
        )
    block = f"{layer}.{facts.block}"
    names = [f"{block}.experts.{expert}" for expert in range(experts.count)]
    return ExpertParts(
        block=block,
        gate_up=[
            LinearPart(f"{name}.{linear}.weight", (width, hidden_size), (cut,), whole)
            for name in names
            for linear in (facts.gate, facts.up)
        ],
        down=[
            LinearPart(f"{name}.{facts.down}.weight", (hidden_size, width), (whole,), cut) for name in names
        ],
    )
