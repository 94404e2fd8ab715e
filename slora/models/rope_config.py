"""Rotary embedding as config.json describes it, in the formats of transformers 4 and 5.

This module does not import torch; `rotary` builds the tables. The kind `dynamic` is not supported: its frequencies
change with each token beyond the trained length. Keys in the KV cache or in a shared prefix would be wrong from the
next token on.
"""

import math
from dataclasses import dataclass

from slora.core.errors import ConfigError
from slora.models.config_fields import ConfigFields

# The types of layers in config.json. Some families have a rope for each type.
FULL, SLIDING = "full_attention", "sliding_attention"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
# The fields of a table that describes one rope. A type of rope reads only some of them.
_ROPE_FIELDS = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "long_factor",
    "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_theta", "rope_type", "short_factor", "truncate", "type",
)  # fmt: skip
_LENGTH, _PART = "original_max_position_embeddings", "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All wavelengths are multiplied by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Wavelengths longer than a fraction of the original context are multiplied by `factor` (Llama 3.1 and later)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071) scales each wavelength by its number of turns in the original context.

    Below beta_slow turns, the wavelength is multiplied by `factor`. Above beta_fast turns, it is kept. In between, it
    is interpolated.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    truncate: bool  # The bounds are rounded to whole dimensions.


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each wavelength has a factor for short sequences and another for long ones.

    Sequences longer than the original context are long.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding."""

    theta: float
    rotary_dim: int  # Number of a head's first dimensions that are rotated.
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0  # Multiplies cosines and sines.


def read_rope(fields: ConfigFields, head_dim: int, _: str) -> Rope:
    """Reads the rope of a model whose layers all have the same one."""
    values = _only_table(fields)
    return _read_rope(values, fields, _kind_of(values), _read_whole_head(values, fields, head_dim))


def read_phi3_rope(fields: ConfigFields, head_dim: int, _: str) -> Rope:
    """Like `read_rope`, for Phi-3: only a part of a head may be rotated, and there are two types of rope.

    Phi-3's first checkpoints name longrope su or yarn. The original context length at the top of the config takes
    precedence over the one inside the rope table.
    """
    values = _only_table(fields, _LENGTH)
    named = _kind_of(values)
    kind = "longrope" if named in ("su", "yarn") else named
    if kind in _ROPE_TYPES and kind not in ("default", "longrope"):
        raise _type_refusal(values, "; this model_type supports only default, longrope")
    return _read_rope(values, fields, kind, _read_rotary_dim(values, fields, head_dim))


def read_rope_of_type(fields: ConfigFields, head_dim: int, layer_type: str) -> Rope:
    """Reads the rope of one type of layer. transformers 5 writes a table per type. transformers 4 wrote rope_theta and
    rope_scaling for full attention, and rope_local_base_freq for the other layers.
    """
    fields.ignore("rope_theta", "rope_local_base_freq", "rope_scaling")
    tables = fields.table("rope_parameters")
    if tables and not tables.keys() & {FULL, SLIDING}:
        raise fields.refusal("rope_parameters", f"; it must hold a table for {FULL} and one for {SLIDING}")
    own = fields.within("rope_parameters", tables).table(layer_type)
    scaling = fields.table("rope_scaling") if layer_type == FULL else {}
    if scaling and "rope_type" not in scaling:
        complaint = "; rope_type is missing, and transformers ignores a rope_scaling without it"
        raise fields.refusal("rope_scaling", complaint)
    values = fields.within(f"rope_parameters.{layer_type}", {**own, **scaling})
    values.assume(rope_theta=fields.number("rope_theta" if layer_type == FULL else "rope_local_base_freq"))
    return _read_rope(values, fields, _kind_of(values), _read_whole_head(values, fields, head_dim))


def _only_table(fields: ConfigFields, *shared: str) -> ConfigFields:
    """Returns the table that describes the rope. The fields `shared` of the config take precedence over its own."""
    fields.ignore("rope_parameters")
    name = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    table = fields.table(name)
    if any(isinstance(table.get(kind), dict) for kind in (FULL, SLIDING)):
        raise fields.refusal(name, "; all layers of this model_type use the same rope")
    values = fields.part(name, shared)
    values.assume(rope_theta=fields.number("rope_theta", 10000.0))
    return values


def _kind_of(values: ConfigFields) -> str:
    return values.text("rope_type", values.text("type", "default"))


def _read_rope(values: ConfigFields, top: ConfigFields, kind: str, rotary_dim: int) -> Rope:
    """Reads one rope. values: the table that describes it. top: the config of the decoder."""
    values.ignore(*_ROPE_FIELDS)
    values.refuse_unread()
    theta = values.number("rope_theta")
    match kind:
        case "default":
            return Rope(theta, rotary_dim)
        case "linear":
            return Rope(theta, rotary_dim, LinearScaling(values.number("factor")))
        case "llama3":
            return Rope(theta, rotary_dim, _llama3(values, _read_length(values, top)))
        case "yarn":
            yarn = _yarn(values, top, _read_length(values, top))
            return Rope(theta, rotary_dim, yarn, _yarn_attention_factor(values, yarn.factor))
        case "longrope":
            original, num_waves = _read_length(values, top), -(-rotary_dim // 2)
            short, long = (values.numbers(name, num_waves) for name in ("short_factor", "long_factor"))
            longrope = LongRopeScaling(short, long, original)
            return Rope(theta, rotary_dim, longrope, _longrope_attention_factor(values, top, original))
        case "dynamic":
            complaint = (
                "; it is not exact with a prefix cache, because every token beyond "
                "max_position_embeddings changes the keys of earlier tokens; use yarn, whose "
                "frequencies are fixed"
            )
        case _:
            complaint = "; this version serves default, linear, llama3, yarn and longrope"
    raise _type_refusal(values, complaint)


def _read_length(values: ConfigFields, top: ConfigFields) -> int:
    return values.whole(_LENGTH, top.whole("max_position_embeddings"), least=2)


def _type_refusal(values: ConfigFields, complaint: str) -> ConfigError:
    return values.refusal("rope_type" if "rope_type" in values else "type", complaint)


def _read_whole_head(values: ConfigFields, top: ConfigFields, head_dim: int) -> int:
    for place in (values, top):
        if place.number(_PART, 1.0) != 1.0:
            raise place.refusal(_PART, "; this model_type rotates whole heads")
    return head_dim


def _read_rotary_dim(values: ConfigFields, top: ConfigFields, head_dim: int) -> int:
    place = values if _PART in values else top
    rotary_dim = int(head_dim * place.number(_PART, 1.0))
    if not 0 < rotary_dim <= head_dim:
        raise place.refusal(_PART, f"; it must leave 1 to {head_dim} dimensions of a head")
    top.ignore(_PART)
    return rotary_dim


def _llama3(values: ConfigFields, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        values.number("factor"),
        values.number("low_freq_factor"),
        values.number("high_freq_factor"),
        original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise values.refusal(
            "high_freq_factor", f"; it must be above low_freq_factor {scaling.low_freq_factor}"
        )
    return scaling


def _yarn(values: ConfigFields, top: ConfigFields, original: int) -> YarnScaling:
    return YarnScaling(
        factor=values.number("factor", top.whole("max_position_embeddings") / original),
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        original_max_positions=original,
        truncate=values.flag("truncate", default=True),
    )


def _yarn_attention_factor(values: ConfigFields, factor: float) -> float:
    given = values.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all_dim = values.optional_number("mscale"), values.optional_number("mscale_all_dim")
    if mscale is not None and mscale_all_dim is not None:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope_attention_factor(values: ConfigFields, top: ConfigFields, original: int) -> float:
    given = values.optional_number("attention_factor")
    if given is not None:
        return given
    factor = values.number("factor", top.whole("max_position_embeddings") / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
