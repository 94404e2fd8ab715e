"""Finds the modules of a base model that a PEFT config targets, by PEFT's own rules on module names.

An adapter that targets a module that the base model lacks, or no module at all, is refused. Served, it would silently
answer like the base model.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from slora_adapters.errors import Reason
from slora_adapters.peft.module_names import ModuleId
from slora_adapters.peft.name_pattern import NamePattern, StepBudget
from slora_adapters.peft.peft_config import ALL_LINEAR, CONFIG_NAME, PeftConfig
from slora_kernels.layout import ModelShape


def resolve_targets(
    config: PeftConfig, shape: ModelShape, budget: StepBudget
) -> tuple[frozenset[ModuleId], list[Reason]]:
    """Returns the modules that the config adapts in a base model of this shape, and the reasons to refuse
    the config.
    """
    reasons = list(_refuse_names(config, shape)) if isinstance(config.target_modules, tuple) else []
    reasons += _refuse_layers(config, shape.num_layers)
    # As in PEFT, "all-linear" means the linears of the layers. The output head must be named.
    candidates = shape.embedding_module if config.target_modules == ALL_LINEAR else shape.num_modules
    try:
        is_target, is_excluded = _target_rule(config, budget), _name_rule(config.exclude_modules, budget)
        targets = frozenset(
            module_id
            for module_id, module in enumerate(shape.modules[:candidates])
            if not is_excluded(module.path) and is_target(module.path)
        )
    except ValueError as error:
        return frozenset(), [
            *reasons,
            Reason("target_modules", f"target_modules or exclude_modules: {error}"),
        ]
    if not targets:
        reasons.append(
            Reason(
                "matches_nothing",
                "the config adapts no module of the base model; check target_modules and exclude_modules",
            )
        )
    if config.ensure_weight_tying and targets & {shape.embedding_module, shape.head_module}:
        reasons.append(
            Reason(
                "ensure_weight_tying",
                "ensure_weight_tying is set and the config adapts the embedding or the output head: "
                "training tied their factors, which this server does not support",
            )
        )
    return targets, reasons


def _target_rule(config: PeftConfig, budget: StepBudget) -> Callable[[str], bool]:
    targets = config.target_modules
    if targets == ALL_LINEAR:
        return lambda name: True
    matches = _name_rule(targets, budget)
    if isinstance(targets, str) or config.layers_to_transform is None:
        return matches
    # As in PEFT, a full module name matches in any layer. The layer filter applies only to suffixes.
    full_names, layers = frozenset(targets), frozenset(config.layers_to_transform)
    return lambda name: (
        name in full_names or (_find_layer(name, config.layers_pattern) in layers and matches(name))
    )


def _find_layer(name: str, patterns: tuple[str, ...]) -> int | None:
    """Returns the layer number by PEFT's rule: the first number after one of the patterns. Without patterns, any dotted
    name may precede the number.
    """
    for head in [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]:
        match = re.match(rf"{head}\.(?P<layer>\d+)\.", name)
        if match is not None:
            return int(match["layer"])
    return None


def _name_rule(names: Sequence[str] | str, budget: StepBudget) -> Callable[[str], bool]:
    """Returns PEFT's matching rule: a string is a regular expression over the whole name, and a list has dotted
    suffixes.
    """
    if isinstance(names, str):
        return NamePattern(names, budget).matches_whole
    wanted = frozenset(names)
    return lambda name: any(suffix in wanted for suffix in _suffixes(name))


def _suffixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _refuse_names(config: PeftConfig, shape: ModelShape) -> Iterable[Reason]:
    known = frozenset(suffix for module in shape.modules for suffix in _suffixes(module.path))
    for name in config.target_modules:
        if name not in known:
            yield Reason(
                "unknown_module", f"target_modules names {name[:80]!r}, which the base model does not have"
            )


def _refuse_layers(config: PeftConfig, num_layers: int) -> Iterable[Reason]:
    beyond = [layer for layer in config.layers_to_transform or () if layer >= num_layers]
    if beyond:
        yield Reason(
            "unknown_module",
            f"{CONFIG_NAME} names layer {beyond[-1]}; the base model has {num_layers} layers (0-based)",
        )
