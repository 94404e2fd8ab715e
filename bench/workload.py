"""The offline workload: a Llama of 110M parameters with random weights, and adapters of mixed ranks for it.

Made once in a directory and read by every contender, so that all of them compute the same thing. Written tensor by
tensor: a benchmark should not need half a minute to make its input.
"""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 768, 12, 12, 4, 2048, 32000
HEAD_DIM = HIDDEN // HEADS
RANKS = (8, 16, 32, 64)
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def write_model(directory: Path, dtype: torch.dtype) -> None:
    """config.json and model.safetensors, weights normal with the usual standard deviation of 0.02."""
    torch.manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
    }
    tensors = {
        "model.embed_tokens.weight": _normal(VOCAB, HIDDEN),
        "lm_head.weight": _normal(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": _normal(*shape) for name, shape in WIDTHS.items()}
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    cast = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, directory / "model.safetensors", metadata={"format": "pt"})


def write_adapter(directory: Path, index: int, dtype: torch.dtype) -> None:
    """A peft adapter on all seven linears, rank RANKS[index % 4], neither A nor B zero."""
    torch.manual_seed(1 + index)
    rank = RANKS[index % len(RANKS)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bench-110m",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.split(".")[1] for name in WIDTHS),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    tensors = {}
    for layer in range(LAYERS):
        for name, (out_width, in_width) in WIDTHS.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _normal(rank, in_width).to(dtype)
            tensors[f"{prefix}.lora_B.weight"] = _normal(out_width, rank).to(dtype)
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def prompts(count: int, length: int, vocab_size: int = VOCAB) -> list[list[int]]:
    """`count` prompts of `length` random token ids, none of them special."""
    draw = random.Random(42)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.02
