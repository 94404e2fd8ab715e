"""Plausible values for every field of a transformers config class, for tests that change a config.json."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
}
_ROPES: list[Any] = [
    None,
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 200.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 100},
    {"rope_type": "linear", "type": "yarn", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    {"rope_type": "yarn", "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    _LONGROPE,
    {**_LONGROPE, "original_max_position_embeddings": 24},
    {**_LONGROPE, "factor": 4.0, "original_max_position_embeddings": 24},
    {**_LONGROPE, "attention_factor": 0.6},
    {**_LONGROPE, "rope_type": "su"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "mrope_section": [1, 1, 2]},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"factor": 3.0},
    {_FULL: {"rope_type": "linear", "factor": 3.0}, _SLIDING: {"rope_type": "default"}},
    {_FULL: {"type": "linear", "factor": 3.0}},
    {_FULL: {"rope_type": "default", "rope_theta": 100.0}, _SLIDING: {"type": "linear", "factor": 2.0}},
    {
        _FULL: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
        _SLIDING: {"rope_type": "default", "rope_theta": 50.0},
    },
    {_SLIDING: {"rope_type": "default", "rope_theta": 50.0}},
]  # fmt: skip
# Values by field name. A field that is missing here gets values of its default's type.
_VALUES: dict[str, list[Any]] = {
    "vocab_size": [64, 80],
    "hidden_size": [32, 48],
    "intermediate_size": [40, 64],
    "num_hidden_layers": [1, 2, 3],
    "num_attention_heads": [2, 4, 8],
    "num_key_value_heads": [1, 2, 4, 3, None],
    "head_dim": [8, 16, 6, 10, None],
    "max_position_embeddings": [64, 48, 20, 5000],
    "rms_norm_eps": [1e-6, 1e-3, 0.1],
    "layer_norm_eps": [1e-6, 0.1],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "swish", "quick_gelu"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", None],
    "activation_function": ["gelu", "gelu_new", "relu"],
    "rope_parameters": _ROPES,
    "rope_scaling": _ROPES,
    "rope_theta": [100.0, 10000, 1e6, None],
    "rope_local_base_freq": [50.0, 10000.0],
    "partial_rotary_factor": [0.5, 0.75, 1.0],
    "original_max_position_embeddings": [16, 64],
    "layer_types": [
        [_FULL] * 2,
        [_SLIDING] * 2,
        [_FULL, _SLIDING],
        [_SLIDING, _FULL],
        [_FULL],
        ["chunked_attention", _FULL],
        None,
    ],
    "sliding_window": [1, 5, 17, 30, 4096, None, 0],
    "sliding_window_pattern": [1, 2, 3],
    "_sliding_window_pattern": [1, 2],
    "max_window_layers": [0, 1, 2, 5],
    "use_sliding_window": [True, False, None],
    "query_pre_attn_scalar": [1, 3, 64, 2.5],
    "attn_logit_softcapping": [2.0, 50.0, None],
    "final_logit_softcapping": [2.0, 30.0, None],
    "use_bidirectional_attention": [True, False, None],
    "is_causal": [True, False],
    "is_decoder": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "qkv_bias": [True, False],
    "use_bias": [True, False],
    "tie_word_embeddings": [True, False],
    "pad_token_id": [0, 5, None],
    "bos_token_id": [1, None],
    "eos_token_id": [2, [2, 3], None],
    "dtype": ["float32", "bfloat16", None],
    "torch_dtype": ["float16", "float32"],
    "pretraining_tp": [1, 2],
    "chunk_size_feed_forward": [0, 3],
    "attention_dropout": [0.0, 0.5],
    "resid_pdrop": [0.0, 0.5],
    "embd_pdrop": [0.0, 0.5],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "architectures": [["Other"]],
    "transformers_version": ["4.40.0"],
    "num_experts": [1, 4, 5, 0],
    "num_local_experts": [1, 4, 5],
    "num_experts_per_tok": [1, 2, 3, 6],
    "moe_intermediate_size": [16, 24],
    "shared_expert_intermediate_size": [16, 24, 0],
    "decoder_sparse_step": [1, 2, 3, 0],
    "mlp_only_layers": [[0], [1], [0, 1], [], [7], None],
    "norm_topk_prob": [True, False],
    "per_layer_config": [{"0": {"intermediate_size": 24}}, {"1": {"sliding_window": 3}}],
    "attention_chunk_size": [8],
    "attention_multiplier": [0.5],
    "embedding_multiplier": [3.0],
    "logits_scaling": [2.0],
    "residual_multiplier": [0.5],
    "clip_qkv": [0.5],
    "unknown_field": [1, True, None],
}
# Fields that older versions of transformers wrote in addition.
_LEGACY = ("rope_scaling", "rope_theta", "partial_rotary_factor", "torch_dtype", "head_dim")
# Fields that other config classes read.
_FOREIGN = (
    "rope_local_base_freq", "original_max_position_embeddings", "layer_types", "sliding_window",
    "sliding_window_pattern", "_sliding_window_pattern", "use_sliding_window", "max_window_layers",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "use_bidirectional_attention", "is_causal", "is_decoder", "attention_bias", "mlp_bias", "qkv_bias",
    "hidden_act", "hidden_activation", "pretraining_tp", "per_layer_config", "attention_chunk_size",
    "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier", "clip_qkv",
    "num_experts", "num_local_experts", "norm_topk_prob", "decoder_sparse_step", "unknown_field",
)  # fmt: skip
# Fields that hold other configs, or only name classes.
_SKIPPED = frozenset({"model_type", "text_config", "vision_config", "audio_config"})


def each_value(kind: type[PreTrainedConfig]) -> Iterator[tuple[str, Any]]:
    """Every field of the class, and every other field that it might read, with each plausible value."""
    yield from _own_values(kind)
    own = {name for name, _ in _own_values(kind)}
    yield from ((name, value) for name in _FOREIGN if name not in own for value in _VALUES[name])


def draw_changes(kind: type[PreTrainedConfig], rng: random.Random) -> dict[str, Any]:
    """One to four fields of the class with plausible values. Sometimes it adds a field of another class or a value
    of the wrong type."""
    values = list(_own_values(kind))
    changes = dict(rng.choice(values) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.05:
        name = rng.choice(_FOREIGN)
        changes[name] = rng.choice(_VALUES[name])
    if rng.random() < 0.05:
        changes[rng.choice(list(changes))] = rng.choice(["2", 1.5, [1.5, "2"], True, -1, {}])
    return changes


def _own_values(kind: type[PreTrainedConfig]) -> Iterator[tuple[str, Any]]:
    defaults = {field.name: _default(field) for field in dataclasses.fields(kind)}
    for name in dict.fromkeys((*defaults, *_LEGACY)):
        if name not in _SKIPPED:
            for value in _VALUES.get(name) or _like(defaults.get(name)):
                yield name, value


def _default(field: "dataclasses.Field[Any]") -> Any:
    return None if field.default is dataclasses.MISSING else field.default


def _like(default: object) -> list[Any]:
    match default:
        case bool():
            return [True, False]
        case int():
            return [default, default + 1, max(1, default // 2)]
        case float():
            return [default, default + 0.25, default * 2]
        case str():
            return [default]
        case _:
            return [None, 1, 0.5]
