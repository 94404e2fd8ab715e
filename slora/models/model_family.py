"""What a `model_type` implies that config.json does not say: one row of facts per family.

The facts are those of transformers' configuration and modeling files. Code never asks for a family's name; it asks
for these fields, or for the ModelConfig that is read with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# Which layers have a sliding window: none; all, if sliding_window is set; those from max_window_layers on, if
# use_sliding_window; all but every sliding_window_pattern-th.
WindowRule = Literal["none", "all", "late", "pattern"]
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Family:
    """One family's facts.

    defaults: fields that config.json may leave out, with the value that transformers assumes.
    fixed: fields that some checkpoints have and transformers ignores, with the only value that is true.
    ignored: fields that some checkpoints have and transformers ignores, whatever their value.
    activation: holds where activation_field is absent or null.
    qkv_bias: q, k and v always have biases.
    bias_fields, softcap_fields: the fields of these kinds that transformers reads.
    fused_linears: q, k and v are one linear, gate and up another, in checkpoints and for adapters.
    partial_rotation: partial_rotary_factor may be below one.
    rope_types, rope_aliases: the kinds of rotary embedding, and other names of them.
    rope_by_layer_type: `rope_parameters` holds a table for each type of layer.
    qk_norm: RMSNorm of each head before rotation.
    post_norms: the outputs of attention and MLP are normalised before they join the residual.
    norm_offset: a norm's weight is stored as its difference from one.
    scaled_embedding: embeddings are multiplied by sqrt(hidden_size).

    For a decoder that is part of a larger model, config_field is where config.json describes it, root where modules of
    transformers have it, stored_root where checkpoints do, and left_out how the other parts' tensors begin.
    """

    defaults: Mapping[str, object]
    fixed: Mapping[str, object] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    windows: WindowRule = "none"
    activation_field: str = "hidden_act"
    activation: str = "silu"
    qkv_bias: bool = False
    bias_fields: frozenset[str] = frozenset()
    softcap_fields: frozenset[str] = frozenset()
    fused_linears: bool = False
    partial_rotation: bool = False
    rope_types: tuple[str, ...] = ROPE_TYPES
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    rope_by_layer_type: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: bool = False
    scaled_embedding: bool = False
    config_field: str | None = None
    root: str = "model"
    stored_root: str = "model"
    left_out: tuple[str, ...] = ()


_ATTENTION_BIAS = frozenset({"attention_bias"})
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}

_FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        bias_fields=_ATTENTION_BIAS | {"mlp_bias"},
    ),
    "mistral": Family(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
        windows="all",
    ),
    "qwen2": Family(
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        windows="late",
        qkv_bias=True,
    ),
    "qwen3": Family(
        {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        windows="late",
        bias_fields=_ATTENTION_BIAS,
        qk_norm=True,
    ),
    "phi3": Family(
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        windows="all",
        fused_linears=True,
        partial_rotation=True,
        rope_types=("default", "longrope"),
        rope_aliases={"su": "longrope", "yarn": "longrope"},  # what Phi-3's first checkpoints called it
    ),
    "gemma2": Family(
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fixed={"sliding_window_pattern": 2},
        ignored=frozenset({"hidden_act", "sliding_window_size"}),
        windows="pattern",
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        bias_fields=_ATTENTION_BIAS,
        softcap_fields=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
        post_norms=True,
        norm_offset=True,
        scaled_embedding=True,
    ),
    "gemma3_text": Family(
        {
            **_GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        ignored=frozenset({"hidden_act"}),
        windows="pattern",
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        bias_fields=_ATTENTION_BIAS,
        softcap_fields=frozenset({"final_logit_softcapping"}),
        rope_by_layer_type=True,
        qk_norm=True,
        post_norms=True,
        norm_offset=True,
        scaled_embedding=True,
    ),
}

FAMILIES: Mapping[str, Family] = {
    **_FAMILIES,
    # The larger Gemma 3 see images, too; what they say to text is the text model's.
    "gemma3": replace(
        _FAMILIES["gemma3_text"],
        # transformers caps the logits of the text model only where it stands alone.
        softcap_fields=frozenset(),
        config_field="text_config",
        root="model.language_model",
        stored_root="language_model.model",
        left_out=("vision_tower.", "multi_modal_projector."),
    ),
}
