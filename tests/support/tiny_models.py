"""Tiny random base models of the served families, saved as a user would have them.

Weights are wide (standard deviation 0.15) so that logits differ by more than rounding, and nothing that starts at
zero or one in training stays there: biases and norms are random too, or nobody would notice them missing.
"""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

VOCAB_SIZE = 128
MAX_POSITIONS = 512
_STD = 0.15

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# The short original context puts all three of Llama 3.1's frequency bands to work.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config}

# By name, the family and the fields of its config.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    # Widths that share no factor with a 256-byte segment, and a head size that is not hidden / heads.
    "llama": ("llama", {"hidden_size": 48, "intermediate_size": 72, "head_dim": 20}),
    "llama_tied_llama3_rope": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama_biased_linear_rope": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 80,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "qwen2": ("qwen2", {"hidden_size": 64, "intermediate_size": 112}),
    "qwen2_tied": (
        "qwen2",
        {"num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 56, "tie_word_embeddings": True},
    ),
}


def make_config(name: str, **changes: object) -> PreTrainedConfig:
    """`changes`: fields of the config."""
    family, fields = MODELS[name]
    return _FAMILIES[family](**{**_COMMON, **fields, **changes})


def make_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A new random model in float32."""
    model = AutoModelForCausalLM.from_config(make_config(name, **changes), dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            centre = 1.0 if parameter_name.endswith("norm.weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=random) * _STD + centre)
    return model


def write_model(
    directory: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """Makes a model and saves it into `directory`."""
    model = make_model(name, seed, **changes).to(dtype)
    model.save_pretrained(directory)
    return model
