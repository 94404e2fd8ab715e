"""Cosines and sines of every kind of rope, compared with those of transformers' own modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from slora.models.families import read_model_config
from slora.models.model_config import ModelConfig
from slora.models.rotary import cos_sin_tables
from tests.support.json_files import write_json

POSITIONS = 256
LLAMA = {
    "model_type": "llama", "vocab_size": 100, "num_hidden_layers": 2, "hidden_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
# A head size of 64 has frequencies in every band of llama3 and yarn.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn_betas": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn_not_truncated": {**YARN, "truncate": False},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.7},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_one_mscale": {**YARN, "mscale": 0.7},
    "yarn_no_factor": {**YARN, "factor": None},
    "yarn_one_point": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "original_max_position_embeddings": 7},
}  # fmt: skip


def rotated_by(module: torch.nn.Module, length: int, **layer_type: str) -> torch.Tensor:
    """float32 [length, R]: the module's cosines and sines for a sequence of `length`, each in one half of R."""
    cos, sin = module(torch.zeros(1), torch.arange(length)[None], **layer_type)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)


def save(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    write_json(directory / "config.json", fields)
    return read_model_config(directory)


@pytest.mark.parametrize("kind", SCALINGS)
def test_cosines_and_sines_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    config = save(tmp_path, {**LLAMA, "rope_parameters": {"rope_theta": 5e5, **SCALINGS[kind]}})
    [table] = cos_sin_tables(config, POSITIONS, torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(table, rotated_by(theirs, POSITIONS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("partial", [1.0, 0.75, 0.5])
@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_longrope_has_rows_for_short_and_for_long_sequences(
    tmp_path: Path, partial: float, attention_factor: float | None
) -> None:
    waves = int(64 * partial) // 2
    config = save(
        tmp_path,
        {
            **LLAMA,
            "model_type": "phi3",
            "partial_rotary_factor": partial,
            "original_max_position_embeddings": 100,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.01 * i for i in range(waves)],
                "long_factor": [2.0 + 0.1 * i for i in range(waves)],
                "attention_factor": attention_factor,
            },
        },
    )
    assert config.rope_switch == 100
    [table] = cos_sin_tables(config, POSITIONS, torch.device("cpu"))
    assert table.shape == (2 * POSITIONS, 2 * waves)
    theirs = Phi3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(table[:100], rotated_by(theirs, 100), rtol=0, atol=1e-6)
    torch.testing.assert_close(table[POSITIONS:], rotated_by(theirs, POSITIONS), rtol=0, atol=1e-6)


def test_layers_with_a_window_have_a_rope_of_their_own(tmp_path: Path) -> None:
    config = save(
        tmp_path,
        {
            **LLAMA,
            "model_type": "gemma3_text",
            "head_dim": 32,
            "sliding_window_pattern": 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 5e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    )
    assert len(config.ropes) == 2
    tables = cos_sin_tables(config, POSITIONS, torch.device("cpu"))
    theirs = Gemma3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    for layer, kind in enumerate(("sliding_attention", "full_attention")):
        expected = rotated_by(theirs, POSITIONS, layer_type=kind)
        torch.testing.assert_close(tables[config.rope_of_layer[layer]], expected, rtol=0, atol=1e-6)
