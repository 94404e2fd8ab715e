"""Tables of cosines and sines for rotary embedding (RoFormer, arXiv 2104.09864), one for each rope of a model.

Angles are computed in float32 in transformers' order of operations. The tables equal those of transformers, almost
always bit for bit.
"""

import math

import torch
from torch import Tensor

from slora.models.model_config import ModelConfig
from slora.models.rope_config import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling


def cos_sin_tables(config: ModelConfig, num_positions: int, device: torch.device) -> list[Tensor]:
    """A float32 table [rows, R] for each of `config.ropes`: for each position R / 2 cosines, then R / 2 sines.

    R is the rope's rotary_dim, rounded up to an even number. rows is num_positions. If `config.rope_switch` is set,
    rows is 2 * num_positions: first the positions of short sequences, then those of long sequences.
    """
    sides = (False, True) if config.rope_switch is not None else (False,)
    return [
        torch.cat([cos_sin_table(rope, num_positions, is_long=side) for side in sides]).to(device)
        for rope in config.ropes
    ]


def cos_sin_table(rope: Rope, num_positions: int, *, is_long: bool = False) -> Tensor:
    """Returns float32 [num_positions, R]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, is_long=is_long))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def inverse_frequencies(rope: Rope, *, is_long: bool = False) -> Tensor:
    """float32 [R / 2]: theta ** (-2i / rotary_dim), scaled. is_long: use longrope's factors for long sequences."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    waves = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / waves
        case LinearScaling(factor):
            return 1.0 / waves / factor
        case Llama3Scaling() as scaling:
            return _scale_llama3(1.0 / waves, scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(waves, rope, scaling)
        case LongRopeScaling() as scaling:
            factors = scaling.long_factors if is_long else scaling.short_factors
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * waves)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Multiplies long wavelengths by `factor`, keeps short ones and interpolates between them."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / scaling.factor, frequencies)
    middle = (wavelengths <= shortest_stretched) & (wavelengths >= longest_kept)
    return torch.where(middle, between, scaled)


def _scale_yarn(waves: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """Keeps dimensions below the first bound, scales dimensions above the second bound, interpolates in between."""
    first, last = _yarn_bounds(rope, scaling)
    ramp = ((torch.arange(len(waves), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _yarn_bounds(rope: Rope, scaling: YarnScaling) -> tuple[float, float]:
    def dimension_of(turns: float) -> float:
        """The dimension whose wave makes `turns` turns in the original context."""
        wave = scaling.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    return first, last + 0.001 if first == last else last
