"""Reads from config.json which layers have experts, how many, and how a router weighs them."""

from dataclasses import dataclass

from slora.models.config_fields import ConfigFields
from slora.models.model_family import ExpertFacts

__all__ = ["ExpertConfig", "read_experts"]

# A checkpoint has three tensors for each expert of each layer, which are listed before the weights are opened.
_MOST_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The experts that replace the MLP in some layers. Widths are in elements.

    facts: the facts about the family's experts. count: the number of experts of a layer. chosen: how many of them
    compute each token. width: intermediate width of one expert.
    normalizes: the weights of a token's chosen experts are divided by their sum.
    shared_width: intermediate width of the expert that computes all tokens. None: there is no such expert.
    layers: the layers with experts, at least one.
    """

    facts: ExpertFacts
    count: int
    chosen: int
    width: int
    normalizes: bool
    shared_width: int | None
    layers: frozenset[int]


def read_experts(fields: ConfigFields, facts: ExpertFacts, num_layers: int) -> ExpertConfig | None:
    """Returns None if no layer has experts. Raises ConfigError naming the field."""
    count = _count_experts(fields, facts)
    layers = frozenset(range(num_layers))
    if facts.has_dense_layers:
        step = fields.whole("decoder_sparse_step")
        layers = frozenset(layer for layer in layers if (layer + 1) % step == 0)
        layers -= set(fields.wholes("mlp_only_layers"))
    if not layers:
        return None
    shared = fields.whole("shared_expert_intermediate_size") if facts.has_shared_expert else None
    return ExpertConfig(
        facts=facts,
        count=count,
        chosen=fields.whole("num_experts_per_tok", most=count),
        width=fields.whole(facts.width_field),
        normalizes=facts.normalizes or fields.flag("norm_topk_prob"),
        shared_width=shared,
        layers=layers,
    )


def _count_experts(fields: ConfigFields, facts: ExpertFacts) -> int:
    """Reads the number of experts. A config may name it in several ways, but only with one value."""
    counts = {name: fields.whole(name, most=_MOST_EXPERTS) for name in facts.count_fields if name in fields}
    if len(set(counts.values())) > 1:
        first, second = list(counts)[:2]
        raise fields.refusal(second, f", but {first} is {counts[first]}; both name the number of experts")
    return next(iter(counts.values()), facts.default_count)
