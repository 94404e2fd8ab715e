"""Reads a checkpoint's config.json into the values that our decoder needs. Refuses unsupported fields by name.

This module does not import torch: the API and loader processes read the same file for the shapes of adapters.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slora.core.errors import ConfigError
from slora.models.config_fields import ConfigFields, read_json_object
from slora.models.expert_config import ExpertConfig, read_experts
from slora.models.known_fields import refuse_unknown_fields
from slora.models.layer_types import read_layer_types, read_windows
from slora.models.model_family import FAMILIES, Family
from slora.models.rope_config import LongRopeScaling, Rope, YarnScaling, read_ropes
from slora.models.stored_quantization import StoredQuantization, read_quantization
from slora_kernels.layout import ModelShape, fuse_groups, llama_shape, mix_experts

Activation = Literal["silu", "gelu", "gelu_tanh"]

_FUSED_PATHS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
# Top-level fields of a multi-part config that hold for all of its parts.
_SHARED_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder with causal attention and gated MLPs. Widths are in elements.

    ropes, rope_of_layer: the model's different rotary embeddings, and for each layer the index of its embedding.
    window_of_layer: how many tokens a token of the layer sees, itself included; None: all earlier tokens.
    attention_softcap, final_softcap: scaled scores and logits s become softcap * tanh(s / softcap). None: no softcap.
    embedding_scale: factor on embeddings. The decoder rounds it to the model's dtype. None: no factor.
    qk_norm: RMSNorm of each query and key head before rotation.
    experts: the experts that replace the MLP in some layers; None: all layers have MLPs.
    post_norms: norms also after attention and after the MLP, before their outputs are added to the residual.
    norm_offset: norms multiply by 1 + weight.
    fused_linears: q, k and v are one linear, gate and up another, in the checkpoint and for adapters.
    root: prefix of the decoder's modules. stored_root: prefix of its tensors in a checkpoint.
    skipped_prefixes: prefixes of the tensors of other parts of the model.
    quantization: how the checkpoint stores the linears' weights; None: as numbers of `dtype`.
    """

    family: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    experts: ExpertConfig | None
    activation: Activation
    max_positions: int
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    window_of_layer: tuple[int | None, ...]
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    embedding_scale: float | None
    rms_norm_eps: float
    qk_norm: bool
    post_norms: bool
    norm_offset: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    fused_linears: bool
    root: str
    stored_root: str
    skipped_prefixes: tuple[str, ...]
    tie_word_embeddings: bool
    quantization: StoredQuantization | None
    dtype: str
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_directory(directory: Path) -> "ModelConfig":
        """Reads config.json and generation_config.json. Raises ConfigError naming the file and the field."""
        path = directory / "config.json"
        try:
            raw = read_json_object(path)
        except OSError as error:
            raise ConfigError(f"no model at {directory}: {path} can't be read ({error.strerror})") from error
        return _parse(raw, read_eos_token_ids(raw, directory), path)

    @property
    def rope_switch(self) -> int | None:
        """The longest sequence, in tokens, that uses longrope's short factors.

        None if no rope has two sets of factors.
        """
        scalings = (rope.scaling for rope in self.ropes)
        return next((s.original_max_positions for s in scalings if isinstance(s, LongRopeScaling)), None)

    def shape(self, element_bytes: int) -> ModelShape:
        """The sizes that decide the layout of pages and adapters."""
        shape = llama_shape(
            self.num_layers,
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.intermediate_size,
            self.vocab_size,
            element_bytes,
        )
        if self.fused_linears:
            shape = fuse_groups(shape, *_FUSED_PATHS)
        if self.experts is not None:
            shape = mix_experts(shape, self.experts.layers, self.experts.shared_width)
        return replace(shape, layers_path=f"{self.root}.layers", embedding_path=f"{self.root}.embed_tokens")


def _parse(raw: dict[str, Any], eos_token_ids: tuple[int, ...], path: Path) -> ModelConfig:
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(f"{path}: model_type is {model_type!r}; this version serves {', '.join(FAMILIES)}")
    fields = _fields(raw, family, path)
    refuse_unknown_fields(ConfigFields(raw, path), fields, family)
    # The number of layers is bounded here, because a list of all layers is built before the weights are opened.
    num_layers, head_dim = fields.whole("num_hidden_layers", most=_MOST_LAYERS), _head_dim(fields)
    max_positions = fields.whole("max_position_embeddings")
    layer_types = read_layer_types(fields, family.windows, num_layers)
    ropes, rope_of_layer = read_ropes(fields, family, head_dim, layer_types)
    max_positions = max(max_positions, *map(_count_positions, ropes))
    hidden_size = fields.whole("hidden_size")
    attention_bias = "attention_bias" in family.bias_fields and fields.flag("attention_bias")
    has_qkv_bias = "qkv_bias" in family.bias_fields and fields.flag("qkv_bias")
    return ModelConfig(
        family=str(model_type),
        vocab_size=fields.whole("vocab_size"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=fields.whole("num_attention_heads"),
        num_kv_heads=_num_kv_heads(fields),
        head_dim=head_dim,
        intermediate_size=fields.whole("intermediate_size"),
        experts=None if family.experts is None else read_experts(fields, family.experts, num_layers),
        activation=_activation(fields, family),
        max_positions=max_positions,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        window_of_layer=read_windows(fields, family.windows, layer_types, max_positions),
        attention_scale=_attention_scale(fields, family, head_dim),
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        final_softcap=fields.optional_number("final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else None,
        rms_norm_eps=fields.number("rms_norm_eps"),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        norm_offset=family.norm_offset,
        qkv_bias=family.qkv_bias or attention_bias or has_qkv_bias,
        output_bias=attention_bias,
        mlp_bias="mlp_bias" in family.bias_fields and fields.flag("mlp_bias"),
        fused_linears=family.fused_linears,
        root=family.root,
        stored_root=family.stored_root,
        skipped_prefixes=family.skipped_prefixes,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        quantization=read_quantization(fields),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
        eos_token_ids=eos_token_ids,
    )


def _fields(raw: dict[str, Any], family: Family, path: Path) -> ConfigFields:
    top = ConfigFields(raw, path)
    if family.config_field is None:
        return ConfigFields({**family.defaults, **raw}, path)
    shared = {name: raw[name] for name in _SHARED_FIELDS if name in raw}
    return top.within(family.config_field, {**family.defaults, **top.table(family.config_field), **shared})


def _head_dim(fields: ConfigFields) -> int:
    head_dim = fields.whole("head_dim", fields.whole("hidden_size") // fields.whole("num_attention_heads"))
    if head_dim % 2:
        raise fields.refusal(
            "head_dim", f", so a head has {head_dim} dimensions; rotary embedding needs an even number"
        )
    return head_dim


def _attention_scale(fields: ConfigFields, family: Family, head_dim: int) -> float:
    divisor = float(head_dim)
    if "query_pre_attn_scalar" in family.defaults:
        divisor = fields.number("query_pre_attn_scalar", divisor)
    scale: float = divisor**-0.5
    return scale


def _num_kv_heads(fields: ConfigFields) -> int:
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal(
            "num_attention_heads", f"; it must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _activation(fields: ConfigFields, family: Family) -> Activation:
    name = fields.text(family.activation_field, family.activation)
    if name not in _ACTIVATIONS:
        raise fields.refusal(family.activation_field, f"; this version serves {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _count_positions(rope: Rope) -> int:
    """Returns the number of positions that YaRN extends the model to; 0 without YaRN.

    Checkpoints with YaRN keep max_position_embeddings at the original length.
    """
    scaling = rope.scaling
    return int(scaling.original_max_positions * scaling.factor) if isinstance(scaling, YarnScaling) else 0


def read_eos_token_ids(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens that end an answer.

    generation_config.json has precedence over config.json, because chat models list all of these tokens only there.
    """
    path = directory / "generation_config.json"
    if path.exists():
        found = _parse_eos(read_json_object(path).get("eos_token_id"), path)
        if found:
            return found
    return _parse_eos(raw.get("eos_token_id"), directory / "config.json")


def _parse_eos(value: Any, path: Path) -> tuple[int, ...]:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(tokens)
