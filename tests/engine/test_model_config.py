import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slora.errors import ConfigError
from slora.model_config import ModelConfig, Rope
from slora.rotary import cos_sin_table
from tests.support.tiny_models import MODELS, make_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(directory: Path, generation: Any = None, **changes: Any) -> ModelConfig:
    """LLAMA's config.json with `changes`; None takes a field out."""
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_directory(directory)


@pytest.mark.parametrize("name", MODELS)
def test_configs_saved_by_transformers_mean_what_they_mean_there(tmp_path: Path, name: str) -> None:
    theirs = make_config(name)
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_directory(tmp_path)
    assert ours.family == theirs.model_type
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert (
        ours.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]


@pytest.mark.parametrize("scaling", [{}, LLAMA3_ROPE, {"rope_type": "linear", "factor": 4.0}])
def test_the_spellings_of_transformers_four_and_five_mean_the_same(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    five = read(
        tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "default", **scaling}, dtype="float16"
    )
    four = read(tmp_path, rope_theta=5e5, rope_scaling=scaling or None, torch_dtype="float16")
    assert five == four
    assert five.rope.theta == 5e5
    assert five.dtype == "float16"


def test_the_oldest_spelling_of_a_rope_s_type_is_understood(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope == Rope(1e4, "linear", 2.0)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "default"}, LLAMA3_ROPE, {"rope_type": "linear", "factor": 4.0}]
)
def test_cosines_and_sines_are_those_of_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    # A wide head has frequencies in all three bands of Llama 3.1.
    ours = read(tmp_path, head_dim=64, rope_parameters={"rope_theta": 5e5, **scaling})
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    cos, sin = theirs(torch.zeros(1), torch.arange(256)[None])
    table = cos_sin_table(ours.rope, ours.head_dim, 256, torch.device("cpu"))
    half = ours.head_dim // 2
    torch.testing.assert_close(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), -1), rtol=0, atol=1e-6)


def test_what_a_config_leaves_out_is_what_transformers_assumes(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=None, rms_norm_eps=None)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert config.rope == Rope(10000.0)
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
    "family": ({"model_type": "mamba"}, "model_type is 'mamba'; this version serves llama, qwen2"),
    "no_family": ({"model_type": None}, "model_type is None"),
    "missing": ({"hidden_size": None}, "hidden_size is None; it must be a positive whole number"),
    "zero": ({"vocab_size": 0}, "vocab_size is 0"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "text": ({"intermediate_size": "64"}, "intermediate_size is '64'"),
    "boolean": ({"num_attention_heads": True}, "num_attention_heads is True"),
    "fraction": ({"hidden_size": 32.5}, "hidden_size is 32.5"),
    "odd_groups": (
        {"num_key_value_heads": 3},
        "num_attention_heads 4 is no multiple of num_key_value_heads 3",
    ),
    "odd_head": ({"head_dim": 7}, "head_dim is 7"),
    "no_head": ({"hidden_size": 3}, "head_dim is 0"),
    "epsilon": ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a positive number"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this version serves silu"),
    "window": ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is true"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'; this version serves"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
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
    "parameters_list": ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
    "eos_text": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "eos_list": ({"eos_token_id": [1, None]}, r"eos_token_id is \[1, None\]"),
    "eos_negative": ({"eos_token_id": -1}, "eos_token_id is -1"),
    "bias_text": ({"attention_bias": "no"}, "attention_bias is 'no'; it must be true or false"),
    "tied_number": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_file_field_and_value(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        read(tmp_path, **changes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = [
    *LLAMA,
    "head_dim",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "use_sliding_window",
    "quantization_config",
]


@given(st.dictionaries(st.sampled_from(NAMES), json_values, max_size=3))
def test_a_config_of_any_content_is_served_or_refused_but_breaks_nothing(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    """Born from bugs: lists, texts and tables where numbers belong raised TypeError and the like."""
    directory = tmp_path_factory.getbasetemp()
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    try:
        ModelConfig.from_directory(directory)
    except ConfigError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_directory(tmp_path)


def test_a_directory_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model at .*nowhere"):
        ModelConfig.from_directory(tmp_path / "nowhere")


def test_a_dtype_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    config = read(tmp_path, dtype="float8_e4m3fn")
    with pytest.raises(
        ConfigError, match="dtype is 'float8_e4m3fn'; it must be one of float32, bfloat16, float16"
    ):
        config.resolve_dtype("auto")
    assert config.resolve_dtype("bfloat16") == "bfloat16"


def test_the_shape_has_the_sizes_of_the_config(tmp_path: Path) -> None:
    shape = read(tmp_path, head_dim=20).shape("bfloat16")
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.element_bytes) == (2, 32, 20, 2)
    assert shape.out_widths == (80, 40, 40, 32, 64, 64, 32)
