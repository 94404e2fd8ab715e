"""Finds the modules of a base model that a PEFT config targets, and their ranks and alphas, by PEFT's own rules.

An adapter that targets no module at all is refused. Otherwise it would silently answer like the base model. As in
PEFT, a name that no module has is ignored: PEFT lists the names of modules that `exclude_modules` excludes, too, and
those of parts that read images. The certificate names it (`list_idle_names`). If the adapter has tensors for such a
module, `validation.py` refuses them.

Patterns come from untrusted configs, so they are matched in bounded time. The matcher is Python's own, as in PEFT. A
plain pattern has neither repeats nor groups, so the cost of matching it is bounded. This process matches a moderate
number of plain patterns. A separate process (`pattern_process.py`) with limits on CPU time and memory does all other
matching. It exists because a load on a thread, or `LLM` in the program of a user, cannot stop its own matcher. When a
config is read from its directory, `spell_out` replaces such patterns by the names of the modules that they match. The
digest and the store contain these names. So a load from the store needs no separate process, unless there are very many
names.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from slora_adapters.errors import Reason
from slora_adapters.peft import pattern_process
from slora_adapters.peft.adapter import ModuleId
from slora_adapters.peft.pattern_process import CPU_SECONDS, find_first_matches
from slora_adapters.peft.peft_config import (
    ALL_LINEAR,
    CONFIG_NAME,
    MAX_LIST_ENTRIES,
    MAX_PATTERNS,
    PeftConfig,
)
from slora_adapters.process.children import BASE_VARIABLES, pass_on
from slora_kernels.layout import ModelShape

# Timeout of the separate process. The timeout is long, because two seconds of CPU time may take much longer on a busy
# machine.
_PATIENCE_S = 120.0
# Larger inputs are matched in a separate process. At these limits, matching takes about 0.3 s and compiling 0.1 s. An
# adapter that EVA initialized needs 314,000 matches for the 560 linears of a 70B Llama.
_MAX_OWN_MATCHES = 500_000
_MAX_OWN_CHARS = 100_000
_PLAIN = re.compile(r"(?:[\w.^-]|\\[.dw-])*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class PatternField:
    """A config field that contains patterns."""

    name: str  # PEFT's name of the field
    patterns: Sequence[str]  # the patterns as the file contains them
    # Whether a pattern has to match the whole name of a module. Otherwise it matches a suffix of the name.
    is_whole: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether every pattern consists of literal characters and simple escapes. Such a pattern hardly backtracks."""
        return all(map(_PLAIN.match, self.patterns))

    @property
    def regexes(self) -> list[str]:
        """The regular expressions that Python matches, built by PEFT's rules."""
        return [pattern if self.is_whole else suffix_regex(pattern) for pattern in self.patterns]


def suffix_regex(pattern: str) -> str:
    """Returns PEFT's regular expression for a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({pattern})$"


def match_fields(
    fields: Sequence[PatternField], names: Sequence[str]
) -> tuple[list[list[int | None]], list[Reason]]:
    """Returns the matches of each field, and the reasons to refuse the fields. The matches are complete only if there
    is no reason.

    The matches of a field have one entry per name: the index of the first pattern that matches, or None.

    Raises OSError if the matching process fails.
    """
    patterns = [pattern for field in fields for pattern in field.patterns]
    is_cheap = len(patterns) * len(names) <= _MAX_OWN_MATCHES and sum(map(len, patterns)) <= _MAX_OWN_CHARS
    if is_cheap and all(field.is_plain for field in fields):
        return [find_first_matches(field.regexes, names, is_whole=field.is_whole) for field in fields], []
    task = [(field.regexes, names, field.is_whole) for field in fields]
    lines, exit_code = _match_in_process(json.dumps(task))
    matches: list[list[int | None]] = []
    reasons = []
    for field, line in zip(fields, lines, strict=False):
        answer = json.loads(line)
        matches.append(answer.get("matches", []))
        if "error" in answer:
            reasons.append(Reason(field.name, f"{field.name}: {answer['error']}"))
    if len(lines) < len(fields):
        if exit_code != -signal.SIGXCPU:
            raise OSError(f"the process that matches patterns ended with exit code {exit_code}")
        late = fields[len(lines)].name
        message = f"{late}: matching takes more than {CPU_SECONDS} s of CPU time; simplify the repeats of the patterns"
        reasons.append(Reason(late, message))
    return matches, reasons


def _match_in_process(task: str) -> tuple[list[str], int]:
    """Returns the complete lines that the process printed, and its exit code. Raises OSError on a timeout."""
    command = [sys.executable, "-I", "-S", pattern_process.__file__, str(os.getpid())]
    environment = pass_on(os.environ, BASE_VARIABLES)
    try:
        done = subprocess.run(
            command,
            input=task,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            env=environment,
            check=False,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"matching patterns did not end within {_PATIENCE_S:g} s") from None
    return done.stdout.split("\n")[:-1], done.returncode


# The names by which PEFT recognises that a config changes the embedding or the head.
_EMBEDDING_NAMES = ("embed_tokens", "lm_head")


def save_tied_head(config: PeftConfig, shape: ModelShape) -> PeftConfig:
    """Returns a config that names embedding and head in modules_to_save, if PEFT trained both as one matrix."""
    names = {name.rpartition(".")[2] for name in config.modules_to_save}
    is_tied = config.ensure_weight_tying and shape.ties_head and not names.isdisjoint(_EMBEDDING_NAMES)
    if not is_tied or config.token_indices:
        return config
    others = (name for name in config.modules_to_save if name.rpartition(".")[2] not in _EMBEDDING_NAMES)
    saved = sorted({*others, shape.embedding_path, shape.head_path})
    return replace(config, modules_to_save=tuple(saved), ensure_weight_tying=False)


class Target(NamedTuple):
    """An adapted module: its rank, and the alpha of its scale.

    is_parameter: whether the config names the module's weight (target_parameters) instead of the module.
    """

    rank: int
    alpha: float
    is_parameter: bool = False


def resolve_targets(config: PeftConfig, shape: ModelShape) -> tuple[dict[ModuleId, Target], list[Reason]]:
    """Returns the modules that the config adapts in a base model of this shape, and the reasons to refuse
    the config.

    Raises OSError if the process that matches its patterns fails.
    """
    reasons = [*_refuse_layers(config, shape.num_layers)]
    parameters, no_linears = _find_parameters(config, shape), _find_no_linears(shape)
    names = [
        module.weight_path if module_id in parameters else module.path
        for module_id, module in enumerate(shape.modules)
    ]
    names += _EMBEDDING_NAMES
    fields = _list_pattern_fields(config)
    found, pattern_reasons = match_fields(fields, names)
    if pattern_reasons:
        return {}, [*reasons, *pattern_reasons]
    matches = {field.name: match for field, match in zip(fields, found, strict=True)}
    is_target, is_excluded = _target_rule(config), _suffix_rule(config.exclude_modules)
    # As in PEFT, "all-linear" means all linears of the layers. The output head is targeted only if it is named.
    candidates = shape.embedding_module if config.target_modules == ALL_LINEAR else shape.num_modules

    def choose(module_id: ModuleId, *, is_parameter: bool = False) -> Target:
        rank, alpha = (
            matches[field][module_id] if field in matches else None
            for field in ("rank_pattern", "alpha_pattern")
        )
        return Target(
            config.rank if rank is None else config.rank_patterns[rank][1],
            config.alpha if alpha is None else config.alpha_patterns[alpha][1],
            is_parameter,
        )

    targets = {}
    for module_id, name in enumerate(names[:candidates]):
        hits = {field: match[module_id] for field, match in matches.items()}
        # As in PEFT, exclude_modules and layers_to_transform do not apply to parameters.
        is_parameter = module_id in parameters
        if not is_parameter:
            if module_id in no_linears:
                continue
            if hits.get("exclude_modules") is not None or is_excluded(name):
                continue
            if hits.get("target_modules") is None and not is_target(name):
                continue
        targets[module_id] = choose(module_id, is_parameter=is_parameter)
    reasons += _refuse_parameters(config, parameters, shape)
    if not targets:
        reasons.append(
            Reason(
                "matches_nothing",
                "the config adapts no module of the base model; check target_modules and exclude_modules",
            )
        )
    by_pattern = any(matches["target_modules"][shape.num_modules :]) if "target_modules" in matches else False
    if config.ensure_weight_tying and shape.ties_head and (by_pattern or _names_embedding(config)):
        # As in PEFT, the head's factors are the transposed factors of the embedding.
        targets[shape.head_module] = choose(shape.head_module)
        embedding = targets.get(shape.embedding_module)
        if embedding is None or embedding.rank != targets[shape.head_module].rank:
            reasons.append(
                Reason(
                    "ensure_weight_tying",
                    "ensure_weight_tying is set, so the embedding and the head must both be adapted, with one rank; "
                    "check exclude_modules and rank_pattern",
                )
            )
    return targets, reasons


def list_idle_names(config: PeftConfig, shape: ModelShape) -> list[str]:
    """Returns the names in a list of target_modules that stand for no linear of the base model."""
    if isinstance(config.target_modules, str):
        return []
    no_linears = _find_no_linears(shape)
    known = {
        suffix
        for module_id, module in enumerate(shape.modules)
        if module_id not in no_linears
        for suffix in _suffixes(module.path)
    }
    return [name for name in config.target_modules if name not in known]


def _names_embedding(config: PeftConfig) -> bool:
    names = () if isinstance(config.target_modules, str) else config.target_modules
    return any(name.rpartition(".")[2] in _EMBEDDING_NAMES for name in names)


@cache
def _find_no_linears(shape: ModelShape) -> frozenset[ModuleId]:
    """Returns experts and routers. They are no linears of torch, so target_modules can't name them."""
    return frozenset(m for m, module in enumerate(shape.modules) if module.role != "linear")


def _find_parameters(config: PeftConfig, shape: ModelShape) -> frozenset[ModuleId]:
    """Returns the modules whose weights target_parameters names, by PEFT's rule: a name is a whole name or a suffix."""
    if not config.target_parameters:
        return frozenset()
    wanted = frozenset(config.target_parameters)
    return frozenset(
        module_id
        for module_id, module in enumerate(shape.modules[: shape.embedding_module])
        if any(suffix in wanted for suffix in _suffixes(module.weight_path))
    )


def _refuse_parameters(
    config: PeftConfig, parameters: Collection[ModuleId], shape: ModelShape
) -> Iterable[Reason]:
    known = {suffix for module_id in parameters for suffix in _suffixes(shape.modules[module_id].weight_path)}
    for name in config.target_parameters:
        if name not in known:
            yield Reason(
                "target_parameters",
                f"target_parameters names {name[:80]!r}, which is not the weight of a linear, of experts or of a "
                "router that this server can adapt in the base model",
            )
    both = [
        shape.modules[module_id].path
        for module_id in sorted(parameters)
        if module_id not in _find_no_linears(shape) and _is_named(config, shape.modules[module_id].path)
    ]
    if both:
        yield Reason(
            "target_parameters",
            f"target_parameters and target_modules both name {both[0]}, which PEFT refuses; name it once",
        )


def _is_named(config: PeftConfig, path: str) -> bool:
    return not isinstance(config.target_modules, str) and _suffix_rule(config.target_modules)(path)


def spell_out(
    config: PeftConfig, targets: Mapping[ModuleId, Target], shape: ModelShape, *, all_fields: bool = False
) -> tuple[PeftConfig, list[Reason]]:
    """Returns an equivalent config and the reasons to refuse its new fields. Module names replace the patterns that
    need a separate process.

    targets: the result of `resolve_targets`. all_fields: whether module names replace all fields that choose modules.
    """
    wild = {field.name for field in _list_pattern_fields(config) if not field.is_plain}
    if all_fields:
        wild |= {"target_modules", "rank_pattern", "alpha_pattern"}
    if config.ensure_weight_tying and shape.ties_head and shape.head_module in targets:
        wild.add("target_modules")
    parameters = {module_id for module_id, target in targets.items() if target.is_parameter}
    paths = {
        module_id: shape.modules[module_id].weight_path
        if module_id in parameters
        else shape.modules[module_id].path
        for module_id in targets
    }
    if all_fields and parameters:
        config = replace(config, target_parameters=tuple(sorted(paths[m] for m in parameters)))
    if wild & {"target_modules", "exclude_modules"}:
        config = replace(
            config,
            target_modules=tuple(sorted(path for m, path in paths.items() if m not in parameters)),
            exclude_modules=(),
            layers_to_transform=None,
            layers_pattern=(),
        )
    if "rank_pattern" in wild:
        ranks = ((_name_pattern(path), targets[module_id].rank) for module_id, path in paths.items())
        config = replace(config, rank_patterns=tuple(pair for pair in ranks if pair[1] != config.rank))
    if "alpha_pattern" in wild:
        alphas = ((_name_pattern(path), targets[module_id].alpha) for module_id, path in paths.items())
        config = replace(config, alpha_patterns=tuple(pair for pair in alphas if pair[1] != config.alpha))
    return config, [
        Reason(name, f"{name}: its patterns match {count} modules; accepted are {most}")
        for name, count, most in (
            ("target_modules", len(config.target_modules), MAX_LIST_ENTRIES),
            ("target_parameters", len(config.target_parameters) if all_fields else 0, MAX_LIST_ENTRIES),
            ("rank_pattern", len(config.rank_patterns), MAX_PATTERNS),
            ("alpha_pattern", len(config.alpha_patterns), MAX_PATTERNS),
        )
        if (name in wild or name == "target_parameters") and count > most
    ]


def _name_pattern(path: str) -> str:
    """Returns a key of rank_pattern or alpha_pattern that matches only this module."""
    return "^" + re.escape(path)


def _list_pattern_fields(config: PeftConfig) -> list[PatternField]:
    """Returns the fields with patterns. target_modules and exclude_modules may be lists of names instead."""
    strings = {"target_modules": config.target_modules, "exclude_modules": config.exclude_modules}
    tables = {"rank_pattern": config.rank_patterns, "alpha_pattern": config.alpha_patterns}
    return [
        *(
            PatternField(name, [pattern], is_whole=True)
            for name, pattern in strings.items()
            if isinstance(pattern, str) and pattern != ALL_LINEAR
        ),
        *(PatternField(name, [pattern for pattern, _ in table]) for name, table in tables.items() if table),
    ]


def _target_rule(config: PeftConfig) -> Callable[[str], bool]:
    """Returns PEFT's rule for target_modules. For a regular expression, the rule matches nothing."""
    targets = config.target_modules
    if targets == ALL_LINEAR:
        return lambda name: True
    matches = _suffix_rule(targets)
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


def _suffix_rule(names: Sequence[str] | str) -> Callable[[str], bool]:
    """Returns PEFT's rule for a list of names: each name matches a dotted suffix. For a string, the rule matches
    nothing.
    """
    wanted: frozenset[str] = frozenset() if isinstance(names, str) else frozenset(names)
    return lambda name: any(suffix in wanted for suffix in _suffixes(name))


def _suffixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _refuse_layers(config: PeftConfig, num_layers: int) -> Iterable[Reason]:
    beyond = [layer for layer in config.layers_to_transform or () if layer >= num_layers]
    if beyond:
        yield Reason(
            "unknown_module",
            f"{CONFIG_NAME} names layer {beyond[-1]}; the base model has {num_layers} layers (0-based)",
        )
