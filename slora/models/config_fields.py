"""Typed access to a config.json. Every error names the file, the field and the value.

A `ConfigFields` remembers which of its fields were read. A field that nothing has read may change the model's answers:
a newer checkpoint may describe an unknown kind of layer with it. Such a field is refused, unless it is known to change
no logits, or only tells people about the checkpoint.

This module does not import torch, like all modules that read config.json.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slora.core.errors import ConfigError

_log = logging.getLogger(__name__)

# Fields that change no logits. They come from transformers' config classes and from training tools. Old checkpoints
# also keep sampling parameters in config.json, which transformers reads from generation_config.json only.
_HARMLESS = {
    "attention_dropout", "classifier_dropout", "embd_pdrop", "gradient_checkpointing", "hidden_dropout",
    "initializer_range", "pretraining_tp", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise",
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_from_model_config", "_name_or_path", "_sliding_window_pattern", "architectures", "attn_implementation",
    "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "cls_token_id",
    "custom_pipelines", "decoder_start_token_id", "eos_token_id", "finetuning_task", "id2label", "is_decoder",
    "is_encoder_decoder", "is_llama_config", "label2id", "mask_token_id", "max_sequence_length",
    "model_max_length", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "prefix", "problem_type", "return_dict", "sep_token_id",
    "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    "use_flash_attention_2", "use_flash_attn",
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
    "top_k", "top_p", "typical_p",
}  # fmt: skip
# Fields that change the answers of some models, with the value at which they change nothing.
_NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
# Any other text describes the checkpoint, unless the field's name is that of a part of the model.
_PART_OF_MODEL = re.compile(
    r"act|norm|att|rope|rotary|pos|mlp|ffn|feed|proj|expert|moe|rout|gat|scor|topk|embed|layer|block|mixer|head|window|"
    r"mamba|ssm|convol|pool|fus|resi|time_step|afn|cache|impl|kernel|class|type|mode(?!l)|method|func|scal|mask|bias|"
    r"quant(?!ized_by)"
)
_DESCRIBING_NUMBER = re.compile(r"(.*_)?(version|date|timestamp|created_at)")
_REMEDY = (
    "; slora's decoder does not use this field, which may change the model's output: remove the "
    "field if it has no effect, or choose --model-impl transformers"
)


class ConfigFields:
    """The fields of one JSON object. A field that is null counts as absent wherever there is a default.

    within: the object's path inside its file, for error messages.
    """

    def __init__(self, fields: Mapping[str, Any], path: Path, within: str = "") -> None:
        self._fields = fields
        self._path = path
        self._within = within
        self._assumed: dict[str, Any] = {}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._value(name) is not None

    def assume(self, **values: object) -> None:
        """Sets the values of fields that are absent. A field that is null stays null."""
        self._assumed |= values

    def ignore(self, *names: str) -> None:
        """Accepts these fields with any value."""
        self._read.update(names)

    def require(self, name: str, value: object) -> None:
        """Refuses another value of the field than this one, unless the field is absent."""
        if name in self and not _equals(self._value(name), value):
            raise self.refusal(name, _REMEDY)

    def refuse_unread(self) -> None:
        """Raises ConfigError for a field that was not read and may change the logits. Logs the others."""
        unknown = []
        for name in sorted(self._fields.keys() - self._read - _HARMLESS):
            value = self._fields[name]
            if value is None or (name in _NEUTRAL and _equals(value, _NEUTRAL[name])):
                continue
            if not _is_description(name, value):
                raise self.refusal(name, _REMEDY)
            unknown.append(self._within + name)
        if unknown:
            _log.warning("%s: these fields are unknown and not used: %s", self._path, ", ".join(unknown))

    def refusal(self, name: str, complaint: str) -> ConfigError:
        """Returns an error. `complaint` continues the message after the field and its value: "; it must be ..."."""
        return self._refuse(name, self._value(name), complaint)

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive whole number" if least == 1 else f"a whole number from {least}"
            raise self._refuse(name, value, f"; it must be {kind}")
        if most is not None and value > most:
            raise self._refuse(name, value, f"; it must be at most {most}")
        return value

    def optional_whole(self, name: str) -> int | None:
        return self.whole(name) if name in self else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not _is_positive(value):
            raise self._refuse(name, value, "; it must be a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self._value(name)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_positive, values)):
            raise self.refusal(name, f"; it must be a list of {count} positive numbers")
        return tuple(map(float, values))

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "; it must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.refusal(name, "; it must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Returns a list of strings, or None if the field is absent."""
        values = self._value(name)
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refusal(name, "; it must be a list of strings")
        return tuple(values)

    def wholes(self, name: str) -> tuple[int, ...]:
        """Returns a list of whole numbers from 0. An absent list is empty."""
        values = self._value(name, [])
        if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
            raise self.refusal(name, "; it must be a list of whole numbers from 0")
        return tuple(values)

    def table(self, name: str) -> dict[str, Any]:
        value = self._value(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, "; it must be an object")
        return value or {}

    def within(self, name: str, fields: Mapping[str, Any]) -> "ConfigFields":
        """Wraps `fields`, the content of the field `name`. Errors name its fields `name.field`."""
        return ConfigFields(fields, self._path, f"{self._within}{name}.")

    def part(self, name: str, shared: Iterable[str]) -> "ConfigFields":
        """Wraps the object in the field `name`. The fields `shared` of this object take precedence over its own."""
        values = {field: self._value(field) for field in shared if field in self}
        return self.within(name, {**self.table(name), **values})

    def _refuse(self, name: str, value: Any, complaint: str) -> ConfigError:
        return ConfigError(f"{self._path}: {self._within}{name} is {value!r:.100}{complaint}")

    def _value(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._fields[name] if name in self._fields else self._assumed.get(name)
        return default if value is None else value


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file. Raises OSError, or ConfigError if the file does not hold a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json. Raises ConfigError."""
    path = directory / "config.json"
    try:
        return read_json_object(path)
    except OSError as error:
        raise ConfigError(f"no model at {directory}: {path} can't be read ({error.strerror})") from error


def read_eos_token_ids(config: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens that end an answer.

    generation_config.json has precedence over config.json, because chat models list all of these tokens only there.
    A model that also reads images may have the field only in `text_config`.
    """
    path = directory / "generation_config.json"
    if path.exists():
        found = _parse_eos(read_json_object(path).get("eos_token_id"), path)
        if found:
            return found
    found = _parse_eos(config.get("eos_token_id"), directory / "config.json")
    text = config.get("text_config")
    if found or not isinstance(text, Mapping):
        return found
    return _parse_eos(text.get("eos_token_id"), directory / "config.json")


def _parse_eos(value: Any, path: Path) -> tuple[int, ...]:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(tokens)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _equals(given: object, value: object) -> bool:
    """Whether both are the same, including their JSON type: 1 differs from true and from 1.0."""
    return type(given) is type(value) and given == value


def _is_description(name: str, value: object) -> bool:
    """Whether the field only tells people about the checkpoint: a text, a list of texts, or the number of a version."""
    kinds = (str, int, float) if _DESCRIBING_NUMBER.fullmatch(name) else (str,)
    values = value if isinstance(value, list) else [value]
    return _PART_OF_MODEL.search(name) is None and all(type(item) in kinds for item in values)
