"""Rotary embedding as config.json describes it, in the formats of transformers 4 and 5.

This module does not import torch; `rotary` builds the tables. The kind `dynamic` is not supported: its frequencies
change with each token beyond the trained length. Keys in the KV cache or in a shared prefix would be wrong from the
next token on.
"""

import math
from dataclasses import dataclass
from typing import Any

from slora.core.errors import ConfigError
from slora.models.config_fields import ConfigFields
from slora.models.known_fields import refuse_unknown_rope_fields
from slora.models.layer_types import FULL, SLIDING
from slora.models.model_family import ROPE_TYPES, Family


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

    truncate: the bounds are rounded to whole dimensions.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    truncate: bool


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
    """One rotary embedding.

    rotary_dim: number of a head's first dimensions that are rotated. attention_factor: multiplies cosines and sines.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0


def read_ropes(
    fields: ConfigFields, family: Family, head_dim: int, layer_types: tuple[str, ...]
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The different ropes of a model, and for each layer the index of its rope."""
    if not family.rope_by_layer_type:
        return (_read_only_rope(fields, family, head_dim),), (0,) * len(layer_types)
    by_type = {kind: _read_typed_rope(fields, family, head_dim, kind) for kind in sorted(set(layer_types))}
    ropes = tuple(dict.fromkeys(by_type.values()))
    return ropes, tuple(ropes.index(by_type[kind]) for kind in layer_types)


def _read_only_rope(fields: ConfigFields, family: Family, head_dim: int) -> Rope:
    name = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    values = fields.table(name)
    for kind in (FULL, SLIDING):
        if isinstance(values.get(kind), dict):
            raise fields.refusal(name, "; all layers of this model_type use the same rope")
    theta = fields.number("rope_theta", 10000.0)
    return _read_rope(fields.within(name, values), fields, family, head_dim, theta)


def _read_typed_rope(fields: ConfigFields, family: Family, head_dim: int, kind: str) -> Rope:
    """Reads the rope of one layer type. transformers 5 writes a table per type. transformers 4 wrote rope_theta and
    rope_scaling for full attention only.
    """
    tables = fields.table("rope_parameters")
    if tables and not tables.keys() & {FULL, SLIDING}:
        raise fields.refusal("rope_parameters", f"; it must hold a table for {FULL} and one for {SLIDING}")
    name = f"rope_parameters.{kind}"
    values: dict[str, Any] = fields.within("rope_parameters", tables).table(kind)
    scaling = fields.table("rope_scaling") if kind == FULL else {}
    if scaling and "rope_type" not in scaling:
        complaint = "; rope_type is missing, and transformers ignores a rope_scaling without it"
        raise fields.refusal("rope_scaling", complaint)
    values = {**values, **scaling}
    theta = fields.number("rope_theta" if kind == FULL else "rope_local_base_freq")
    return _read_rope(fields.within(name, values), fields, family, head_dim, theta)


def _read_rope(values: ConfigFields, top: ConfigFields, family: Family, head_dim: int, theta: float) -> Rope:
    """Reads one rope. theta: used if `values` has no rope_theta of its own."""
    theta = values.number("rope_theta", theta)
    rotary_dim = _rotary_dim(values, top, family, head_dim)
    refuse_unknown_rope_fields(values)
    named = values.text("rope_type", values.text("type", "default"))
    kind = family.rope_aliases.get(named, named)
    if kind not in family.rope_types and kind in ROPE_TYPES:
        raise _rope_type_refusal(values, f"; this model_type supports only {', '.join(family.rope_types)}")
    match kind:
        case "default":
            return Rope(theta, rotary_dim)
        case "linear":
            return Rope(theta, rotary_dim, LinearScaling(values.number("factor")))
        case "llama3":
            return Rope(theta, rotary_dim, _llama3(values, top))
        case "yarn":
            yarn = _yarn(values, top)
            return Rope(theta, rotary_dim, yarn, _yarn_attention_factor(values, yarn.factor))
        case "longrope":
            longrope = _longrope(values, top, -(-rotary_dim // 2))
            return Rope(theta, rotary_dim, longrope, _longrope_attention_factor(values, top, longrope))
        case "dynamic":
            complaint = (
                "; it is not exact with a prefix cache, because every token beyond "
                "max_position_embeddings changes the keys of earlier tokens; use yarn, whose "
                "frequencies are fixed"
            )
        case _:
            complaint = "; this version serves default, linear, llama3, yarn and longrope"
    raise _rope_type_refusal(values, complaint)


def _rope_type_refusal(values: ConfigFields, complaint: str) -> ConfigError:
    return values.refusal("rope_type" if "rope_type" in values else "type", complaint)


def _rotary_dim(values: ConfigFields, top: ConfigFields, family: Family, head_dim: int) -> int:
    place = values if "partial_rotary_factor" in values else top
    part = place.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * part)
    if part != 1.0 and not family.partial_rotation:
        raise place.refusal("partial_rotary_factor", "; this model_type rotates whole heads")
    if not 0 < rotary_dim <= head_dim:
        raise place.refusal("partial_rotary_factor", f"; it must leave 1 to {head_dim} dimensions of a head")
    return rotary_dim


def _original_max_positions(values: ConfigFields, top: ConfigFields) -> int:
    """Returns the original context length.

    A value at the top level of the config (Phi-3) takes precedence over a value inside the rope table.
    """
    name = "original_max_position_embeddings"
    place = top if name in top else values
    return place.whole(name, top.whole("max_position_embeddings"), least=2)


def _llama3(values: ConfigFields, top: ConfigFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        values.number("factor"),
        values.number("low_freq_factor"),
        values.number("high_freq_factor"),
        _original_max_positions(values, top),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise values.refusal(
            "high_freq_factor", f"; it must be above low_freq_factor {scaling.low_freq_factor}"
        )
    return scaling


def _yarn(values: ConfigFields, top: ConfigFields) -> YarnScaling:
    original = _original_max_positions(values, top)
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


def _longrope(values: ConfigFields, top: ConfigFields, num_waves: int) -> LongRopeScaling:
    return LongRopeScaling(
        values.numbers("short_factor", num_waves),
        values.numbers("long_factor", num_waves),
        _original_max_positions(values, top),
    )


def _longrope_attention_factor(values: ConfigFields, top: ConfigFields, longrope: LongRopeScaling) -> float:
    given = values.optional_number("attention_factor")
    if given is not None:
        return given
    original = longrope.original_max_positions
    factor = values.number("factor", top.whole("max_position_embeddings") / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
