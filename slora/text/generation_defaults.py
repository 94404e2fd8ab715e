"""What a generation_config.json asks for when a request leaves a value open.

The base model may bring one, and so may an adapter; the adapter's wins, field by field. A field that this server
does not honour is refused unless it is at the value that changes nothing, so that no adapter is served differently
from how it was tuned.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from slora.errors import ConfigError, RequestRefused
from slora.sampling_params import SamplingParams
from slora_adapters.errors import Reason
from slora_adapters.peft.extras import GENERATION_NAME

__all__ = ["GenerationDefaults", "read_generation_defaults", "read_model_defaults", "refuse_unhonoured"]

_log = logging.getLogger(__name__)

# Fields of transformers' GenerationConfig that change the tokens -> values that ask for nothing. null always does.
_UNHONOURED: Mapping[str, tuple[Any, ...]] = {
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


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """None: not said. stop_token_ids end an answer beside the model's own end-of-text tokens."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None

    def over(self, base: "GenerationDefaults") -> "GenerationDefaults":
        """These defaults, and `base` where they say nothing."""
        own = {name: value for name, value in self.said().items() if name not in ("stop", "stop_token_ids")}
        stops = self.stop_token_ids or base.stop_token_ids, self.stop or base.stop
        return replace(base, **own, stop_token_ids=stops[0], stop=stops[1])

    def said(self) -> dict[str, Any]:
        """What is said, by name, as SamplingParams has it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def params(self, max_tokens: int | None) -> SamplingParams:
        """The parameters of a request that names none of its own."""
        return SamplingParams(**self.cut_to(max_tokens).said() | {"max_tokens": max_tokens})

    def cut_to(self, max_tokens: int | None) -> "GenerationDefaults":
        """The least that a file asks for gives way to the most that a request leaves."""
        if max_tokens is None or self.min_tokens is None:
            return self
        return replace(self, min_tokens=min(self.min_tokens, max_tokens))


def _number(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    return float(value)


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more")
    return value


def _several(config: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    """One value or a list of them, as transformers writes eos_token_id and stop_strings."""
    value = config.get(name)
    items = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(item, kind) or isinstance(item, bool) for item in items):
        raise ValueError(f"{name} is {value!r}; it must be one {kind.__name__} or a list of them")
    return tuple(items)


def read_generation_defaults(text: str | None) -> GenerationDefaults:
    """Defaults in the JSON text of a generation_config.json. Raises ValueError naming the field."""
    config = json.loads(text) if text else {}
    if not isinstance(config, dict):
        raise ValueError("generation_config is not a JSON object")
    greedy = config.get("do_sample") is False
    defaults = GenerationDefaults(
        temperature=0.0 if greedy else _number(config, "temperature"),
        top_p=_number(config, "top_p"),
        top_k=_whole(config, "top_k"),
        min_p=_number(config, "min_p"),
        repetition_penalty=_number(config, "repetition_penalty"),
        min_tokens=_whole(config, "min_new_tokens"),
        max_tokens=_whole(config, "max_new_tokens") or None,
        stop_token_ids=_several(config, "eos_token_id", int),
        stop=_several(config, "stop_strings", str),
    )
    _check_ranges(defaults)
    return defaults


def read_model_defaults(directory: Path) -> GenerationDefaults:
    """A base model's own defaults; what is not honoured is logged. Raises ConfigError for a broken file."""
    path = directory / GENERATION_NAME
    text = path.read_text() if path.is_file() else None
    for reason in refuse_unhonoured(text):
        _log.warning("%s: %s, which this server does not do", directory, reason.message)
    try:
        return read_generation_defaults(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_ranges(defaults: GenerationDefaults) -> None:
    """Defaults must be values that a request could send."""
    try:
        defaults.params(defaults.max_tokens)
    except RequestRefused as error:
        raise ValueError(error.message) from None


def refuse_unhonoured(text: str | None) -> list[Reason]:
    """A reason for each field that asks for something this server does not do."""
    try:
        read_generation_defaults(text)
        config = json.loads(text) if text else {}
    except ValueError as error:
        return [Reason("generation_config_malformed", f"generation_config.json: {error}")]
    return [
        Reason("generation_config_unsupported", f"generation_config.json sets {name} to {config[name]!r:.80}")
        for name, neutral in _UNHONOURED.items()
        if config.get(name) is not None and config[name] not in neutral
    ]
