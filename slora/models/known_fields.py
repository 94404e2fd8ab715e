"""The fields of a config.json that our decoder reads, and the fields that are known not to change the logits.

Any other field is refused, because it may change the model's answers. For example, a newer checkpoint may describe an
unknown kind of layer with it. The lists come from transformers' config classes and from the fields that training tools
add.
"""

import re
from collections.abc import Mapping

from slora.models.config_fields import ConfigFields
from slora.models.model_family import Family

__all__ = ["known_fields", "refuse_unknown_fields", "refuse_unknown_rope_fields"]

_SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
}
_READ = _SIZES | {
    "model_type",
    "rms_norm_eps",
    "tie_word_embeddings",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
}
_TRAINING = {
    "attention_dropout",
    "classifier_dropout",
    "embd_pdrop",
    "gradient_checkpointing",
    "hidden_dropout",
    "initializer_range",
    "pretraining_tp",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
}
_BOOKKEEPING = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_from_model_config",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cls_token_id",
    "custom_pipelines",
    "decoder_start_token_id",
    "finetuning_task",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "mask_token_id",
    "max_sequence_length",
    "model_max_length",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "prefix",
    "problem_type",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention_2",
    "use_flash_attn",
}
# Old checkpoints keep sampling parameters in config.json. transformers reads them from generation_config.json only.
_SAMPLING = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
_HARMLESS: set[str] = _TRAINING | _BOOKKEEPING | _SAMPLING
# Fields that change the answers of some models, with the value at which they change nothing.
_NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
# Fields of a multi-part config outside the part that describes the decoder.
_PARTS = {
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
}
_SHARED = {"dtype", "eos_token_id", "model_type", "quantization_config", "tie_word_embeddings", "torch_dtype"}
_ROPE = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
}
# A text in a field with such a name describes the checkpoint. Names of parts of the model are excluded.
_DESCRIPTION = re.compile(
    r"(.*_)?(name|name_or_path|path|version|revision|commit|hash|date|time|timestamp|author|authors|license|language|"
    r"languages|description|url|source|tag|tags|organization|quantized_by|created_at|created_by|library)"
)
_NUMBERED = re.compile(r"(.*_)?(version|date|timestamp|created_at)")
_PART_OF_MODEL = re.compile(
    r"act|norm|att|rope|rotary|pos|mlp|expert|embed|layer|cache|impl|kernel|class|quant_|mask|bias"
)
_REMEDY = (
    "; slora's decoder does not use this field, which may change the model's output: remove the "
    "field if it has no effect, or choose --model-impl transformers"
)


def known_fields(family: Family) -> set[str]:
    """The fields that are read, or that have at least one harmless value."""
    return _read_by(family) | _HARMLESS | _NEUTRAL.keys()


def refuse_unknown_fields(top: ConfigFields, fields: ConfigFields, family: Family) -> None:
    """Raises ConfigError for a field that is not null, not read and not known to be harmless.

    top: the whole config.json. fields: the part that describes the decoder, which may be the whole file.
    """
    if family.config_field is not None:
        _refuse(top, _SHARED | _PARTS | _HARMLESS | {family.config_field}, {})
    _refuse(fields, _read_by(family) | _HARMLESS, family.fixed)


def refuse_unknown_rope_fields(values: ConfigFields) -> None:
    """Raises ConfigError for an unknown field in a table that describes rotary embedding."""
    _refuse(values, _ROPE, {})


def _refuse(fields: ConfigFields, known: set[str], fixed: Mapping[str, object]) -> None:
    neutral = {**_NEUTRAL, **fixed}
    for name in sorted(fields.names() - (known - fixed.keys())):
        if name in neutral and fields.equals(name, neutral[name]):
            continue
        if not _describes(name, fields):
            raise fields.refusal(name, _REMEDY)


def _describes(name: str, fields: ConfigFields) -> bool:
    """Returns whether the field only tells people about the checkpoint, such as its name, version or date."""
    is_description = _DESCRIPTION.fullmatch(name) is not None and _PART_OF_MODEL.search(name) is None
    return is_description and fields.is_text(name, or_number=_NUMBERED.fullmatch(name) is not None)


def _read_by(family: Family) -> set[str]:
    read = _READ | family.defaults.keys() | family.bias_fields | family.softcap_fields
    read |= family.ignored | {family.activation_field}
    if family.experts is not None:
        read |= family.experts.fields
    match family.windows:
        case "all":
            read.add("sliding_window")
        case "switched":
            read |= {"sliding_window", "use_sliding_window"}
        case "late":
            read |= {"sliding_window", "use_sliding_window", "max_window_layers"}
        case "pattern":
            read |= {"sliding_window", "sliding_window_pattern"}
    if family.rope_by_layer_type:
        read.add("rope_local_base_freq")
    return read
