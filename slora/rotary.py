"""Rotary position embedding as a table of cosines and sines (RoFormer; frequency scaling as in Llama 3.1)."""

import math

import torch
from torch import Tensor

from slora.model_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: theta ** (-2i / head_dim), scaled by the kind of `rope`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _scale_llama3(frequencies, rope)
    return frequencies


def _scale_llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_stretched = rope.original_max_positions / rope.low_freq_factor
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, frequencies)
    middle = (wavelengths <= shortest_stretched) & (wavelengths >= longest_kept)
    return torch.where(middle, between, scaled)


def cos_sin_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, head_dim]: head_dim / 2 cosines, then as many sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
