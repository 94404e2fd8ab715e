"""The offline workload: a Llama of 110M parameters with random weights, and adapters of mixed ranks for it.

Made once in a directory and read by every contender, so that all of them compute the same thing. Written tensor by
tensor: a benchmark should not need half a minute to make its input.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save, save_file


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Llama's sizes, in numbers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int = 4096

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each linear of a layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


SMALL = ModelSize(hidden=768, layers=12, heads=12, kv_heads=4, head_dim=64, intermediate=2048, vocab=32000)
RANKS = (8, 16, 32, 64)


def write_model(directory: Path, dtype: torch.dtype, size: ModelSize = SMALL) -> None:
    """config.json and model.safetensors, weights normal with the usual standard deviation of 0.02."""
    torch.manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.intermediate,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.positions,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
    }
    tensors = {
        "model.embed_tokens.weight": _normal(size.vocab, size.hidden),
        "lm_head.weight": _normal(size.vocab, size.hidden),
        "model.norm.weight": torch.ones(size.hidden),
    }
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": _normal(*shape) for name, shape in size.widths.items()}
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(size.hidden)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(size.hidden)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    cast = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, directory / "model.safetensors", metadata={"format": "pt"})


def write_adapter(
    directory: Path, index: int, dtype: torch.dtype, size: ModelSize = SMALL, *, kind: str = "lora"
) -> None:
    """A peft adapter of rank RANKS[index % 4]."""
    directory.mkdir(parents=True)
    rank = RANKS[index % len(RANKS)]
    for name, content in make_adapter(rank, dtype, size, seed=1 + index, kind=kind).items():
        (directory / name).write_bytes(content)


def make_adapter(
    rank: int, dtype: torch.dtype, size: ModelSize, *, seed: int, kind: str = "lora"
) -> dict[str, bytes]:
    """The files of a peft adapter on all seven linears, neither A nor B zero.

    kind: "lora", "dora", or "head", which has an output head of its own, too.
    """
    torch.manual_seed(seed)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bench",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.split(".")[1] for name in size.widths),
        "bias": "none",
        "use_dora": kind == "dora",
        "modules_to_save": ["lm_head"] if kind == "head" else None,
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    tensors = {}
    for layer in range(size.layers):
        for name, (out_width, in_width) in size.widths.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _normal(rank, in_width).to(dtype)
            tensors[f"{prefix}.lora_B.weight"] = _normal(out_width, rank).to(dtype)
            if kind == "dora":
                # About the norms of the model's own rows.
                norm = 0.02 * in_width**0.5
                tensors[f"{prefix}.lora_magnitude_vector"] = (norm + _normal(out_width)).float()
    if kind == "head":
        tensors["base_model.model.lm_head.weight"] = _normal(size.vocab, size.hidden).to(dtype)
    return {
        "adapter_config.json": json.dumps(config, indent=2).encode(),
        "adapter_model.safetensors": save(tensors, metadata={"format": "pt"}),
    }


def prompts(count: int, length: int, vocab_size: int = SMALL.vocab) -> list[list[int]]:
    """`count` prompts of `length` random token ids, none of them special."""
    draw = random.Random(42)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.02
