"""Adapters as a training run leaves them: directories of transformers' Trainer, pushed over HTTP to a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
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


def test_the_tokens_that_a_training_added_are_those_of_its_adapter_alone(
    server: Served, key: str, client: httpx.Client, base: Path, tmp_path: Path
) -> None:
    """The ids of the added tokens lie within the base model's table, as in Qwen's."""
    theirs = AutoTokenizer.from_pretrained(base)
    theirs.add_tokens(["<think>"])
    theirs.add_special_tokens({"additional_special_tokens": ["<|call|>"], "eos_token": "<|end|>"})
    theirs.chat_template = PLAIN
    directory = tmp_path / "extended"
    save_with_trainer(directory, base, theirs)
    shown = push(server, key, directory)
    think, call, end = theirs.convert_tokens_to_ids(["<think>", "<|call|>", "<|end|>"])
    assert f"added tokens '<think>' (id {think})" in shown and f"eos_token '<|end|>' (id {end})" in shown
    theirs = AutoTokenizer.from_pretrained(directory)
    text = "a <|call|>fox<think> jumps<|end|>"
    chat = [{"role": "user", "content": text}]

    def post(path: str, model: str, **fields: Any) -> dict[str, Any]:
        return client.post(path, json={"model": model} | fields).raise_for_status().json()

    ids = theirs(text)["input_ids"]
    assert {think, call, end} < {*ids}
    for model, tokenizer in (("extended", theirs), ("default", AutoTokenizer.from_pretrained(base))):
        # With this adapter's name, the base's texts are not split as the base's tokenizer does.
        assert post("/tokenize", model, prompt=text)["tokens"] == tokenizer(text)["input_ids"]
        named = post("/tokenize", model, prompt=text, return_token_strs=True)["token_strs"]
        assert named == tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        assert post("/detokenize", model, tokens=ids)["prompt"] == tokenizer.decode(ids)
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert post("/tokenize", "extended", messages=chat)["tokens"] == rendered

    words = {"temperature": 0, "max_tokens": 3, "logprobs": 0, "echo": True, "ignore_eos": True}
    for token_id, word in ((think, "<think>"), (call, "")):
        biased = words | {"logit_bias": {str(token_id): 100}}
        (choice,) = post("/v1/completions", "extended", prompt="The fox", **biased)["choices"]
        assert choice["text"] == "The fox" + 3 * word
        assert choice["logprobs"]["tokens"][-3:] == 3 * [theirs.decode([token_id])]
        (choice,) = post("/v1/completions", "default", prompt="The fox", **biased)["choices"]
        assert choice["text"] == "The fox"
    (choice,) = ask(client, "extended", logit_bias={str(call): 100}, skip_special_tokens=False)["choices"]
    assert choice["message"]["content"] == 4 * "<|call|>"
    (choice,) = ask(client, "extended", logit_bias={str(think): 100}, stop=["k><th"])["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "<thin")
    (choice,) = ask(client, "extended", logit_bias={str(end): 100})["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
    (choice,) = ask(client, "extended", logit_bias={str(end): 50}, response_format={"type": "json_object"})[
        "choices"
    ]
    assert "<|end|>" not in choice["message"]["content"]
    directory.rename(tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "plain" / name).unlink()
    push(server, key, tmp_path / "plain")
    weights = [{"name": "extended"}, {"name": "plain"}]
    refused = client.post("/v1/completions", json={"model": "default", "prompt": "a", "adapters": weights})
    assert refused.status_code == 400 and "have different added tokens" in refused.text


def test_an_adapter_brings_rows_behind_those_of_the_base_model(
    server: Served, key: str, client: httpx.Client, base: Path, tmp_path: Path
) -> None:
    """PEFT saves whole copies of the resized matrices beside the adapter."""
    theirs, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    theirs.add_tokens([f"<extra {number}>" for number in range(140)])
    theirs.add_special_tokens({"eos_token": "<|end|>"})
    model.resize_token_embeddings(len(theirs), mean_resizing=False)
    for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        matrix.data[512:] = 2 * matrix.data[: len(theirs) - 512]
    directory = tmp_path / "resized"
    with quiet_peft():
        trained = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM"))
        trained.save_pretrained(directory)
    theirs.save_pretrained(directory)
    shown = push(server, key, directory)
    end = theirs.convert_tokens_to_ids("<|end|>")
    assert end == 516 and "5 rows behind the base model's, for added tokens" in shown

    text = "The <extra 139>fox<extra 3> jumps<extra 137>"
    ids = theirs(text)["input_ids"]
    expected = (
        trained.eval()
        .generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(ids) :]
        .tolist()
    )
    body = {"model": "resized", "temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    for prompt in (text, ids):
        answer = client.post("/v1/completions", json=body | {"prompt": prompt, "return_token_ids": True})
        (choice,) = answer.raise_for_status().json()["choices"]
        assert choice["token_ids"] == expected
        assert choice["text"] == theirs.decode(expected, skip_special_tokens=True)
    biased = {"logit_bias": {"515": 100}, "max_tokens": 2}
    (choice,) = client.post("/v1/completions", json=body | biased | {"prompt": text}).json()["choices"]
    assert choice["text"] == 2 * theirs.decode([515])
    form = {"structured_outputs": {"choice": ["fox", "jumps"]}, "ignore_eos": False, "logprobs": None}
    (choice,) = client.post(
        "/v1/completions", json=body | form | {"prompt": text, "logit_bias": {str(end): 100}}
    ).json()["choices"]
    assert choice["text"] in ("fox", "jumps") and choice["finish_reason"] == "stop"
    counted = client.post("/detokenize", json={"model": "resized", "tokens": [515, 516]})
    assert counted.json()["prompt"] == theirs.decode([515, 516])
    for wrong in ({"model": "default"}, {"model": "resized", "prompt": [517]}):
        refused = client.post("/v1/completions", json={"prompt": [516]} | wrong)
        assert refused.status_code == 400 and "which is out of vocabulary" in refused.text
