"""Which linears of the base a PEFT config names: the rule by which PEFT places adapters, applied to names
alone.

An adapter that names a module which the base lacks, or nothing at all, is refused: served, it would silently
answer like the base model.
"""

from collections.abc import Callable, Iterable, Sequence

from slora_adapters.errors import Reason
from slora_adapters.module_names import EMBEDDING_NAMES, ModuleId, all_modules, module_name
from slora_adapters.name_pattern import NamePattern, StepBudget
from slora_adapters.peft_config import ALL_LINEAR, CONFIG_NAME, PeftConfig


def resolve_targets(
    config: PeftConfig, num_layers: int, budget: StepBudget
) -> tuple[frozenset[ModuleId], list[Reason]]:
    """The linears that the config adapts in a base of `num_layers` layers, and why they cannot be served."""
    reasons = list(_refuse_names(config)) if isinstance(config.target_modules, tuple) else []
    reasons += _refuse_layers(config, num_layers)
    try:
        is_target, is_excluded = _target_rule(config, budget), _name_rule(config.exclude_modules, budget)
        targets = frozenset(
            module_id
            for module_id in all_modules(num_layers)
            if not is_excluded(module_name(module_id)) and is_target(module_id)
        )
        if isinstance(config.target_modules, str) and config.target_modules != ALL_LINEAR:
            in_pattern = _name_rule(config.target_modules, budget)
            matched = [name for name in EMBEDDING_NAMES if in_pattern(name) and not is_excluded(name)]
            reasons += (_embedding_reason(name) for name in matched)
    except ValueError as error:
        return frozenset(), [
            *reasons,
            Reason("target_modules", f"target_modules or exclude_modules: {error}"),
        ]
    if not targets:
        reasons.append(Reason("matches_nothing", "the config adapts no linear layer of the base model"))
    return targets, reasons


def _target_rule(config: PeftConfig, budget: StepBudget) -> Callable[[ModuleId], bool]:
    targets = config.target_modules
    if targets == ALL_LINEAR:
        return lambda module_id: True
    matches = _name_rule(targets, budget)
    if isinstance(targets, str) or config.layers_to_transform is None:
        return lambda module_id: matches(module_name(module_id))
    # As in PEFT: a full name is taken whatever its layer; the layer filter holds for suffixes.
    full_names, layers = frozenset(targets), frozenset(config.layers_to_transform)
    if config.layers_pattern and "layers" not in config.layers_pattern:
        layers = frozenset()
    return lambda module_id: (
        module_name(module_id) in full_names or (module_id[0] in layers and matches(module_name(module_id)))
    )


def _name_rule(names: Sequence[str] | str, budget: StepBudget) -> Callable[[str], bool]:
    """PEFT's rule: a string is a regular expression over the whole name, a list holds dotted suffixes."""
    if isinstance(names, str):
        return NamePattern(names, budget).matches_whole
    wanted = frozenset(names)
    return lambda name: any(suffix in wanted for suffix in _suffixes(name))


def _suffixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _refuse_names(config: PeftConfig) -> Iterable[Reason]:
    known = frozenset(
        s for module_id in all_modules(_LAYERS_FOR_SUFFIXES) for s in _suffixes(module_name(module_id))
    )
    embeddings = frozenset(suffix for name in EMBEDDING_NAMES for suffix in _suffixes(name))
    for name in config.target_modules:
        if name in embeddings:
            yield _embedding_reason(name)
        elif name not in known and _without_layer(name) not in known:
            yield Reason(
                "unknown_module", f"target_modules names {name[:80]!r}, which the base model does not have"
            )


# Names are looked up with their layer number replaced by 0, so one layer is enough to know them all.
_LAYERS_FOR_SUFFIXES = 1


def _without_layer(name: str) -> str:
    return ".".join("0" if part.isdecimal() else part for part in name.split("."))


def _refuse_layers(config: PeftConfig, num_layers: int) -> Iterable[Reason]:
    named = set(config.layers_to_transform or ())
    if isinstance(config.target_modules, tuple):
        named |= {int(part) for name in config.target_modules for part in name.split(".") if _is_layer(part)}
    beyond = sorted(layer for layer in named if layer >= num_layers)
    if beyond:
        yield Reason(
            "unknown_module",
            f"{CONFIG_NAME} names layer {beyond[-1]}; the base model has {num_layers} layers (0-based)",
        )


def _is_layer(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) <= 9


def _embedding_reason(name: str) -> Reason:
    return Reason(
        "embeddings",
        f"the config adapts {name!r}; adapters on embeddings or the output head are not supported",
    )
