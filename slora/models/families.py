"""The families of models that our decoder serves: one function reads the config.json of one family.

A function states what transformers' class of that name computes, in terms of `ModelConfig`: `assume` has the class's
defaults, and a field that a function does not read is refused. Other code that reads a config.json does
not depend on a family's name. A new family is a new function here, as long as `ModelConfig` can express it. GGUF files
have a table of their own (`gguf_model.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from slora.core.errors import ConfigError
from slora.models.config_fields import ConfigFields, read_config, read_eos_token_ids
from slora.models.model_config import Activation, ExpertConfig, ModelConfig
from slora.models.rope_config import (
    FULL,
    SLIDING,
    Rope,
    YarnScaling,
    read_phi3_rope,
    read_rope,
    read_rope_of_type,
)
from slora.models.stored_quantization import read_quantization
from slora.models.weights.checkpoint import find_stored_dtype

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST_LAYERS = 10_000
# A checkpoint has three tensors for each expert of each layer, which are listed before the weights are opened.
_MOST_EXPERTS = 4096


def _read_llama(fields: ConfigFields) -> ModelConfig:
    fields.assume(max_position_embeddings=2048, rms_norm_eps=1e-6)
    config, bias = _read_decoder(fields, _equal_layers(fields, slide=False)), fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _read_mistral(fields: ConfigFields) -> ModelConfig:
    """Llama with a sliding window in all layers."""
    fields.assume(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-6, sliding_window=4096
    )
    return _read_decoder(fields, _equal_layers(fields, slide="sliding_window" in fields))


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Llama with biases of q, k and v, and with a sliding window in the last layers."""
    fields.assume(num_key_value_heads=32, max_position_embeddings=32768, rms_norm_eps=1e-6)
    return replace(_read_decoder(fields, _late_windows(fields)), qkv_bias=True)


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Llama with norms of query and key heads, and with a sliding window in the last layers."""
    fields.assume(num_key_value_heads=32, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-6)
    config, bias = _read_decoder(fields, _late_windows(fields)), fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _read_mixtral(fields: ConfigFields) -> ModelConfig:
    """Mistral with experts in all layers."""
    fields.assume(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6)
    config = _read_decoder(fields, _equal_layers(fields, slide="sliding_window" in fields))
    count = _count_experts(fields, 8, "num_local_experts", "num_experts")
    experts = ExpertConfig(
        count=count,
        chosen=fields.whole("num_experts_per_tok", 2, most=count),
        width=config.intermediate_size,
        width_field="intermediate_size",
        normalizes=True,
        layers=frozenset(range(config.num_layers)),
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return replace(config, experts=experts)


def _read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen2 with experts, one of which computes all tokens. Its output is multiplied by a gate.

    transformers passes no window to its attention.
    """
    fields.assume(num_key_value_heads=16, max_position_embeddings=32768, rms_norm_eps=1e-6, qkv_bias=True)
    fields.assume(num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    fields.ignore("sliding_window", "max_window_layers", "shared_expert_intermediate_size")
    config = _read_decoder(fields, _equal_layers(fields, slide=False))
    experts = _read_qwen_experts(fields, config, _count_experts(fields, 60, "num_experts"))
    if experts is not None:
        experts = replace(experts, shared_width=fields.whole("shared_expert_intermediate_size"))
    return replace(config, qkv_bias=fields.flag("qkv_bias"), experts=experts)


def _read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen3 with experts, and with a sliding window in all layers or in none."""
    fields.assume(
        num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=4096
    )
    fields.assume(num_experts_per_tok=8, moe_intermediate_size=768)
    slide = fields.flag("use_sliding_window") and "sliding_window" in fields
    fields.ignore("sliding_window", "max_window_layers")
    config, bias = _read_decoder(fields, _equal_layers(fields, slide=slide)), fields.flag("attention_bias")
    count = _count_experts(fields, 128, "num_experts", "num_local_experts")
    experts = _read_qwen_experts(fields, config, count)
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=experts)


def _read_phi3(fields: ConfigFields) -> ModelConfig:
    """Mistral with fused linears, with longrope, and with heads that may rotate in part."""
    fields.assume(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
    layer_types = _equal_layers(fields, slide="sliding_window" in fields)
    return replace(_read_decoder(fields, layer_types, read_phi3_rope), fused_linears=True)


def _read_gemma2(fields: ConfigFields) -> ModelConfig:
    """Gemma with softcaps of scores and logits, and with a sliding window in every second layer."""
    fields.assume(max_position_embeddings=8192, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    fields.require("sliding_window_pattern", 2)
    fields.ignore("sliding_window_size")
    return replace(
        _read_gemma(fields, _pattern_of_windows(fields, 2), read_rope),
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        final_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _read_gemma3_text(fields: ConfigFields) -> ModelConfig:
    config = _read_gemma3_decoder(fields)
    return replace(config, final_softcap=fields.optional_number("final_logit_softcapping"))


def _read_gemma3(fields: ConfigFields) -> ModelConfig:
    """The larger Gemma 3 models also read images. Their text part is a decoder of gemma3_text.

    transformers applies the softcap to logits only if the text model is used alone.
    """
    shared = ("model_type", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    text = fields.part("text_config", shared)
    fields.ignore("boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id")
    fields.ignore("image_token_index", "mm_tokens_per_image", "vision_config")
    config = _read_gemma3_decoder(text)
    text.refuse_unread()
    return replace(
        config,
        root="model.language_model",
        stored_root="language_model.model",
        skipped_prefixes=("vision_tower.", "multi_modal_projector."),
    )


def _read_gemma3_decoder(fields: ConfigFields) -> ModelConfig:
    """Gemma with norms of query and key heads, a window in five of six layers, and another rope in these layers."""
    fields.assume(vocab_size=262208, num_attention_heads=8, max_position_embeddings=131072)
    fields.assume(rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6)
    layer_types = _pattern_of_windows(fields, fields.whole("sliding_window_pattern"))
    return replace(_read_gemma(fields, layer_types, read_rope_of_type), qk_norm=True)


_ReadRope = Callable[[ConfigFields, int, str], Rope]


def _read_gemma(fields: ConfigFields, layer_types: tuple[str, ...], read_rope: _ReadRope) -> ModelConfig:
    """A decoder with norms also after attention and MLP, and with scaled embeddings.

    A norm's weight is stored as its difference from one.
    """
    fields.assume(num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, sliding_window=4096)
    fields.assume(query_pre_attn_scalar=256, tie_word_embeddings=True)
    fields.ignore("sliding_window", "hidden_act")  # transformers reads hidden_activation.
    activation = _read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    config = _read_decoder(fields, layer_types, read_rope, activation)
    bias = fields.flag("attention_bias")
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", config.head_dim) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        norm_offset=True,
    )


FAMILIES: Mapping[str, Callable[[ConfigFields], ModelConfig]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "mixtral": _read_mixtral,
    "qwen2_moe": _read_qwen2_moe,
    "qwen3_moe": _read_qwen3_moe,
    "phi3": _read_phi3,
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3_text,
    "gemma3": _read_gemma3,
}


def read_model_config(directory: Path) -> ModelConfig:
    """Reads config.json and generation_config.json. Raises ConfigError naming the file and the field."""
    raw, path = read_config(directory), directory / "config.json"
    model_type = raw.get("model_type")
    read_family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if read_family is None:
        raise ConfigError(f"{path}: model_type is {model_type!r}; this version serves {', '.join(FAMILIES)}")
    eos_token_ids = read_eos_token_ids(raw, directory)
    fields = ConfigFields(raw, path)
    config = read_family(fields)
    fields.refuse_unread()
    dtype = config.dtype or find_stored_dtype(directory) or "float32"
    return replace(config, eos_token_ids=eos_token_ids, dtype=dtype)


def _read_decoder(
    fields: ConfigFields,
    layer_types: tuple[str, ...],
    read_rope: _ReadRope = read_rope,
    activation: Activation | None = None,
) -> ModelConfig:
    """Reads what all families have. The caller adds what is special about its family.

    activation: None: the one that hidden_act names.
    """
    num_heads, hidden_size = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_dim = fields.whole("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.refusal(
            "head_dim", f", so a head has {head_dim} dimensions; rotary embedding needs an even number"
        )
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal(
            "num_attention_heads", f"; it must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    rope_of_type = {kind: read_rope(fields, head_dim, kind) for kind in sorted(set(layer_types))}
    ropes = tuple(dict.fromkeys(rope_of_type.values()))
    max_positions = max(fields.whole("max_position_embeddings"), *map(_count_positions, ropes))
    window = _read_window(fields, max_positions) if SLIDING in layer_types else None
    return ModelConfig(
        family=fields.text("model_type", ""),
        dtype=fields.text("dtype", fields.text("torch_dtype", "")),
        vocab_size=fields.whole("vocab_size"),
        num_layers=len(layer_types),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.whole("intermediate_size"),
        max_positions=max_positions,
        activation=activation or _read_activation(fields, "hidden_act", "silu"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        ropes=ropes,
        rope_of_layer=tuple(ropes.index(rope_of_type[kind]) for kind in layer_types),
        window_of_layer=tuple(window if kind == SLIDING else None for kind in layer_types),
        attention_scale=float(head_dim**-0.5),
        quantization=read_quantization(fields),
    )


def _count_positions(rope: Rope) -> int:
    """Returns the number of positions that YaRN extends the model to; 0 without YaRN.

    Checkpoints with YaRN keep max_position_embeddings at the original length.
    """
    scaling = rope.scaling
    return int(scaling.original_max_positions * scaling.factor) if isinstance(scaling, YarnScaling) else 0


def _read_activation(fields: ConfigFields, name: str, default: str) -> Activation:
    activation = fields.text(name, default)
    if activation not in _ACTIVATIONS:
        raise fields.refusal(name, f"; this version serves {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _count_layers(fields: ConfigFields) -> int:
    # Bounded here, because a list of all layers is built before the weights are opened.
    return fields.whole("num_hidden_layers", most=_MOST_LAYERS)


def _equal_layers(fields: ConfigFields, *, slide: bool) -> tuple[str, ...]:
    """The types of a family whose layers all have a sliding window, or all have none."""
    implied = (SLIDING if slide else FULL,) * _count_layers(fields)
    if _read_layer_types(fields, implied) != implied:
        raise fields.refusal("layer_types", "; all layers of this model_type have the same type")
    return implied


def _late_windows(fields: ConfigFields) -> tuple[str, ...]:
    """Layers from max_window_layers on have a window, if use_sliding_window is set."""
    fields.assume(sliding_window=4096, max_window_layers=28)
    is_used, first = fields.flag("use_sliding_window"), fields.whole("max_window_layers", least=0)
    slides = "sliding_window" in fields and is_used
    implied = (SLIDING if slides and layer >= first else FULL for layer in range(_count_layers(fields)))
    layer_types = _read_layer_types(fields, implied)
    if SLIDING in layer_types and not is_used:
        raise fields.refusal("use_sliding_window", f", but layer_types has {SLIDING}; set it to true")
    return layer_types


def _pattern_of_windows(fields: ConfigFields, pattern: int) -> tuple[str, ...]:
    """All layers except every `pattern`-th one have a window."""
    layers = range(1, _count_layers(fields) + 1)
    return _read_layer_types(fields, (SLIDING if layer % pattern else FULL for layer in layers))


def _read_layer_types(fields: ConfigFields, implied: Iterable[str]) -> tuple[str, ...]:
    """The types that config.json lists. implied: the types if it lists none."""
    given, num_layers = fields.texts("layer_types"), _count_layers(fields)
    if given is None:
        return tuple(implied)
    if len(given) != num_layers or not set(given) <= {FULL, SLIDING}:
        raise fields.refusal(
            "layer_types", f"; it must hold {FULL} or {SLIDING} for each of {num_layers} layers"
        )
    return given


def _read_window(fields: ConfigFields, max_positions: int) -> int | None:
    window = fields.optional_whole("sliding_window")
    if window is None:
        raise fields.refusal(
            "sliding_window", f", but layer_types has {SLIDING}; give the window as a number of tokens"
        )
    # A window that no sequence can exceed has no effect.
    return window if window < max_positions else None


def _count_experts(fields: ConfigFields, default: int, *names: str) -> int:
    """Reads the number of experts. A config may name it in several ways, but only with one value."""
    counts = {name: fields.whole(name, most=_MOST_EXPERTS) for name in names if name in fields}
    if len(set(counts.values())) > 1:
        first, second = list(counts)[:2]
        raise fields.refusal(second, f", but {first} is {counts[first]}; both name the number of experts")
    return next(iter(counts.values()), default)


def _read_qwen_experts(fields: ConfigFields, config: ModelConfig, count: int) -> ExpertConfig | None:
    """The experts of a model in which some layers may have an MLP instead. None if all layers do."""
    step, dense = fields.whole("decoder_sparse_step", 1), set(fields.wholes("mlp_only_layers"))
    sparse = (layer for layer in range(config.num_layers) if (layer + 1) % step == 0)
    experts = ExpertConfig(
        count=count,
        chosen=fields.whole("num_experts_per_tok", most=count),
        width=fields.whole("moe_intermediate_size"),
        width_field="moe_intermediate_size",
        normalizes=fields.flag("norm_topk_prob"),
        layers=frozenset(sparse) - dense,
    )
    return experts if experts.layers else None
