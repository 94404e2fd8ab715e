"""Tiny random base models of the served families, saved like a user's checkpoint.

Weights have a standard deviation of 0.15, so that logits differ by more than rounding errors. Biases and norms are
random too. With their usual values of zero and one, a test would not notice if they were missing.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slora.models.model_structure import find_auto_class

VOCAB_SIZE = 128
MAX_POSITIONS = 512
_STD = 0.15

_COMMON = {
    "vocab_size": VOCAB_SIZE, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
# The short original context makes all three frequency bands of Llama 3.1's rope effective.
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}  # fmt: skip
# A sequence switches from the short to the long rotary factors at the 48th token.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.5, 2.0, 4.0, 6.0, 9.0, 13.0],
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"

_FAMILIES = {
    "llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
    "mixtral": MixtralConfig, "qwen2_moe": Qwen2MoeConfig, "qwen3_moe": Qwen3MoeConfig, "phi3": Phi3Config,
    "gemma2": Gemma2Config, "gemma3_text": Gemma3TextConfig,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip

# For each name: the family, and the fields of its config.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    # These widths are no multiple of a 256-byte segment, and the head size is not hidden size / heads.
    "llama": ("llama", {"hidden_size": 48, "intermediate_size": 72, "head_dim": 20}),
    "llama_tied_llama3_rope": (
        "llama",
        {
            "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama_biased_linear_rope": (
        "llama",
        {
            "hidden_size": 64, "intermediate_size": 80, "attention_bias": True, "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "qwen2": ("qwen2", {"hidden_size": 64, "intermediate_size": 112}),
    "qwen2_tied": (
        "qwen2",
        {"num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 56, "tie_word_embeddings": True},
    ),
    # The attention windows are shorter than the prompts, and no multiple of a page's 16 tokens.
    "llama_yarn_rope": ("llama", {"hidden_size": 64, "intermediate_size": 88, "rope_parameters": _YARN}),
    "mistral_window": ("mistral", {"hidden_size": 64, "intermediate_size": 88, "sliding_window": 21}),
    "qwen2_late_windows": (
        "qwen2",
        {
            "hidden_size": 64, "intermediate_size": 88, "use_sliding_window": True, "sliding_window": 19,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        "qwen3", {"hidden_size": 48, "intermediate_size": 72, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "qwen3_biased_layer_types": (
        "qwen3",
        {
            "hidden_size": 64, "intermediate_size": 88, "head_dim": 16, "attention_bias": True,
            "use_sliding_window": True, "sliding_window": 7, "layer_types": [_SLIDING, _FULL, _SLIDING],
        },
    ),
    "mixtral": (
        "mixtral", {"hidden_size": 48, "intermediate_size": 40, "num_local_experts": 4, "sliding_window": 21},
    ),
    # Each token has one expert, whose weight is its probability. The layer in the middle has an MLP.
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {
            "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "head_dim": 24,
            "num_experts": 5, "num_experts_per_tok": 1, "mlp_only_layers": [1], "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "hidden_size": 64, "intermediate_size": 8, "moe_intermediate_size": 24, "head_dim": 16,
            "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True,
        },
    ),
    # Its first layer has an MLP, and the others have a shared expert.
    "qwen2_moe": (
        "qwen2_moe",
        {
            "hidden_size": 64, "intermediate_size": 88, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "phi3_window": ("phi3", {"hidden_size": 64, "intermediate_size": 88, "sliding_window": 23}),
    "phi3_longrope": (
        "phi3",
        {
            "hidden_size": 64, "intermediate_size": 72, "original_max_position_embeddings": 48,
            "rope_parameters": LONGROPE, "tie_word_embeddings": True,
        },
    ),
    # The soft-caps are low enough to change most scores and logits.
    "gemma2": (
        "gemma2",
        {
            "hidden_size": 64, "intermediate_size": 88, "head_dim": 20, "sliding_window": 18,
            "query_pre_attn_scalar": 3, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "hidden_size": 64, "intermediate_size": 88, "head_dim": 24, "sliding_window": 13,
            "layer_types": [_SLIDING, _FULL, _SLIDING], "query_pre_attn_scalar": 3,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}  # fmt: skip

_LLAMA_LIKE = {"hidden_size": 48, "intermediate_size": 72}
_LATENT = {
    **_LLAMA_LIKE, "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_parameters": _YARN,
}  # fmt: skip
# A sequence has at most this number of tokens, all of which are selected.
MOST_SELECTED = 96
_INDEXED = {
    **_LATENT, "v_head_dim": 12, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "index_topk": MOST_SELECTED,
    "index_n_heads": 3, "index_head_dim": 12,
}  # fmt: skip
LATENT_MODELS = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"),
    *("deepseek_v32", "glm_moe_dsa", "axk2"),
)
_MROPE = {"rope_type": "default", "rope_theta": 1e4}
# Models that run through transformers' own classes. Their features: learned positions, transposed linears, one KV head,
# fused and interleaved heads, parallel residuals, scaled logits, experts, windows.
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"hidden_size": 32},
    "gpt_bigcode": {"hidden_size": 32, "multi_query": True},
    "gpt_neox": {**_LLAMA_LIKE, "rotary_pct": 0.5},
    "phi": {**_LLAMA_LIKE, "partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "starcoder2": {**_LLAMA_LIKE, "sliding_window": 21, "use_bias": True},
    "granite": {
        **_LLAMA_LIKE, "logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3,
    },
    "cohere": {**_LLAMA_LIKE, "logit_scale": 0.4},
    "stablelm": {
        **_LLAMA_LIKE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "olmo2": _LLAMA_LIKE,
    "hunyuan_v1_dense": {
        **_LLAMA_LIKE, "head_dim": 20,
        "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 1e4},
    },
    # Sinks, and experts whose clamped activation and biases are its own.
    "gpt_oss": {
        "hidden_size": 48, "intermediate_size": 24, "head_dim": 20, "sliding_window": 21, "num_local_experts": 4,
        "num_experts_per_tok": 2, "layer_types": [_SLIDING, _FULL],
        "rope_parameters": {**_YARN, "truncate": False},
    },
    # Latent attention: the values are wider than the keys, or narrower.
    "deepseek_v2": {**_LATENT, "v_head_dim": 28, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_LATENT, "v_head_dim": 12, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {**_LATENT, "v_head_dim": 14, "q_lora_rank": 24, "n_group": 1, "topk_group": 1},
    "minicpm3": {**_LATENT, "v_head_dim": 12, "q_lora_rank": 24, "scale_emb": 3, "scale_depth": 1.2},
    # Latent attention to the tokens that an indexer selects. The second layer of GLM-5 takes over the selection.
    "deepseek_v32": {**_INDEXED, "n_group": 2},
    "glm_moe_dsa": {**_INDEXED, "indexer_types": ["full", "shared"]},
    "axk2": _INDEXED,
    "hy_v4": {**_INDEXED, "indexer_types": ["full", "shared"]},
    # Its layers differ in rope, and two of them have the latents of another.
    "mistral_large4": {
        "text_config": {
            **_INDEXED, "model_type": "mistral_large4_text", "layer_types": ["indexed_attention"] * 4,
            "indexer_types": ["full", "shared", "full", "shared"], "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
        },
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    # Attention to blocks of tokens, some of which are selected for each KV head.
    "minimax_m3_vl_text": {
        **_LLAMA_LIKE, "head_dim": 16, "rotary_dim": 8, "layer_types": [_FULL, "minimax_m3_sparse"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 40, "shared_intermediate_size": 24,
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": MOST_SELECTED // 8,
    },
    # The layers with full attention have fewer and wider heads than the others, and no v_proj. The last layers have the
    # keys and values of the first.
    "gemma4_text": {
        **_LLAMA_LIKE, "head_dim": 16, "sliding_window": 21, "layer_types": [_SLIDING, _FULL] * 2,
        "global_head_dim": 24, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    # Attention within chunks, and beside it layers without rope that scale queries by their position.
    "llama4_text": {
        **_LLAMA_LIKE, "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 2, "attention_chunk_size": 32,
        "layer_types": ["chunked_attention", _FULL], "no_rope_layers": [1, 0], "moe_layers": [1], "floor_scale": 8,
    },
    # The text part of a model that reads images, too.
    "mistral3": {
        "text_config": {**_LLAMA_LIKE, "model_type": "ministral3", "head_dim": 20},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    # Its rope has three parts, which are the same for text.
    "qwen2_5_vl": {
        "text_config": {**_LLAMA_LIKE, "rope_parameters": {**_MROPE, "mrope_section": [1, 2, 3]}},
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48,
            "fullatt_block_indexes": [0],
        },
    },
    "qwen3_vl": {
        "text_config": {
            **_LLAMA_LIKE, "head_dim": 20, "rope_parameters": {**_MROPE, "mrope_section": [4, 3, 3]},
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
    },
    "smolvlm": {
        "text_config": {**_LLAMA_LIKE, "model_type": "llama"}, "vision_config": _VISION, "scale_factor": 2,
    },
    # Granite 4.0 micro: a hybrid all of whose layers have attention, and none has experts.
    "granitemoehybrid": {
        **_LLAMA_LIKE, "layer_types": ["attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 4,
        "shared_intermediate_size": 40, "logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3,
    },
    # Their classes compute attention themselves. A number of heads that is no power of two has slopes of two kinds.
    "bloom": {"hidden_size": 48, "num_attention_heads": 6, "seq_length": MAX_POSITIONS},
    "mpt": {
        "hidden_size": 48, "num_attention_heads": 6, "max_seq_len": MAX_POSITIONS, "attn_config": {"clip_qkv": 1.0},
    },
    "falcon": {"hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neo": {"hidden_size": 32, "attention_types": [[["global", "local"], 1]], "window_size": 21},
    "xglm": {"hidden_size": 32, "ffn_dim": 48},
    # The router is a linear that returns a tuple.
    "phimoe": {**_LLAMA_LIKE, "num_local_experts": 4},
}  # fmt: skip

_LINEAR = "linear_attention"
_MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
# Suffix of a model name: a model of the family with recurrent layers.
RECURRENT = "_recurrent"
# Models with recurrent layers, which also run through transformers' own classes.
RECURRENT_MODELS: dict[str, dict[str, object]] = {
    "lfm2": {
        **_LLAMA_LIKE, "num_hidden_layers": 4, "layer_types": ["conv", _FULL, "conv", "conv"],
        "block_auto_adjust_ff_dim": False, "conv_bias": True,
    },
    f"granitemoehybrid{RECURRENT}": {
        **_LLAMA_LIKE, **_MAMBA, "layer_types": [_LINEAR, _FULL, _LINEAR], "shared_intermediate_size": 40,
        "num_local_experts": 3, "num_experts_per_tok": 2, "position_embedding_type": "rope",
        "logits_scaling": 2.0, "residual_multiplier": 0.6,
    },
    "bamba": {**_LLAMA_LIKE, **_MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True},
    # The scan of several tokens does not continue from a state.
    "jamba": {
        **_LLAMA_LIKE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    # Each layer has attention beside the recurrence.
    "falcon_h1": {
        **_LLAMA_LIKE, **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_rms_norm": True,
        "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    },
    # Layers of experts and of an MLP have neither attention nor a state.
    "nemotron_h": {
        **_LLAMA_LIKE, "layer_types": [_LINEAR, "moe", _FULL, "mlp", _LINEAR], "head_dim": 16,
        "ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8,
        "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 32,
        "time_step_min": 1e-30,
    },
    "qwen3_next": {
        **_LLAMA_LIKE, **_DELTA_NET, "layer_types": [_LINEAR, _FULL, _LINEAR], "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    # A layer of linear attention returns a tuple, and gets the angles of the rope, which it ignores.
    "minimax": {
        **_LLAMA_LIKE, "layer_types": [_LINEAR, _FULL, _LINEAR], "head_dim": 16, "num_local_experts": 2,
        "num_experts_per_tok": 1, "block_size": 8,
    },
    # No layer has attention.
    "mamba2": {
        "hidden_size": 48, "expand": 2, "num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8,
    },
    # Latent attention without rope to pools of tokens, and to those behind the last whole pool.
    "glm5_next": {
        "text_config": {
            **_INDEXED, "layer_types": [_LINEAR, "indexed_attention", "indexed_attention"], "rope_parameters": None,
            "indexer_types": ["full", "full", "shared"], "index_kpool": 8, "qk_rope_head_dim": 0, "head_dim": 0,
            "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2,
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48,
        },
    },
    # Attention to blocks of tokens, and to those behind the last whole block.
    "qwen4_exp_text": {
        **_LLAMA_LIKE, **_DELTA_NET, "layer_types": [_LINEAR, "indexed_attention", _LINEAR], "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "hc_count": 2, "hc_lowrank": 8,
        "shared_expert_intermediate_size": 32, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": MOST_SELECTED, "indexer_compress_ratio": 4,
    },
    "qwen3_5_text": {**_LLAMA_LIKE, **_DELTA_NET, "layer_types": [_LINEAR, _FULL, _LINEAR], "head_dim": 16},
}  # fmt: skip


# Suffix of a model name: the same model, wrapped as the text part of a vision-language model.
SEEING = "_seeing"


def count_layers(name: str) -> int:
    """The layers that a model of `MODELS` or `OTHER_MODELS` needs in a test: one of each kind, and at least two."""
    own: dict[str, Any] = OTHER_MODELS[name] if name in OTHER_MODELS else MODELS[name][1]
    return len(own.get("text_config", own).get("layer_types", (0, 1)))


def few_layers(name: str, *, soak: bool) -> dict[str, int]:
    """The change of the config that leaves `count_layers` in the quick run. The layers of recurrent models stay."""
    return {} if soak or name in RECURRENT_MODELS else {"num_hidden_layers": count_layers(name)}


def make_config(name: str, **changes: object) -> PreTrainedConfig:
    """changes: fields of the config."""
    if name in OTHER_MODELS or name in RECURRENT_MODELS:
        own, kind = ((OTHER_MODELS | RECURRENT_MODELS)[name], CONFIG_MAPPING[name.removesuffix(RECURRENT)])
        if "text_config" in own:
            return kind(**{**own, "text_config": {**_COMMON, **own["text_config"], **changes}})
        fields = {**_COMMON, **own, **changes}
        known = {
            "global_head_dim",
            "num_global_key_value_heads",
            "seq_length",
            *kind.attribute_map,
            *inspect.signature(kind).parameters,
        }
        return kind(**{field: value for field, value in fields.items() if field in known})
    family, fields = MODELS[name.removesuffix(SEEING)]
    if name.endswith(SEEING):
        text = {**_COMMON, **fields, **changes}
        return Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=4)
    return _FAMILIES[family](**{**_COMMON, **fields, **changes})


def make_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A new random model in float32."""
    config = make_config(name, **changes)
    # The attention of the reference.
    model = (
        find_auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    )
    fill_randomly(model, name, seed)
    return model


def fill_randomly(model: PreTrainedModel, name: str, seed: int = 0) -> None:
    """name: the name of the model or of its family."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Gemma 2 and 3 store a norm's weight as its difference from one.
            is_norm = _is_norm(parameter_name) and not name.startswith(("gemma2", "gemma3"))
            centre = 1.0 if is_norm else 0.0
            # Gemma scales its embeddings up. With the usual deviation, each token would predict only itself.
            narrow = name.startswith("gemma") and "embed_tokens" in parameter_name
            std = _STD / 2 if narrow else _STD
            parameter.copy_(torch.randn(parameter.shape, generator=random) * std + centre)


def _is_norm(parameter_name: str) -> bool:
    return parameter_name.endswith(".weight") and ("norm" in parameter_name or ".ln_" in parameter_name)


def write_model(
    directory: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """Makes a model and saves it into `directory`."""
    model = make_model(name, seed, **changes).to(dtype)
    model.save_pretrained(directory)
    return model
