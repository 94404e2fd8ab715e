"""Parses adapter_config.json as PEFT writes it. Keeps the fields that change the arithmetic, and refuses unsupported
variants.

PEFT's LoraConfig has many variants. Each key is one of four kinds:

- A key that this module reads: rank, scale, targets.
- A key without effect on the arithmetic of a trained adapter: dropout, initialisation, provenance.
- A variant that this server does not compute. It is refused by name when it is switched on.
- An unknown key. It is refused unless it is empty, because it might change the arithmetic.

The matching rules are PEFT's own (0.21). Patterns for ranks and alphas become `(.*\\.)?(pattern)$`, and the first match
wins. Targets in a list match a whole dotted suffix of the module's name. A target string is a regular expression over
the whole name, or "all-linear".

This module knows neither the base model's shape nor tensors, and matches no pattern.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from slora_adapters.errors import Reason, abbreviate
from slora_adapters.peft.strict_json import parse_object

CONFIG_NAME = "adapter_config.json"
# A field of stored configs: the version of the digest. Configs that were stored with digests of version 1 lack it.
DIGEST_FIELD = "slora_digest"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 2048
MAX_PATTERN_CHARS = 8192
MAX_LIST_ENTRIES = 8192
ALL_LINEAR = "all-linear"

# Keys without effect on the arithmetic of a trained adapter: provenance, training, and initialisation of weights.
_HARMLESS = frozenset(
    {
        "fan_in_fan_out",  # layout of the base weight; it does not change the layout of A and B
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "lora_ga_config",
        "loftq_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)

_READ = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)

# Variants that this server does not compute, with the reason in the error message.
_VARIANTS: Mapping[str, str] = {
    "megatron_config": "the adapter was trained on Megatron's parallel layers",
    "layer_replication": "layers of the base model run several times",
    "use_qalora": "QALoRA pools the input of A",
    "use_bdlora": "the factors are block-diagonal",
    "arrow_config": "Arrow routes between several adapters",
    "kasa_config": "KaSA truncates the base weight and inserts a diagonal between A and B",
    "velora_config": "VeLoRA has more tensors than A and B",
    "monteclora_config": "Monteclora samples its weights",
}

# More tokens than any invocation has.
MAX_INVOCATION_TOKENS = 64
_BIASES = ("none", "all", "lora_only")

# Values of init_lora_weights that do not change the base model. The other values subtract B A from the base weight or
# quantise it, and PEFT repeats that whenever it loads the adapter.
_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")

KNOWN_FIELDS = _READ | _HARMLESS | _VARIANTS.keys()

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of a LoraConfig that decide which modules are adapted, with which rank and scale.

    Patterns keep the file's order, because the first match wins. ensure_weight_tying is not part of the JSON, because
    `slora_adapters.peft.targeting` names the tied head like any other module.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_patterns: tuple[tuple[str, int], ...]
    alpha_patterns: tuple[tuple[str, float], ...]
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    ensure_weight_tying: bool = False
    use_dora: bool = False
    lora_bias: bool = False  # B has a trained bias.
    bias: str = "none"  # Which biases of the base model were trained.
    modules_to_save: tuple[str, ...] = ()
    # The tokens whose rows were trained, by the name of the module. PEFT's list stands for the embedding: None.
    token_indices: tuple[tuple[str | None, tuple[int, ...]], ...] = ()
    # Activated LoRA (arXiv 2504.12397): the tokens that activate the adapter. Empty for other adapters.
    invocation: tuple[int, ...] = ()
    # Names of weights, each matched as a suffix. PEFT adapts the linears of experts and their routers by these names.
    target_parameters: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Returns the same fields under PEFT's names, in a normal form: equal configs give equal JSON."""
        tokens: object = {name: list(ids) for name, ids in self.token_indices}
        if self.token_indices and self.token_indices[0][0] is None:
            tokens = list(self.token_indices[0][1])
        variants = {
            "use_dora": self.use_dora,
            "lora_bias": self.lora_bias,
            "bias": self.bias,
            "modules_to_save": list(self.modules_to_save),
            "trainable_token_indices": tokens,
            "alora_invocation_tokens": list(self.invocation),
            "target_parameters": list(self.target_parameters),
        }
        # A digest covers these fields, so adapters without variants must keep the JSON that they had before there were
        # variants.
        return {name: value for name, value in variants.items() if value and value != "none"} | {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "rank_pattern": dict(self.rank_patterns),
            "alpha_pattern": dict(self.alpha_patterns),
            "target_modules": _jsonable(self.target_modules),
            "exclude_modules": _jsonable(self.exclude_modules) or None,
            "layers_to_transform": self.layers_to_transform and list(self.layers_to_transform),
            "layers_pattern": list(self.layers_pattern) or None,
        }


def _jsonable(names: tuple[str, ...] | str) -> list[str] | str:
    return names if isinstance(names, str) else list(names)


def parse_peft_config(raw: bytes | memoryview) -> tuple[PeftConfig | None, list[Reason]]:
    """Returns the config, and every reason to refuse it. An accepted config has no reasons.

    The config is None if the file or a field cannot be read.
    """
    try:
        fields = parse_object(raw, source=CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)
    except ValueError as error:
        return None, [Reason("config_malformed", str(error))]
    kind = fields.get("peft_type")
    if kind != "LORA":  # Other kinds have other fields, so a word about each of them would hide this reason.
        return None, [
            Reason(
                "peft_type",
                f"peft_type is {abbreviate(kind)}; this server serves only LORA: train the adapter with LoraConfig, "
                "or, for the kinds that PEFT can convert, approximate it with peft.save_as_lora",
            )
        ]
    reasons = [*_refuse_variants(fields), *_refuse_unknown(fields)]
    reader = _FieldReader(fields, reasons)
    config = PeftConfig(
        rank=reader.rank(),
        alpha=reader.alpha(),
        use_rslora=reader.flag("use_rslora"),
        rank_patterns=reader.table("rank_pattern", reader.rank_value),
        alpha_patterns=reader.table("alpha_pattern", reader.alpha_value),
        target_modules=reader.targets(),
        exclude_modules=reader.names("exclude_modules"),
        layers_to_transform=reader.layers(),
        layers_pattern=reader.layers_pattern(),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        use_dora=reader.flag("use_dora"),
        lora_bias=reader.flag("lora_bias"),
        bias=reader.bias(),
        modules_to_save=reader.saved_modules(),
        token_indices=reader.token_indices(),
        invocation=reader.invocation(),
        target_parameters=reader.target_parameters(),
    )
    reasons += refuse_bad_combination(config)
    return (None if reader.broken else config), reasons


def _refuse_variants(fields: Mapping[str, object]) -> Iterable[Reason]:
    for key, why in _VARIANTS.items():
        if fields.get(key):
            yield Reason(key, f"{key} is set: {why}, which this server does not compute")
    if fields.get("task_type") == "TOKEN_CLS" and fields.get("modules_to_save"):
        message = "task_type is TOKEN_CLS: a head labels each token, which this server does not compute"
        yield Reason("task_type", f"{message}; it serves heads that label a whole text (SEQ_CLS)")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        yield _refuse_init(init.lower())
    elif init is not None and not isinstance(init, str | bool):
        yield _refuse_init(abbreviate(init))


def _refuse_init(init: str) -> Reason:
    if init.startswith(_BASE_CHANGING_INITS):
        return Reason(
            "init_lora_weights",
            f"init_lora_weights is {init!r}: such an adapter needs a base model that the same "
            "initialisation has changed; if you have the initial weights of PiSSA, OLoRA or CorDA, convert the adapter "
            "with `slora adapter convert`, or else with save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    known = ", ".join(sorted(_HARMLESS_INITS))
    return Reason(
        "init_lora_weights",
        f"init_lora_weights is {init[:80] or 'an empty text'}; accepted are true, false, {known}",
    )


def _refuse_unknown(fields: Mapping[str, object]) -> Iterable[Reason]:
    for key in fields.keys() - KNOWN_FIELDS - {DIGEST_FIELD}:
        if fields[key]:
            yield Reason(
                "config_unknown_key",
                f"{CONFIG_NAME} sets {key[:80]!r}, which this server does not know; remove the key if "
                "it has no effect on the result",
            )


def refuse_bad_combination(config: PeftConfig) -> Iterable[Reason]:
    """Yields a reason for each pair of fields that cannot be set together.

    What the tensors of an adapter add to its config, such as the rows of added tokens, must be checked again.
    """
    others = {
        "use_dora": config.use_dora,
        "bias": config.bias != "none",
        "modules_to_save": config.modules_to_save,
        "trainable_token_indices": config.token_indices,
        "target_parameters": config.target_parameters,
    }
    for field, is_set in others.items():
        if config.invocation and is_set:
            also = (
                " (copies of a matrix with added tokens are such rows, too)"
                if field == "trainable_token_indices"
                else ""
            )
            yield Reason(
                field,
                f"{field}{also} and alora_invocation_tokens are both set, which PEFT does not define; set one",
            )
    for field, is_set in (("use_dora", config.use_dora), ("lora_bias", config.lora_bias)):
        if config.target_parameters and is_set:
            yield Reason(
                field, f"{field} is set together with target_parameters, which PEFT refuses; set one of them"
            )
    if config.use_dora and config.lora_bias:
        yield Reason(
            "lora_bias", "lora_bias is set together with use_dora, which PEFT refuses; set one of them"
        )
    if isinstance(config.target_modules, str) and (
        config.layers_to_transform is not None or config.layers_pattern
    ):
        yield Reason(
            "layers_to_transform",
            "layers_to_transform and layers_pattern need target_modules as a list of names",
        )
    elif config.layers_pattern and config.layers_to_transform is None:
        yield Reason(
            "layers_pattern",
            "layers_pattern is set without layers_to_transform; set both, or remove layers_pattern",
        )


class _FieldReader:
    """Reads fields one by one. For an invalid field, it adds a reason and returns a placeholder, so that all
    fields are checked.
    """

    def __init__(self, fields: Mapping[str, object], reasons: list[Reason]) -> None:
        self.fields = fields
        self.reasons = reasons
        self.broken = False

    def refuse(self, code: str, message: str) -> None:
        self.broken = True
        self.reasons.append(Reason(code, message))

    def flag(self, key: str) -> bool:
        value = self.fields.get(key) or False
        if value is not True and value is not False:
            self.refuse(key, f"{key} is {abbreviate(value)}; it must be true or false")
        return value is True

    def bias(self) -> str:
        value = self.fields.get("bias") or "none"
        if isinstance(value, str) and value in _BIASES:
            return value
        self.refuse("bias", f"bias is {abbreviate(value)}; it must be one of {', '.join(_BIASES)}")
        return "none"

    def saved_modules(self) -> tuple[str, ...]:
        names = self.names("modules_to_save")
        if isinstance(names, str):
            self.refuse("modules_to_save", "modules_to_save is a text; it must be a list of names")
            return ()
        return names

    def invocation(self) -> tuple[int, ...]:
        key = "alora_invocation_tokens"
        value = self.fields.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            type(token) is int and 0 <= token < 1 << 31 for token in value
        ):
            self.refuse(key, f"{key} is {abbreviate(value)}; it must be a list of token ids")
        elif not 1 <= len(value) <= MAX_INVOCATION_TOKENS:
            self.refuse(key, f"{key} has {len(value)} tokens; accepted are 1 to {MAX_INVOCATION_TOKENS}")
        else:
            return tuple(value)
        return ()

    def token_indices(self) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
        key = "trainable_token_indices"
        value = self.fields.get(key) or []
        tables: dict[str | None, object] = (
            value if isinstance(value, dict) else {None: value} if value else {}
        )
        found = []
        for name, ids in tables.items():
            if (
                not isinstance(ids, list)
                or not ids
                or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
            ):
                self.refuse(
                    key, f"{key} is {abbreviate(value)}; it must list token ids, or list them by module"
                )
            elif len(set(ids)) < len(ids):
                self.refuse(key, f"{key} names a token of {name or 'the embedding'} twice")
            else:
                found.append((name, tuple(ids)))
        return tuple(found)

    def rank(self) -> int:
        return self.rank_value("r", self.fields.get("r"))

    def rank_value(self, what: str, value: object) -> int:
        if type(value) is int and 1 <= value < 1 << 20:
            return value
        self.refuse("rank", f"{what} is {abbreviate(value)}; it must be a positive whole number")
        return 1

    def alpha(self) -> float:
        return self.alpha_value("lora_alpha", self.fields.get("lora_alpha"))

    def alpha_value(self, what: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < abs(value) < 1e30:
            return float(value)
        self.refuse("alpha", f"{what} is {abbreviate(value)}; it must be a finite number other than 0")
        return 1.0

    def table(self, key: str, read: Callable[[str, object], Value]) -> tuple[tuple[str, Value], ...]:
        value = self.fields.get(key) or {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            self.refuse(key, f"{key} must be an object with at most {MAX_PATTERNS} patterns")
            return ()
        for pattern in value:
            self._check_pattern(key, pattern)
        return tuple((pattern, read(f"{key}[{pattern[:80]!r}]", entry)) for pattern, entry in value.items())

    def targets(self) -> tuple[str, ...] | str:
        targets = self.names("target_modules")
        if not targets and not self.fields.get("target_parameters"):
            self.refuse("target_modules", "target_modules is missing or empty; name the adapted modules")
        return targets

    def target_parameters(self) -> tuple[str, ...]:
        names = self.names("target_parameters")
        if isinstance(names, str):
            self.refuse("target_parameters", "target_parameters is a text; it must be a list of names")
            return ()
        return names

    def names(self, key: str) -> tuple[str, ...] | str:
        """Returns sorted, unique names, because PEFT treats them as a set."""
        value = self.fields.get(key) or []
        if isinstance(value, str):
            if value.lower() == ALL_LINEAR and key == "target_modules":
                return ALL_LINEAR
            self._check_pattern(key, value)
            return value
        if (
            not isinstance(value, list)
            or len(value) > MAX_LIST_ENTRIES
            or not all(isinstance(v, str) for v in value)
        ):
            self.refuse(
                key, f"{key} must be a list of at most {MAX_LIST_ENTRIES} names, or a regular expression"
            )
            return ()
        return tuple(sorted(set(value)))

    def layers(self) -> tuple[int, ...] | None:
        value = self.fields.get("layers_to_transform")
        layers = [value] if type(value) is int else value
        if layers is None or layers == []:
            return None
        if not isinstance(layers, list) or not all(type(v) is int and 0 <= v < 1 << 20 for v in layers):
            self.refuse(
                "layers_to_transform",
                f"layers_to_transform is {abbreviate(value)}; it must be a list of layer numbers",
            )
            return None
        return tuple(sorted(set(layers)))

    def layers_pattern(self) -> tuple[str, ...]:
        value = self.fields.get("layers_pattern") or []
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(
            isinstance(v, str) and re.fullmatch(r"\w+", v) for v in names
        ):
            self.refuse(
                "layers_pattern",
                f"layers_pattern is {abbreviate(value)}; it must be a list of names such as 'layers'",
            )
            return ()
        return tuple(sorted(set(names)))

    def _check_pattern(self, key: str, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            self.refuse(
                key,
                f"{key}: a pattern is {len(pattern)} characters long; at most {MAX_PATTERN_CHARS} are accepted",
            )
