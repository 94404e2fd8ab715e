"""What a checkpoint's config.json says, reduced to what our decoder needs, or refused with the field's name.

Knows no torch: the API and loader processes read the same file to learn the shapes that adapters must have.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slora.errors import ConfigError
from slora_kernels.layout import ModelShape

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FAMILIES = ("llama", "qwen2")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. kind: default, linear (factor) or llama3 (all fields; Llama 3.1 and later)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. Widths are in elements."""

    family: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_directory(directory: Path) -> "ModelConfig":
        """Reads config.json and generation_config.json. Raises ConfigError naming file and field."""
        path = directory / "config.json"
        try:
            raw = _read_table(path)
        except OSError as error:
            raise ConfigError(f"no model at {directory}: {path} can't be read ({error.strerror})") from error
        return _parse(raw, _eos_token_ids(raw, directory), path)

    def shape(self, dtype: str) -> ModelShape:
        """The sizes that decide page and adapter layout when the model runs in `dtype`."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            element_bytes=ELEMENT_BYTES[dtype],
        )

    def resolve_dtype(self, requested: str) -> str:
        """`auto` is the checkpoint's own. Raises ConfigError for a dtype that can't be served."""
        dtype = self.dtype if requested == "auto" else requested
        if dtype not in ELEMENT_BYTES:
            raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(ELEMENT_BYTES)}")
        return dtype


class _Fields:
    """Typed access to config.json's fields; every error names file, field and value."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        self._fields = fields
        self._path = path

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._path}: {name} is {value!r}; it must be a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{self._path}: {name} is {value!r}; it must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self._path}: {name} is {value!r}; it must be true or false")
        return bool(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{self._path}: {name} is {value!r}; it must be an object")
        return value or {}


def _read_table(path: Path) -> dict[str, Any]:
    """Raises OSError, or ConfigError for a file that holds no JSON object."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value


def _parse(raw: dict[str, Any], eos_token_ids: tuple[int, ...], path: Path) -> ModelConfig:
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(f"{path}: model_type is {family!r}; this version serves {', '.join(_FAMILIES)}")
    fields = _Fields(raw, path)
    _refuse_what_we_do_not_honour(raw, path)
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    hidden_size = fields.whole("hidden_size")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = fields.whole("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim is {head_dim}; rotary embedding needs an even one")
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    return ModelConfig(
        family=family,
        vocab_size=fields.whole("vocab_size"),
        num_layers=fields.whole("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.whole("intermediate_size"),
        max_positions=fields.whole("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(raw, path),
        # Qwen2 has biases on q, k and v by construction; Llama has them on all four or on none.
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family == "llama" and attention_bias,
        mlp_bias=family == "llama" and mlp_bias,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids,
    )


def _refuse_what_we_do_not_honour(raw: dict[str, Any], path: Path) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act is {raw['hidden_act']!r}; this version serves silu")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{path}: use_sliding_window is true; this version serves full attention only")
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{path}: quantization_config is set; this version serves float32, bfloat16 and float16"
        )


def _parse_rope(raw: dict[str, Any], path: Path) -> Rope:
    """transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`."""
    top = _Fields(raw, path)
    values = {**top.table("rope_scaling"), **top.table("rope_parameters")}
    fields = _Fields(values, path)
    theta = fields.number("rope_theta", top.number("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    partial = fields.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor is {partial}; only 1.0 is served")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", fields.number("factor"))
    if kind == "llama3":
        return _llama3_rope(theta, fields, path)
    raise ConfigError(f"{path}: rope_type is {kind!r}; this version serves default, linear and llama3")


def _llama3_rope(theta: float, fields: _Fields, path: Path) -> Rope:
    rope = Rope(
        theta,
        "llama3",
        fields.number("factor"),
        fields.number("low_freq_factor"),
        fields.number("high_freq_factor"),
        fields.whole("original_max_position_embeddings"),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigError(
            f"{path}: high_freq_factor is {rope.high_freq_factor}; it must be above low_freq_factor "
            f"{rope.low_freq_factor}"
        )
    return rope


def _eos_token_ids(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    """generation_config.json wins: that is where chat models list every token that ends a turn."""
    path = directory / "generation_config.json"
    if path.exists():
        found = _parse_eos(_read_table(path).get("eos_token_id"), path)
        if found:
            return found
    return _parse_eos(raw.get("eos_token_id"), directory / "config.json")


def _parse_eos(value: Any, path: Path) -> tuple[int, ...]:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(tokens)
