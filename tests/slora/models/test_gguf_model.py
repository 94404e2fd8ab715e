"""GGUF files as base models: transformers' logits and tokens, and a refusal of all that is not understood."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slora.core.errors import ConfigError
from slora.models.gguf_model import prepare_gguf_model, read_gguf_config
from slora.models.model_spec import find_model, read_model_spec
from slora.models.weights.checkpoint import fingerprint
from slora.models.weights.gguf_file import read_gguf
from slora.models.weights.tensor_place import TensorPlace
from slora.models.weights.weight_blocks import decode_gguf
from slora.text.tokenizer import Tokenizer
from tests.support.config_judge import last_logits, serve_logits
from tests.support.covering import soaked
from tests.support.gguf_files import sentencepiece_vocabulary, trained_vocabulary, write_gguf

PROMPTS = [[(7 * place + 3) % 90 for place in range(length)] for length in (53, 29, 7)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, set_variables: Callable[..., None]) -> None:
    set_variables(XDG_CACHE_HOME=str(tmp_path / "cache"))


def largest_error(directory: Path, oracle: PreTrainedModel, quantization: str = "auto") -> float:
    """The largest difference of the last logits, relative to their deviation."""
    errors = []
    for run in serve_logits(directory, read_model_spec(directory), PROMPTS, quantization):
        for ours, prompt in zip(run, PROMPTS, strict=True):
            theirs = last_logits(oracle, prompt)
            errors.append(float((ours.double() - theirs).abs().max() / theirs.std()))
    return max(errors)


# transformers' own reading loses the rope of some of these, so the original is the oracle.
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama", {}, marks=pytest.mark.soak),
        ("llama_tied_llama3_rope", {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
        ("llama_biased_linear_rope", {"mlp_bias": False}),
        ("llama_yarn_rope", {}),
        pytest.param("qwen2", {}, marks=pytest.mark.soak),
        pytest.param("qwen2_tied", {}, marks=pytest.mark.soak),
        ("qwen3", {}),
        ("mixtral", {"sliding_window": None}),
        pytest.param("qwen3_moe", {"attention_bias": False}, marks=pytest.mark.soak),
        ("qwen2_moe", {"mlp_only_layers": []}),
        pytest.param("phi3_window", {}, marks=pytest.mark.soak),
        ("phi3_longrope", {}),
        ("gemma2", {"query_pre_attn_scalar": 20}),
        ("gemma3_text", {"query_pre_attn_scalar": 24}),
    ],
)  # fmt: skip
def test_a_file_in_float32_has_the_logits_of_the_original(
    tmp_path: Path, name: str, changes: dict[str, object]
) -> None:
    oracle = write_gguf(tmp_path / "tiny.gguf", name, **changes)
    directory = find_model(tmp_path / "tiny.gguf")
    assert largest_error(directory, oracle) < 1e-3


def type_of_mix(mix: str, name: str) -> Type:
    """Like llama.cpp's mix Q4_K_M, the vocabulary and some matrices have 6 bits."""
    has_six = "token_embd" in name or "ffn_down" in name or "attn_v" in name
    return Type["Q6_K" if has_six else "Q4_K"] if mix == "Q4_K_M" else Type[mix]


@pytest.mark.parametrize(
    "mix",
    soaked(
        [
            "F16",
            "BF16",
            "Q4_0",
            "Q4_1",
            "Q5_0",
            "Q5_1",
            "Q8_0",
            "Q2_K",
            "Q3_K",
            "Q4_K",
            "Q5_K",
            "Q6_K",
            "Q4_K_M",
        ],
        *("BF16", "Q4_1", "Q8_0", "Q4_K_M"),
    ),
)
def test_a_quantized_file_has_the_logits_of_transformers_reading(
    tmp_path: Path, mix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    write_gguf(tmp_path / "tiny.gguf", "llama", partial(type_of_mix, mix), **sizes)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).eval()
    assert largest_error(find_model(tmp_path), oracle) < 1e-3
    # Newcomers expect that a small file takes little memory.
    types = {"F16": "", "BF16": "", "Q4_K_M": "Q4_K and Q6_K"}.get(mix, mix)
    assert (f"the weights are stored as {types} and served as numbers of float32" in caplog.text) == bool(
        types
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_torch_computes_the_numbers_of_the_package_gguf(kind: str) -> None:
    numbers, num_bytes = GGML_QUANT_SIZES[Type[kind]]
    blocks = torch.randint(
        0, 256, (6, 5, num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    # The first bytes are factors in float16. A high byte of less than 0x7C is a finite number.
    blocks[..., 1:4:2] = blocks[..., 1:4:2] & 0x83 | 0x38
    rows = blocks.flatten(1)
    stored = TensorPlace("w", Path(), kind, (6, 5 * numbers), 0, (numbers, num_bytes))
    expected = torch.from_numpy(dequantize(rows.numpy(), Type[kind]))
    assert expected.isfinite().all() and torch.equal(decode_gguf(stored, rows), expected)
    assert torch.equal(decode_gguf(stored, rows[0]), expected[0])


@pytest.mark.parametrize(
    ("mix", "most"),
    soaked(
        [("Q4_0", 1e-4), ("Q4_1", 1e-4), ("Q4_K", 1e-4), ("Q4_K_M", 0.5)], ("Q4_1", 1e-4), ("Q4_K_M", 0.5)
    ),
)
def test_int4_keeps_numbers_that_are_stored_in_4_bits(tmp_path: Path, mix: str, most: float) -> None:
    """In the mix, the matrices with 6 bits are rounded."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    write_gguf(tmp_path / "tiny.gguf", "llama", partial(type_of_mix, mix), **sizes)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).eval()
    assert largest_error(find_model(tmp_path), oracle, "int4") < most


TEXTS = (
    "The quick brown fox's 12345 jumps", "  two  spaces\n\n and\tlines \r\n", "Größe, naïve CAFÉ, 日本語 🎉🎉",
    "def f(x):\n    return x + 1  # it's HTML/XML", "<s>a<|user|> b</s>", "", " ",
)  # fmt: skip
VOCABULARIES = {
    **{pre: trained_vocabulary(pre) for pre in ("gpt-2", "llama-bpe", "qwen2", "dbrx", "tekken", "gpt-4o")},
    "llama": sentencepiece_vocabulary(),
}


def write_with(path: Path, name: str, vocabulary: dict[str, Any], **fields: Any) -> Path:
    size = len(vocabulary["tokenizer.ggml.tokens"])
    write_gguf(path, name, vocabulary=vocabulary, fields=fields, vocab_size=size, num_hidden_layers=1)
    return find_model(path)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_texts_have_the_tokens_of_transformers_reading(tmp_path: Path, kind: str) -> None:
    ours = Tokenizer.from_directory(write_with(tmp_path / "tiny.gguf", "llama", VOCABULARIES[kind]))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        tokens = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == tokens, text
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True), text


@pytest.mark.parametrize(("name", "spaces"), [("phi3_window", ""), ("gemma2", "    ")])
def test_sentencepiece_of_other_architectures_has_the_tokens_of_transformers_reading(
    tmp_path: Path, name: str, spaces: str
) -> None:
    vocabulary = sentencepiece_vocabulary(spaces=spaces)
    ours = Tokenizer.from_directory(write_with(tmp_path / "tiny.gguf", name, vocabulary))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        # Phi-3's own tokenizer skips white space after its special tokens.
        shown = text.replace("<|user|> ", "<|user|>") if name == "phi3_window" else text
        tokens = theirs.encode(shown, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == tokens, text


def test_rules_that_transformers_reading_loses_are_those_of_the_original(tmp_path: Path) -> None:
    """Qwen's own tokenizer composes characters, and that of SmolLM makes one token of each digit."""
    size = {"vocab_size": 620}
    qwen = Tokenizer.from_directory(write_with(tmp_path / "q.gguf", "qwen2", trained_vocabulary("qwen2")))
    assert qwen.encode("Gro\u0308\u00dfe") == qwen.encode("Gr\u00f6\u00dfe")
    (tmp_path / "s").mkdir()
    smollm = write_with(tmp_path / "s" / "s.gguf", "llama", trained_vocabulary("smollm"), **size)
    assert len(Tokenizer.from_directory(smollm).encode("1234567890")) == 10


@pytest.mark.parametrize(
    ("vocabulary", "adds", "begins", "ends"),
    [
        (trained_vocabulary("llama-bpe"), {}, True, False),
        (trained_vocabulary("gpt-2"), {}, False, False),
        (sentencepiece_vocabulary(), {}, True, False),
        (trained_vocabulary("gpt-2"), {"bos": True, "eos": True}, True, True),
        (sentencepiece_vocabulary(), {"bos": False}, False, False),
    ],
)
def test_special_tokens_are_added_as_the_file_says(
    tmp_path: Path, vocabulary: dict[str, Any], adds: dict[str, bool], begins: bool, ends: bool
) -> None:
    fields = {f"tokenizer.ggml.add_{name}_token": value for name, value in adds.items()}
    tokenizer = Tokenizer.from_directory(write_with(tmp_path / "tiny.gguf", "llama", vocabulary, **fields))
    tokens = tokenizer.encode("fox")
    named = tokenizer.find_special_tokens(["<s>", "</s>"])
    assert (tokens[0] == named["<s>"], tokens[-1] == named["</s>"]) == (begins, ends)


def test_templates_and_the_ends_of_answers_come_from_the_file(tmp_path: Path) -> None:
    vocabulary = trained_vocabulary("gpt-2")
    texts = [*vocabulary["tokenizer.ggml.tokens"], "<|im_end|>", "<|mine|>"]
    fields = {
        "tokenizer.ggml.tokens": texts, "tokenizer.chat_template": "default",
        "tokenizer.chat_template.tool_use": "with tools", "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.token_type": [*vocabulary["tokenizer.ggml.token_type"], 3, 3],
        "tokenizer.ggml.eot_token_id": texts.index("<|mine|>"),
    }  # fmt: skip
    directory = write_with(tmp_path / "tiny.gguf", "llama", {**vocabulary, **fields})
    ends = {texts[token_id] for token_id in read_model_spec(directory).eos_token_ids}
    assert ends == {"</s>", "<|im_end|>", "<|mine|>"}
    assert (directory / "chat_template.jinja").read_text(encoding="utf-8") == "default"
    assert (directory / "additional_chat_templates" / "tool_use.jinja").read_text(
        encoding="utf-8"
    ) == "with tools"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"llama.expert_weights_scale": 2.0}, "llama.expert_weights_scale is 2.0; slora does not know this field"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "head_count_kv differs between layers"),
        ({"llama.attention.head_count": None}, "llama.attention.head_count is missing"),
        ({"llama.attention.causal": False}, "attention.causal is False; only True is served"),
        ({"llama.attention.value_length": 24}, "value_length is 24; only 20 is served"),
        ({"llama.rope.dimension_count": 10}, "rope.dimension_count is 10, but a head has 20"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic'"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_factors_long.weight or rope_factors_short.weight is missing"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"split.count": 3}, "one part of several; join them with llama-gguf-split --merge"),
        ({"tokenizer.ggml.pre": "poro-chat"}, "tokenizer.ggml.pre is 'poro-chat'; this version knows gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.merges": ["zz top"]}, "merges does not fit the tokens"),
        ({"tokenizer.ggml.normalizer": "lowercase"}, "tokenizer.ggml.normalizer is 'lowercase'"),
        ({"tokenizer.ggml.add_sep_token": True}, "add_sep_token is true"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces is true"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "the same token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types of tokens"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", fields=fields, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=f"tiny.gguf: .*{complaint}"):
        find_model(tmp_path / "tiny.gguf")
    assert not list((tmp_path / "cache").rglob("config.json"))


@pytest.mark.parametrize("value", [0, -1, 1.5, "text", True, [], ["a"], [1, 2]])
def test_a_field_of_another_type_is_refused_or_changes_nothing_else(tmp_path: Path, value: object) -> None:
    """Each field of the file gets the value in turn. Whatever happens, it is no other exception."""
    plain = tmp_path / "plain.gguf"
    write_gguf(plain, "llama", num_hidden_layers=1)
    for name in read_gguf(plain).fields:
        if name == "general.architecture":
            continue
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, "llama", fields={name: value}, num_hidden_layers=1)
        with suppress(ConfigError):
            read_model_spec(find_model(path))


def test_other_factors_than_those_of_llama_3_are_refused(tmp_path: Path) -> None:
    """transformers' reading drops the tensor without a word."""
    write_gguf(tmp_path / "tiny.gguf", "llama_tied_llama3_rope")
    with pytest.raises(ConfigError, match=r"rope_freqs.weight has other factors than those of Llama 3"):
        find_model(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("removed", ["rope_factors_long.weight", "rope_factors_short.weight"])
def test_factors_of_one_length_alone_are_refused(tmp_path: Path, removed: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", "phi3_longrope")
    file = read_gguf(tmp_path / "tiny.gguf")
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != removed}
    missing = "rope_factors_long.weight or rope_factors_short.weight is missing"
    with pytest.raises(ConfigError, match=missing):
        read_gguf_config(replace(file, tensors=tensors))


@pytest.mark.parametrize("fields", [{"phi3.rope.scaling.type": "yarn"}, {"phi3.rope.scaling.type": "linear"}])
def test_two_scalings_of_rope_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_gguf(tmp_path / "tiny.gguf", "phi3_longrope", fields=fields)
    with pytest.raises(ConfigError, match="beside another scaling of rope"):
        find_model(tmp_path / "tiny.gguf")


def test_an_architecture_that_is_not_served_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", fields={"general.architecture": None})
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(
        content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba")
    )
    with pytest.raises(ConfigError, match=r"general.architecture is 'mamba'; .* llama, qwen2, qwen3"):
        find_model(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    "damage", ["magic", "version", "big-endian", "short header", "short body", "empty", "huge"]
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", num_hidden_layers=1)
    content = path.read_bytes()
    changed = {
        "magic": b"GGML" + content[4:],
        "version": content[:4] + b"\x01\0\0\0" + content[8:],
        "big-endian": content[:4] + b"\0\0\0\x03" + content[8:],
        "short header": content[:1000],
        "short body": content[:-1000],
        "empty": b"",
        "huge": content[:8] + b"\xff" * 16 + content[24:],
    }
    path.write_bytes(changed[damage])
    with pytest.raises(ConfigError, match=f"{path} is damaged: "):
        find_model(path)


def test_a_directory_is_used_again_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", num_hidden_layers=1)
    first = find_model(path)
    before = (first / "config.json").stat().st_mtime_ns
    assert first.name == "tiny" and find_model(tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == before
    mark = fingerprint(first)
    write_gguf(path, "llama", num_hidden_layers=1, hidden_size=64)
    second = find_model(path)
    assert second != first and fingerprint(second) != mark


def test_of_several_files_one_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf"):
        write_gguf(tmp_path / name, "llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"has 2 GGUF files \(a.gguf, b.gguf\); choose one, as in --model"):
        find_model(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert find_model(tmp_path) == prepare_gguf_model(tmp_path / "a.gguf")


def test_transformers_classes_read_no_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="only slora's decoder reads GGUF files; set it to auto"):
        read_model_spec(find_model(tmp_path / "tiny.gguf"), "transformers")
