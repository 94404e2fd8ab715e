"""Adapters as a training run leaves them: directories of transformers' Trainer, pushed over HTTP to a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from tests.api.command import run_slora
from tests.api.served import Served, serving
from tests.support.peft_adapters import quiet_peft
from tests.support.tiny_models import write_model
from tests.support.tiny_tokenizers import byte_level, write_tokenizer
from tests.support.tool_templates import HERMES

PLAIN = "{{ bos_token }}{% for m in messages %}({{ m.role }}){{ m.content }}{{ eos_token }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose table of tokens is larger than its tokenizer, as in Qwen's."""
    directory = tmp_path_factory.mktemp("base")
    write_model(directory, "llama", vocab_size=512, num_hidden_layers=2, eos_token_id=1, bos_token_id=0)
    write_tokenizer(directory, byte_level())
    return directory


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(base, tmp_path_factory.mktemp("data")) as served:
        served.wait_until_ready()
        yield served


@pytest.fixture(scope="module")
def key(server: Served) -> str:
    return server.make_key("acme")


@pytest.fixture
def client(server: Served, key: str) -> Iterator[httpx.Client]:
    with server.client(key) as client:
        yield client


def save_with_trainer(directory: Path, base: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes what `trainer.save_model` writes, the pickle of its arguments included."""
    with quiet_peft():
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM"),
        )
        arguments = TrainingArguments(str(directory), use_cpu=True, report_to=[])
        Trainer(model, arguments, processing_class=tokenizer).save_model()


def push(server: Served, key: str, directory: Path, code: int = 0) -> str:
    words = ("adapter", "push", str(directory), "--name", directory.name)
    return run_slora(server.url, *words, code=code, SLORA_API_KEY=key)


def ask(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 4} | fields
    return client.post("/v1/chat/completions", json=body).raise_for_status().json()


def test_the_end_token_and_the_templates_of_a_trained_adapter_are_used(
    server: Served, key: str, client: httpx.Client, base: Path, tmp_path: Path
) -> None:
    """Born from a bug: the tokenizer that was saved with an adapter was ignored without a word."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token, tokenizer.chat_template = "<|user|>", {"default": PLAIN, "tool_use": HERMES}
    directory = tmp_path / "trained"
    save_with_trainer(directory, base, tokenizer)
    saved = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert {"training_args.bin", "tokenizer.json", "additional_chat_templates/tool_use.jinja"} <= saved

    shown = push(server, key, directory)
    (uses,) = (line for line in shown.splitlines() if line.startswith("  uses"))
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    for use in (
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        f"eos_token '<|user|>' (id {end})",
    ):
        assert use in uses, uses

    theirs = AutoTokenizer.from_pretrained(directory)
    for fields in ({}, {"tools": TOOLS}):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, **fields)
        counted = client.post("/tokenize", json={"model": "trained", "messages": MESSAGES} | fields)
        ids = theirs(expected, add_special_tokens=False)["input_ids"]
        assert counted.raise_for_status().json()["tokens"] == ids, expected

    wanted = {"logit_bias": {str(end): 100}}
    (stopped,) = ask(client, "trained", **wanted)["choices"]
    assert (stopped["finish_reason"], stopped["message"]["content"]) == ("stop", "")
    (endless,) = ask(client, "default", **wanted)["choices"]
    assert endless["finish_reason"] == "length"


def test_a_token_that_a_training_added_is_refused_by_name(
    server: Served, key: str, client: httpx.Client, base: Path, tmp_path: Path
) -> None:
    """Its id lies within the base model's table, so nothing else would show that the token is split into letters."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    assert (
        tokenizer.convert_tokens_to_ids("<|call|>")
        < json.loads((base / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    )
    directory = tmp_path / "extended"
    save_with_trainer(directory, base, tokenizer)
    error = push(server, key, directory, code=1)
    assert "is '<|call|>', which the base model's tokenizer does not have" in error
    assert "train with tokens that the base model's tokenizer has" in error
    assert client.get("/v1/models/extended").status_code == 404
