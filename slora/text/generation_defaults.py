"""Reads the sampling defaults in a generation_config.json, which fill the fields that a request leaves out.

The base model may have such a file, and so may an adapter. For each field, the adapter's value takes precedence. An
unsupported field may only have its neutral value. If it has another value in an adapter's file, the adapter is refused,
because it would be served differently from how it was tuned. If it has another value in the base model's file, the
field is logged and ignored.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from slora.core.errors import ConfigError, RequestRefused
from slora.core.sampling_params import SamplingParams
from slora_adapters.errors import Reason, abbreviate
from slora_adapters.peft.extras import GENERATION_NAME, LABEL_FIELDS, MAX_LABEL_CHARS
from slora_adapters.peft.validation import MAX_LABELS

_log = logging.getLogger(__name__)

# Counts above this limit fit neither int32 tensors nor any context.
_MAX_COUNT = 2**31 - 1

# Fields of transformers' GenerationConfig that change the tokens, with their neutral values. null is always neutral.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "min_length": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
}


_PROBLEM_OF_MANY = "multi_label_classification"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults of one file. A field that the file does not set is None.

    stop_token_ids: tokens that end an answer, like the model's end-of-text tokens.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None

    def override(self, base: "GenerationDefaults") -> "GenerationDefaults":
        """Returns these defaults. Fields that are not set here have the values of `base`."""
        own = {
            name: value
            for name, value in self.explicit_fields().items()
            if name not in ("stop", "stop_token_ids")
        }
        stops = self.stop_token_ids or base.stop_token_ids, self.stop or base.stop
        return replace(base, **own, stop_token_ids=stops[0], stop=stops[1])

    def explicit_fields(self) -> dict[str, Any]:
        """The fields that are set, under their names in SamplingParams."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def params(self, max_tokens: int | None) -> SamplingParams:
        """The sampling parameters of a request that sets no parameters itself."""
        return SamplingParams(
            **self.cap_min_tokens(max_tokens).explicit_fields() | {"max_tokens": max_tokens}
        )

    def cap_min_tokens(self, max_tokens: int | None) -> "GenerationDefaults":
        """Lowers min_tokens to `max_tokens`, because a request's maximum takes precedence over a file's minimum."""
        if max_tokens is None or self.min_tokens is None:
            return self
        return replace(self, min_tokens=min(self.min_tokens, max_tokens))


def _number(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_COUNT:
        raise ValueError(
            f"{name} is {abbreviate(value)}; it must be a number from -{_MAX_COUNT} to {_MAX_COUNT}"
        )
    return float(value)


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name} is {abbreviate(value)}; it must be a whole number from 0 to {_MAX_COUNT}")
    return value


def _list(config: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    """Reads one value or a list of values; transformers writes eos_token_id and stop_strings in both forms."""
    value = config.get(name)
    items = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(item, kind) or isinstance(item, bool) for item in items):
        noun = "whole number" if kind is int else "text"
        raise ValueError(f"{name} is {abbreviate(value)}; it must be one {noun} or a list of them")
    return tuple(items)


def _stop_token_ids(config: Mapping[str, Any], vocab_size: int | None) -> tuple[int, ...]:
    name, limit = "eos_token_id", _MAX_COUNT + 1 if vocab_size is None else vocab_size
    token_ids = _list(config, name, int)
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < limit), None)
    if outside is not None:
        raise ValueError(f"{name} is {abbreviate(outside)}; the model's token ids are 0 to {limit - 1}")
    return token_ids


def _stop_strings(config: Mapping[str, Any]) -> tuple[str, ...]:
    name = "stop_strings"
    strings = _list(config, name, str)
    for text in strings:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = ord(text[error.start])
            raise ValueError(
                f"{name} contains the lone surrogate U+{lone:04X}, which is not a character; remove it"
            ) from None
    return strings


def read_generation_defaults(text: str | None, vocab_size: int | None = None) -> GenerationDefaults:
    """Parses the JSON text of a generation_config.json. Raises ValueError naming the field.

    vocab_size: all token ids must be less than this. None accepts every id that fits an int32.
    """
    config = json.loads(text) if text else {}
    if not isinstance(config, dict):
        raise ValueError("the generation config is not a JSON object")
    greedy = config.get("do_sample") is False
    defaults = GenerationDefaults(
        temperature=0.0 if greedy else _number(config, "temperature"),
        top_p=_number(config, "top_p"),
        top_k=_count(config, "top_k"),
        min_p=_number(config, "min_p"),
        repetition_penalty=_number(config, "repetition_penalty"),
        min_tokens=_count(config, "min_new_tokens"),
        max_tokens=_count(config, "max_new_tokens") or None,
        stop_token_ids=_stop_token_ids(config, vocab_size),
        stop=_stop_strings(config),
    )
    _check_ranges(defaults)
    return defaults


@dataclass(frozen=True, slots=True)
class Classifier:
    """The head of an adapter that classifies texts. activation: makes scores of the logits."""

    labels: tuple[str, ...]
    activation: Literal["softmax", "sigmoid", "none"]


def read_classifier(text: str | None) -> Classifier | None:
    """Reads the labels that `slora_adapters.peft.extras.add_labels` has written. None if the adapter has no head,
    and if these fields are not what `add_labels` writes, which earlier releases stored as they were uploaded.

    As in transformers, a label without a name is called LABEL_0, and so on. Without a `problem_type`, a head of one
    label gives the sigmoid of its logit, as in vLLM.
    """
    config = json.loads(text) if text else {}
    count, names, problem = (config.get(name) for name in LABEL_FIELDS)
    if type(count) is not int or not 1 <= count <= MAX_LABELS or not isinstance(names, dict | None):
        return None
    labels = tuple((names or {}).get(str(label), f"LABEL_{label}") for label in range(count))
    if not all(isinstance(label, str) and len(label) <= MAX_LABEL_CHARS for label in labels):
        return None
    if problem == "regression":
        return Classifier(labels, "none")
    return Classifier(labels, "sigmoid" if count == 1 or problem == _PROBLEM_OF_MANY else "softmax")


def read_model_defaults(directory: Path) -> GenerationDefaults:
    """Reads the base model's defaults and logs each unsupported field. Raises ConfigError for a damaged file."""
    path = directory / GENERATION_NAME
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    for reason in find_unsupported_fields(text):
        _log.warning("%s: %s, which this server ignores", directory, reason.message)
    try:
        return read_generation_defaults(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_ranges(defaults: GenerationDefaults) -> None:
    """Raises ValueError for a value that SamplingParams would refuse from a request."""
    try:
        defaults.params(defaults.max_tokens)
    except RequestRefused as error:
        raise ValueError(error.message) from None


def find_unsupported_fields(text: str | None, vocab_size: int | None = None) -> list[Reason]:
    """Returns a reason for each field that is malformed, out of range or not supported by this server.

    vocab_size: as in `read_generation_defaults`.
    """
    try:
        read_generation_defaults(text, vocab_size)
        config = json.loads(text) if text else {}
    except ValueError as error:
        return [Reason("generation_config_malformed", f"{GENERATION_NAME}: {error}")]
    return [
        Reason(
            "generation_config_unsupported", f"{GENERATION_NAME} sets {name} to {abbreviate(config[name])}"
        )
        for name, neutral in _UNSUPPORTED.items()
        if config.get(name) is not None and config[name] not in neutral
    ]
