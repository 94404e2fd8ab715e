from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig

from slora.core.errors import ConfigError
from slora.models.families import FAMILIES, read_model_config
from slora.models.model_config import ExpertConfig, ModelConfig
from slora.models.model_spec import MODEL_IMPLS, ModelSpec, read_model_spec
from slora.models.rope_config import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from tests.slora.models.hub_configs import HUB
from tests.support.json_files import write_json
from tests.support.tiny_models import MODELS, make_config

LLAMA = {
    "model_type": "llama", "vocab_size": 100, "num_hidden_layers": 2, "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
NULL = object()
# Removes the top-level fields of LLAMA that a multi-part config has inside one of its parts.
NOTHING_BESIDE: dict[str, Any] = dict.fromkeys(LLAMA.keys() - {"model_type"})
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
KINDS = {
    type(None): "default",
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    LongRopeScaling: "longrope",
}


def read(directory: Path, generation: Any = None, **changes: Any) -> ModelConfig:
    """LLAMA's config.json with `changes`. The value None removes a field, and NULL sets it to null."""
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    fields = {name: None if value is NULL else value for name, value in fields.items()}
    write_json(directory / "config.json", fields)
    if generation is not None:
        write_json(directory / "generation_config.json", generation)
    return read_model_config(directory)


def assert_agree(ours: ModelConfig, theirs: PreTrainedConfig) -> None:
    """Compares every field that transformers reads from a config.json with ours."""
    assert ours.family == theirs.model_type
    theirs = theirs.get_text_config()
    num_layers, head_dim = theirs.num_hidden_layers, getattr(theirs, "head_dim", None)
    head_dim = head_dim or theirs.hidden_size // theirs.num_attention_heads
    window = getattr(theirs, "sliding_window", None)
    implied = ["sliding_attention" if window else "full_attention"] * num_layers
    layer_types = getattr(theirs, "layer_types", None) or implied
    windows = [window if kind == "sliding_attention" else None for kind in layer_types]
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_layers == num_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == head_dim
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_positions >= theirs.max_position_embeddings
    assert list(ours.window_of_layer) == [w if w and w < ours.max_positions else None for w in windows]
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", head_dim) ** -0.5
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.final_softcap == getattr(theirs, "final_logit_softcapping", None)
    if ours.experts is not None:
        assert_experts_agree(ours.experts, theirs)
    for layer, kind in enumerate(layer_types):
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert ours.ropes[ours.rope_of_layer[layer]].theta == rope["rope_theta"]
        assert KINDS[type(ours.ropes[ours.rope_of_layer[layer]].scaling)] == rope["rope_type"]


def assert_experts_agree(ours: ExpertConfig, theirs: PreTrainedConfig) -> None:
    assert ours.count == theirs.num_experts
    assert ours.chosen == theirs.num_experts_per_tok
    assert ours.width == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert ours.normalizes == getattr(theirs, "norm_topk_prob", True)
    assert ours.shared_width == getattr(theirs, "shared_expert_intermediate_size", None)
    dense = getattr(theirs, "mlp_only_layers", None) or []
    assert ours.layers == set(range(theirs.num_hidden_layers)) - set(dense)


@pytest.mark.parametrize("name", MODELS)
def test_configs_saved_by_transformers_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    theirs = make_config(name)
    theirs.save_pretrained(tmp_path)
    assert_agree(read_model_config(tmp_path), theirs)


@pytest.mark.parametrize("name", HUB)
def test_configs_of_known_models_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "config.json", HUB[name])
    ours, theirs = read_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert_agree(ours, theirs)
    theirs.save_pretrained(tmp_path)
    saved = read_model_config(tmp_path)
    assert replace(saved, eos_token_ids=ours.eos_token_ids) == ours, "as saved by transformers 5"


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_config_fields_of_each_family_get_the_defaults_of_transformers(
    tmp_path: Path, family: str
) -> None:
    fields = {"vocab_size": 99, "hidden_size": 512, "num_attention_heads": 32}
    fields |= {"num_hidden_layers": 7, "intermediate_size": 96}
    config = {"model_type": family, **({"text_config": fields} if family == "gemma3" else fields)}
    write_json(tmp_path / "config.json", config)
    assert_agree(read_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("scaling", [{}, LLAMA3_ROPE, {"rope_type": "linear", "factor": 4.0}])
def test_the_spellings_of_transformers_four_and_five_mean_the_same(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    five = read(
        tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "default", **scaling}, dtype="float16"
    )
    four = read(tmp_path, rope_theta=5e5, rope_scaling=scaling or None, torch_dtype="float16")
    assert five == four
    assert five.ropes[0].theta == 5e5
    assert five.dtype == "float16"


def test_the_oldest_spelling_of_a_rope_s_type_is_understood(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.ropes == (Rope(1e4, 8, LinearScaling(2.0)),)


def test_the_rope_type_name_of_the_first_phi_3_checkpoints_is_longrope(tmp_path: Path) -> None:
    """transformers 5 itself can no longer read this spelling."""
    fields = HUB["Phi-3-mini-128k-instruct"]
    read_as = []
    for kind in ("longrope", "su", "yarn"):
        scaling = {**fields["rope_scaling"], "type": kind}
        write_json(tmp_path / "config.json", {**fields, "rope_scaling": scaling})
        read_as.append(read_model_config(tmp_path))
    assert read_as[0] == read_as[1] == read_as[2]
    assert read_as[0].rope_switch == 4096


def test_yarn_multiplies_the_maximum_length_by_its_factor(tmp_path: Path) -> None:
    """Such checkpoints keep max_position_embeddings at the original length, as Qwen's instructions for long texts
    say."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read(tmp_path, rope_scaling=yarn).max_positions == 1024
    assert read(tmp_path, rope_scaling={**yarn, "factor": 0.5}).max_positions == 256


def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    for window, expected in ((255, 255), (256, None), (4096, None)):
        config = read(tmp_path, model_type="mistral", sliding_window=window)
        assert config.window_of_layer == (expected, expected)


def test_null_disables_a_default_only_for_optional_features(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**LLAMA, "model_type": "gemma2", "head_dim": 8})
    assert read_model_config(tmp_path).final_softcap == 30.0
    fields = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": None}
    write_json(tmp_path / "config.json", {**fields, "hidden_activation": None})
    config = read_model_config(tmp_path)
    assert config.final_softcap is None
    assert config.activation == "gelu_tanh"


def test_missing_config_fields_get_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=None, rms_norm_eps=None)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert config.ropes == (Rope(10000.0, 8),)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.tie_word_embeddings)


def test_biases_are_where_each_family_has_them(tmp_path: Path) -> None:
    llama = read(tmp_path, attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias
    qwen = read(tmp_path, model_type="qwen2")
    assert qwen.qkv_bias and not qwen.output_bias and not qwen.mlp_bias


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (None, None, ()),
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, {}, (2,)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"eos_token_id": None}, (2,)),
    ],
)
def test_the_tokens_that_end_an_answer_come_from_the_generation_config_first(
    tmp_path: Path, eos: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, generation, eos_token_id=eos).eos_token_ids == expected


REFUSED = {
    "family": ({"model_type": "mamba"}, "model_type is 'mamba'; this version serves llama, mistral, qwen2"),
    "no_family": ({"model_type": None}, "model_type is None"),
    "missing": ({"hidden_size": None}, "hidden_size is None; it must be a positive whole number"),
    "zero": ({"vocab_size": 0}, "vocab_size is 0"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "text": ({"intermediate_size": "64"}, "intermediate_size is '64'"),
    "boolean": ({"num_attention_heads": True}, "num_attention_heads is True"),
    "fraction": ({"hidden_size": 32.5}, "hidden_size is 32.5"),
    "odd_groups": (
        {"num_key_value_heads": 3},
        "num_attention_heads is 4; it must be a multiple of num_key_value_heads 3",
    ),
    "odd_head": ({"head_dim": 7}, "head_dim is 7"),
    "no_head": ({"hidden_size": 3}, "head_dim is 0"),
    "epsilon": ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a positive number"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is 'relu'; this version serves silu, gelu, gelu_pytorch"),
    "window_off": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention"]},
        "use_sliding_window is None, but layer_types has sliding_attention",
    ),
    "window_missing": (
        {"model_type": "gemma2", "sliding_window": NULL},
        "sliding_window is None, but layer_types has sliding_attention",
    ),
    "window_zero": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    "layer_types_short": (
        {"model_type": "qwen3", "layer_types": ["full_attention"]},
        r"layer_types is \['full_attention'\]; it must hold full_attention or sliding_attention for each of 2",
    ),
    "layer_types_chunked": (
        {"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]},
        "layer_types is .* it must hold full_attention or sliding_attention",
    ),
    "layer_types_mixed": (
        {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is .* all layers of this model_type have the same type",
    ),
    "layer_types_text": ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list"),
    "bidirectional": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "use_bidirectional_attention is True; slora's decoder does not use this field",
    ),
    "softcap": (
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping is 30.0; slora's decoder does not use this field",
    ),
    "softcap_of_gemma3": (
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping is 50.0; slora's decoder does not use this field",
    ),
    "softcap_of_gemma3_in_parts": (
        {"model_type": "gemma3", "text_config": {**LLAMA, "final_logit_softcapping": 30.0}, **NOTHING_BESIDE},
        "text_config.final_logit_softcapping is 30.0; slora's decoder does not use this field",
    ),
    "acausal": (
        {"is_causal": False},
        "is_causal is False; slora's decoder does not use this field, which may change the model's output: remove the "
        "field if it has no effect, or choose --model-impl transformers",
    ),
    "scale": ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64; slora's decoder does not use this field"),
    "layers_that_differ": (
        {"per_layer_config": {"0": {"intermediate_size": 16}}},
        "per_layer_config is .* slora's decoder does not use this field",
    ),
    "pattern_of_gemma2": (
        {"model_type": "gemma2", "sliding_window_pattern": 3},
        "sliding_window_pattern is 3; slora's decoder does not use this field",
    ),
    "unknown": ({"a_new_field": True}, "a_new_field is True; slora's decoder does not use this field"),
    "unknown_beside_the_part": (
        {"model_type": "gemma3", "text_config": LLAMA, "a_new_field": True, **NOTHING_BESIDE},
        "a_new_field is True; slora's decoder does not use this field",
    ),
    "one_is_not_true": ({"is_causal": 1}, "is_causal is 1; slora's decoder does not use this field"),
    "rope_unknown": (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        r"rope_scaling.mrope_section is \[1, 1, 2\]; slora's decoder does not use this field",
    ),
    "rope_of_phi3": (
        {"model_type": "phi3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling.rope_type is 'linear'; this model_type supports only default, longrope",
    ),
    "old_rope_of_gemma3": (
        {
            "model_type": "gemma3_text",
            "rope_scaling": {"type": "linear", "factor": 8.0},
            "layer_types": ["full_attention"] * 2,
        },
        "rope_scaling is .* rope_type is missing",
    ),
    "quantized": (
        {"quantization_config": {"bits": 4}},
        "quantization_config.quant_method is None; supported are compressed-tensors, fp8, .*, bitsandbytes; use",
    ),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_parameters.rope_type is 'dynamic'; it is not exact with a prefix cache",
    ),
    "unknown_rope": (
        {"rope_scaling": {"type": "mrope"}},
        "rope_scaling.type is 'mrope'; this version serves default, linear, llama3, yarn and longrope",
    ),
    "rope_number": ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type is 3; it must be a string"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.short_factor is None; it must be a list"),
    "longrope_count": (
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0]}, "model_type": "phi3"},
        r"rope_scaling.long_factor is \[1.0\]; it must be a list of 4 positive numbers",
    ),
    "ropes": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters is .* all layers of this model_type use the same rope",
    ),
    "one_rope": (
        {"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}},
        "rope_parameters is .* it must hold a table for full_attention and one for sliding_attention",
    ),
    "yarn_truncate": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}},
        "rope_scaling.truncate is 1; it must be true or false",
    ),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    "partial_on_top": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "theta": ({"rope_theta": "a"}, "rope_theta is 'a'"),
    "factor": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    "no_factor": ({"rope_scaling": {"type": "linear"}}, "factor is None"),
    "bands": (
        {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
        "high_freq_factor is 1.0; it must be above low_freq_factor 1.0",
    ),
    "scaling_text": ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    "partial_none": (
        {"model_type": "phi3", "partial_rotary_factor": 0.01},
        "partial_rotary_factor is 0.01; it must leave 1 to 8 dimensions of a head",
    ),
    "parameters_list": ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
    "eos_text": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "eos_list": ({"eos_token_id": [1, None]}, r"eos_token_id is \[1, None\]"),
    "eos_negative": ({"eos_token_id": -1}, "eos_token_id is -1"),
    "bias_text": ({"attention_bias": "no"}, "attention_bias is 'no'; it must be true or false"),
    "experts_twice": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8},
        "num_local_experts is 8, but num_experts is 4; both name the number of experts",
    ),
    "experts_of_a_token": (
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok is 5; it must be at most 4",
    ),
    "dense_layers": (
        {"model_type": "qwen3_moe", "mlp_only_layers": [0.5]},
        r"mlp_only_layers is \[0.5\]; it must be a list of whole numbers from 0",
    ),
    "experts_of_a_dense_model": (
        {"num_local_experts": 4},
        "num_local_experts is 4; slora's decoder does not use this field",
    ),
    "windows_of_qwen2_moe": (
        {"model_type": "qwen2_moe", "use_sliding_window": True},
        "use_sliding_window is True; slora's decoder does not use this field",
    ),
    "tied_number": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_config_is_refused_by_file_field_and_value(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        read(tmp_path, **changes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = [
    *LLAMA, "head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "eos_token_id", "dtype", "torch_dtype", "use_sliding_window",
    "quantization_config", "sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "query_pre_attn_scalar", "attn_logit_softcapping", "hidden_activation", "rope_local_base_freq",
    "partial_rotary_factor", "original_max_position_embeddings", "model_type",
]  # fmt: skip
ROPES = st.dictionaries(
    st.sampled_from(
        [
            "rope_type",
            "factor",
            "rope_theta",
            "original_max_position_embeddings",
            "short_factor",
            "long_factor",
            "beta_fast",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
            "full_attention",
            "sliding_attention",
        ]
    ),
    json_values | st.sampled_from(["linear", "llama3", "yarn", "longrope"]) | st.just([1.0] * 4),
    max_size=5,
)


@given(
    st.sampled_from(list(FAMILIES)),
    st.dictionaries(st.sampled_from(NAMES), json_values, max_size=3),
    st.dictionaries(st.sampled_from(["rope_scaling", "rope_parameters"]), ROPES, max_size=1),
)
def test_a_config_of_any_content_is_either_accepted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, family: str, changes: dict[str, Any], rope: dict[str, Any]
) -> None:
    """Born from bugs: lists, texts and tables in place of numbers raised errors such as TypeError."""
    directory = tmp_path_factory.getbasetemp()
    write_json(directory / "config.json", {**LLAMA, "model_type": family, **changes, **rope})
    try:
        read_model_config(directory)
    except ConfigError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": True, "use_mrope": False, "use_bidirectional_attention": NULL, "pruned_heads": {}},
        {"temperature": 0.7, "torch_dtype": "float16", "unsloth_version": "2026.1", "initializer_range": 0.1},
        {"attention_dropout": 0.5, "pretraining_tp": 2, "pad_token_id": 3, "use_cache": False, "unknown": NULL},
    ],
)  # fmt: skip
def test_fields_that_change_no_logits_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert replace(read(tmp_path, **changes), dtype="float32") == read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "_model_name_or_path": "SmolLM2 135M"
        },  # transformers writes it for a model that was converted from GGUF
        {"converter_version": "4.1", "gguf_version": 3, "release_date": "2026-01-01", "created_at": 1.7e9},
        {"author": "x", "languages": ["en", "de"], "source_url": "https://example.org", "license": "mit"},
    ],
)
def test_unknown_fields_that_only_describe_the_checkpoint_are_accepted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    config = read(tmp_path, **changes)
    (record,) = caplog.records
    assert record.getMessage().endswith(f"fields are unknown and not used: {', '.join(sorted(changes))}")
    assert config == read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_name": "rms"},
        {"model_version": {"a": 1}},
        {"position_embedding_version": 2},
        {"scale_path": 3},
        {"scoring_func": "sigmoid"},
        {"mixers": ["ssm", "attention"]},
    ],
)
def test_unknown_fields_that_may_describe_the_arithmetic_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="does not use this field"):
        read(tmp_path, **changes)


def test_layers_beyond_all_models_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    """Born from a random config that used up the machine's memory."""
    write_json(tmp_path / "config.json", {**LLAMA, "num_hidden_layers": 1 << 40})
    with pytest.raises(ConfigError, match=r"num_hidden_layers is 1099511627776; it must be at most 10000"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_file_that_is_not_a_json_object_is_refused_by_name(
    tmp_path: Path, name: str, text: str
) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=name):
        read_model_config(tmp_path)


def test_a_directory_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model at .*nowhere"):
        read_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize("model_impl", MODEL_IMPLS)
def test_a_model_with_a_head_for_classification_is_refused_by_name(tmp_path: Path, model_impl: str) -> None:
    """Born from refusals that named only a tensor: lm_head.weight was missing, or score.weight was too many."""
    config = make_config(
        "qwen2", tie_word_embeddings=True, num_labels=1, architectures=["Qwen2ForSequenceClassification"]
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"'Qwen2ForSequenceClassification'\], a model with a head for class.*CausalLM"
    ):
        read_model_spec(tmp_path, model_impl)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert read_model_spec(tmp_path, "slora").shape("float32").num_layers


def test_a_dtype_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    config = ModelSpec.from_config(read(tmp_path, dtype="float8_e4m3fn"))
    with pytest.raises(
        ConfigError, match="dtype is 'float8_e4m3fn'; it must be one of float32, bfloat16, float16"
    ):
        config.resolve_dtype("auto")
    assert config.resolve_dtype("bfloat16") == "bfloat16"


@pytest.mark.parametrize("model_impl", ["slora", "transformers"])
@pytest.mark.parametrize("torch_dtype", [None, NULL])
def test_a_config_without_a_dtype_means_that_of_most_weights(
    tmp_path: Path, model_impl: str, torch_dtype: object
) -> None:
    """Born from gpt-oss, whose config.json names no dtype: it was planned and served in float32."""
    assert read(tmp_path, torch_dtype=torch_dtype).dtype == "float32"
    tensors = {
        "norm": torch.ones(8),
        "embedding": torch.ones(8, 8, dtype=torch.bfloat16),
        "codes": torch.ones(8, 32, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model_spec(tmp_path, model_impl).resolve_dtype("auto") == "bfloat16"
    assert read_model_spec(tmp_path, model_impl).resolve_dtype("float32") == "float32"


def test_mxfp4_without_a_dtype_and_without_weights_is_planned_in_bfloat16(tmp_path: Path) -> None:
    fields = make_config("gpt_oss", num_hidden_layers=2).to_dict() | {
        "quantization_config": {"quant_method": "mxfp4"}
    }
    del fields["dtype"]
    write_json(tmp_path / "config.json", fields)
    assert read_model_spec(tmp_path).dtype == "bfloat16"


def test_the_shape_has_the_sizes_of_the_config(tmp_path: Path) -> None:
    shape = ModelSpec.from_config(read(tmp_path, head_dim=20)).shape("bfloat16")
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.element_bytes) == (2, 32, 20, 2)
    assert [linear.out_width for linear in shape.linears] == [80, 40, 40, 32, 64, 64, 32]
