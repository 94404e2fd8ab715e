"""Finds the layers with full attention and those with a sliding window, from config.json or the model's family."""

from slora.models.config_fields import ConfigFields
from slora.models.model_family import WindowRule

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(fields: ConfigFields, rule: WindowRule, num_layers: int) -> tuple[str, ...]:
    """Returns FULL or SLIDING for each layer. Raises ConfigError for a type that the family does not have."""
    given = fields.texts("layer_types")
    if given is None:
        return _implied(fields, rule, num_layers)
    if len(given) != num_layers or not set(given) <= {FULL, SLIDING}:
        raise fields.refusal(
            "layer_types", f"; it must hold {FULL} or {SLIDING} for each of {num_layers} layers"
        )
    if rule in ("none", "all", "switched") and given != _implied(fields, rule, num_layers):
        raise fields.refusal("layer_types", "; all layers of this model_type have the same type")
    return given


def read_windows(
    fields: ConfigFields, rule: WindowRule, layer_types: tuple[str, ...], max_positions: int
) -> tuple[int | None, ...]:
    """The window of each layer: how many tokens a token sees, itself included. None: all earlier tokens."""
    if SLIDING not in layer_types:
        return (None,) * len(layer_types)
    window = fields.optional_whole("sliding_window")
    if window is None:
        raise fields.refusal(
            "sliding_window", f", but layer_types has {SLIDING}; give the window as a number of tokens"
        )
    if rule == "late" and not fields.flag("use_sliding_window"):
        raise fields.refusal("use_sliding_window", f", but layer_types has {SLIDING}; set it to true")
    # A window that no sequence can exceed has no effect.
    seen = window if window < max_positions else None
    return tuple(seen if layer_type == SLIDING else None for layer_type in layer_types)


def _implied(fields: ConfigFields, rule: WindowRule, num_layers: int) -> tuple[str, ...]:
    match rule:
        case "none":
            slides = [False] * num_layers
        case "all":
            slides = ["sliding_window" in fields] * num_layers
        case "switched":
            slides = [fields.flag("use_sliding_window") and "sliding_window" in fields] * num_layers
        case "late":
            used = fields.flag("use_sliding_window") and "sliding_window" in fields
            first = fields.whole("max_window_layers", least=0)
            slides = [used and layer >= first for layer in range(num_layers)]
        case "pattern":
            pattern = fields.whole("sliding_window_pattern")
            slides = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return tuple(SLIDING if slide else FULL for slide in slides)
