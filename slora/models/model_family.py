"""The facts that a `model_type` implies and config.json does not contain: one entry per family.

The facts come from transformers' configuration and modeling files. No code depends on a family's name. The code reads
these fields, or the ModelConfig that is built from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# Which layers have a sliding window. none: no layer. all: every layer, if sliding_window is set.
# late: layers from max_window_layers on, if use_sliding_window is set. switched: every layer, if both are set.
# pattern: all layers except every sliding_window_pattern-th one.
WindowRule = Literal["none", "all", "late", "switched", "pattern"]
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The facts about the experts of one family.

    count_fields: the names of the field with the number of experts. default_count: the number without such a field.
    width_field: the field with the intermediate width of one expert.
    normalizes: the weights of a token's chosen experts are always divided by their sum. Otherwise norm_topk_prob
    decides.
    has_dense_layers: decoder_sparse_step and mlp_only_layers say which layers have an MLP instead of experts.
    has_shared_expert: a further expert computes all tokens. Its output is multiplied by a gate.
    block: the path of the experts and of their router within a layer in checkpoints.
    gate, up, down: the names of an expert's linears in checkpoints.
    """

    count_fields: tuple[str, ...]
    default_count: int
    width_field: str
    normalizes: bool = False
    has_dense_layers: bool = True
    has_shared_expert: bool = False
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def fields(self) -> set[str]:
        """The fields of config.json that describe the experts."""
        fields = {*self.count_fields, self.width_field, "num_experts_per_tok"}
        if not self.normalizes:
            fields.add("norm_topk_prob")
        if self.has_dense_layers:
            fields |= {"decoder_sparse_step", "mlp_only_layers"}
        if self.has_shared_expert:
            fields.add("shared_expert_intermediate_size")
        return fields


@dataclass(frozen=True, slots=True)
class Family:
    """The facts of one family.

    defaults: fields that config.json may leave out, with the value that transformers assumes.
    fixed: fields that some checkpoints have and transformers ignores, with their only correct value.
    ignored: fields that some checkpoints have and transformers ignores, with any value.
    activation: used where activation_field is absent or null.
    qkv_bias: q, k and v always have biases.
    bias_fields, softcap_fields: the fields for biases and for softcaps that transformers reads.
    fused_linears: q, k and v are one linear, gate and up another, in checkpoints and for adapters.
    partial_rotation: partial_rotary_factor may be below one.
    rope_types, rope_aliases: the kinds of rotary embedding, and other names for them.
    rope_by_layer_type: `rope_parameters` holds one table per type of layer.
    qk_norm: RMSNorm of each head before rotation.
    post_norms: the outputs of attention and MLP are normalized before they are added to the residual.
    norm_offset: a norm's weight is stored as its difference from one.
    scaled_embedding: embeddings are multiplied by sqrt(hidden_size).
    experts: the facts about the experts that replace MLPs; None: all layers have MLPs.

    The last four fields are for a decoder that is part of a larger model:
    config_field: the field of config.json that describes the decoder.
    root, stored_root: prefix of the decoder's modules in transformers, and of its tensors in checkpoints.
    skipped_prefixes: prefixes of the tensors of the other parts.
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
    experts: ExpertFacts | None = None
    config_field: str | None = None
    root: str = "model"
    stored_root: str = "model"
    skipped_prefixes: tuple[str, ...] = ()


_ATTENTION_BIAS = frozenset({"attention_bias"})
_QWEN_MOE_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
}
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
    "mixtral": Family(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
        },
        windows="all",
        experts=ExpertFacts(
            ("num_local_experts", "num_experts"),
            8,
            "intermediate_size",
            normalizes=True,
            has_dense_layers=False,
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
        ),
    ),
    "qwen2_moe": Family(
        {
            **_QWEN_MOE_DEFAULTS,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        ignored=frozenset({"sliding_window", "max_window_layers"}),
        bias_fields=frozenset({"qkv_bias"}),
        experts=ExpertFacts(("num_experts",), 60, "moe_intermediate_size", has_shared_expert=True),
    ),
    "qwen3_moe": Family(
        {
            **_QWEN_MOE_DEFAULTS,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        ignored=frozenset({"max_window_layers"}),
        windows="switched",
        bias_fields=_ATTENTION_BIAS,
        qk_norm=True,
        experts=ExpertFacts(("num_experts", "num_local_experts"), 128, "moe_intermediate_size"),
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
        rope_aliases={"su": "longrope", "yarn": "longrope"},  # The names in Phi-3's first checkpoints.
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
    # The larger Gemma 3 models also read images. Their text part is the model of the family gemma3_text.
    "gemma3": replace(
        _FAMILIES["gemma3_text"],
        # transformers applies the softcap to logits only if the text model is used alone.
        softcap_fields=frozenset(),
        config_field="text_config",
        root="model.language_model",
        stored_root="language_model.model",
        skipped_prefixes=("vision_tower.", "multi_modal_projector."),
    ),
}
