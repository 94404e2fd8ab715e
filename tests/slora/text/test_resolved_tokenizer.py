"""A model directory encodes, decodes and renders chats as transformers does, whatever tokenizer class it names."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from slora.text.tokenizer import Tokenizer
from tests.support.json_files import write_json
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, TEXT, byte_fallback, byte_level

TEXTS = [
    TEXT,
    "<s> [INST] hello [/INST] world </s>",
    " hello  world",
    "hello",
    "</s>hello",
    "<|user|> hello<pad>",
    "",
]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " world"}]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
CHANGED = {"content": "<|user|>", "lstrip": True, "rstrip": True, "normalized": False, "special": True}


# Fields of tokenizer_config.json beside an old tokenizer.json, and the model type that goes with them.
Case = tuple[Callable[[], FastTokenizer], str, dict[str, Any]]
CASES: dict[str, Case] = {
    "llama": (byte_fallback, "llama", LLAMA),
    "llama, legacy": (byte_fallback, "llama", {**LLAMA, "legacy": True}),
    "llama, not legacy": (byte_fallback, "llama", {**LLAMA, "legacy": False}),
    "llama, fast": (byte_fallback, "llama", {**LLAMA, "tokenizer_class": "LlamaTokenizerFast"}),
    "llama, no space in front": (byte_fallback, "llama", {**LLAMA, "add_prefix_space": False}),
    "llama with eos": (byte_fallback, "llama", {**LLAMA, "add_bos_token": False, "add_eos_token": True}),
    "llama, bytes": (byte_level, "llama", LLAMA),
    "llama that names no tokens": (byte_fallback, "llama", {"tokenizer_class": "LlamaTokenizer"}),
    "mistral": (byte_fallback, "mistral", {**LLAMA, "legacy": False}),
    "gemma": (byte_fallback, "gemma2", {**LLAMA, "tokenizer_class": "GemmaTokenizer"}),
    "qwen2": (byte_level, "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}),
    "qwen2 without a class": (byte_level, "qwen2", {"eos_token": "</s>"}),
    "gpt2": (byte_level, "gpt2", {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>"}),
    "an unknown class": (byte_level, "llama", {**PLAIN, "tokenizer_class": "NoneSuchTokenizer"}),
    "plain": (byte_fallback, "llama", PLAIN),
    "plain with bos": (byte_level, "llama", {**PLAIN, "add_bos_token": True}),
    "plain with another special token": (byte_level, "llama", {**PLAIN, "pad_token": "<pad>"}),
    "plain with extra tokens": (byte_level, "llama", {**PLAIN, "extra_special_tokens": ["[INST]"]}),
    "plain with changed tokens": (byte_level, "llama", {**PLAIN, "added_tokens_decoder": {"2": CHANGED}}),
    "plain with a token that is no longer special": (
        byte_level,
        "llama",
        {**PLAIN, "added_tokens_decoder": {"2": {**CHANGED, "special": False}}},
    ),
    "plain, special tokens split": (byte_level, "llama", {**PLAIN, "split_special_tokens": True}),
    "no config": (byte_fallback, "llama", {}),
}  # fmt: skip


def write(directory: Path, case: Case) -> Path:
    make, model_type, config = case
    make().save(str(directory / "tokenizer.json"))
    write_json(directory / "config.json", {"model_type": model_type})
    write_json(directory / "tokenizer_config.json", {**config, "chat_template": CHAT_TEMPLATE})
    return directory


def assert_same(directory: Path) -> Tokenizer:
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            token_ids = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens=add_special_tokens) == token_ids
            assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
    assert ours.apply_chat_template(CHAT) == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert ours.vocab_size == len(theirs)
    return ours


@pytest.mark.parametrize("case", CASES)
def test_a_directory_is_read_as_transformers_reads_it(tmp_path: Path, case: str) -> None:
    assert_same(write(tmp_path, CASES[case]))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_files_of_older_versions_of_transformers_count_as_they_do_there(tmp_path: Path, name: str) -> None:
    write(tmp_path, CASES["plain"])
    size = byte_fallback().get_vocab_size()
    tokens: dict[str, Any] = {
        "special_tokens_map.json": {"pad_token": "<pad>"},
        "added_tokens.json": {"<pad>": size},
    }
    write_json(tmp_path / name, tokens[name])
    assert_same(tmp_path)


@pytest.mark.parametrize("legacy", [None, False, True])
def test_the_space_marker_after_a_special_token_follows_the_tokenizer_class(
    tmp_path: Path, legacy: bool | None
) -> None:
    """Born from a bug: the old tokenizer.json gave `<s> [INST]` two space markers, and adapters were trained with
    one."""
    options = {} if legacy is None else {"legacy": legacy}
    ours = assert_same(write(tmp_path, (byte_fallback, "llama", {**LLAMA, **options})))

    def pieces(text: str) -> list[str | None]:
        return [byte_fallback().id_to_token(token) for token in ours.encode(text, add_special_tokens=False)]

    assert pieces("<s> hello")[:3] == ["<s>", "▁h", "e"]
    assert pieces("<s>hello")[:2] == ["<s>", "▁h" if legacy else "h"]


def test_a_process_without_torch_reads_the_same(tmp_path: Path) -> None:
    write(tmp_path, CASES["llama"])
    expected = Tokenizer.from_directory(tmp_path)
    program = (
        "import json, sys; from pathlib import Path; from slora.text.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.from_directory(Path({str(tmp_path)!r}))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        f"print(json.dumps([dict(tokenizer.special_tokens), [tokenizer.encode(text) for text in {TEXTS!r}]]))"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert json.loads(answer.stdout) == [
        dict(expected.special_tokens),
        [expected.encode(text) for text in TEXTS],
    ]


def test_a_tokenizer_that_transformers_cannot_read_is_used_as_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, (byte_level, "llama", {**PLAIN, "tokenizer_class": "CTRLTokenizer"}))
    assert Tokenizer.from_directory(tmp_path).encode("hello") == byte_level().encode("hello").ids
    assert "its tokenizer.json is used as it is" in caplog.text
