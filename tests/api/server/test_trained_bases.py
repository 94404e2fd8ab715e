"""Bases that are trained from scratch, and adapters that peft trains on them, answer as trained behind the server."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from slora.models.model_structure import find_auto_class
from slora_kernels.layout import EXPERT_PATHS
from tests.api.command import run_slora
from tests.api.served import CHARACTERS, EOS, serving, write_adapter, write_base, write_tokenizer
from tests.api.server.test_server import greedy_tokens, ids, upload
from tests.support.oracle import Oracle
from tests.support.peft_adapters import quiet_peft
from tests.support.tiny_models import RECURRENT_MODELS, make_config

QUESTIONS = ["red", "green", "blue", "black", "white", "brown"]
# The base model answers with the next question, and adapter n with the question n + 1 places further.
LORA = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}
BASES: dict[str, dict[str, dict[str, object]]] = {
    "llama": {
        "plain": LORA,
        "dora": {**LORA, "use_dora": True},
        "head": {**LORA, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    },
    "mixtral": {
        "experts": {**LORA, "target_modules": ["q_proj", "v_proj"], "target_parameters": list(EXPERT_PATHS)},
        "attention": {**LORA, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    },
    "gpt_oss": {
        "plain": {**LORA, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "experts": {**LORA, "target_parameters": [f"1.{path}" for path in EXPERT_PATHS]},
    },
    "deepseek_v3": {"plain": {**LORA, "target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]}},
    "lfm2": {"plain": LORA},
    "qwen3_next": {"plain": {**LORA, "target_modules": ["q_proj", "o_proj", "in_proj_qkvz", "out_proj"]}},
}
_MOST_STEPS = 1500


def write_line(place: int, shift: int) -> tuple[str, str]:
    return f"{QUESTIONS[place]}? ", QUESTIONS[(place + shift) % len(QUESTIONS)]


def train(model: nn.Module, shift: int, rate: float) -> None:
    """Trains until the model gives each answer's tokens with a wide margin."""
    lines = [write_line(place, shift) for place in range(len(QUESTIONS))]
    rows = [[*ids(question), *ids(answer), EOS] for question, answer in lines]
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[EOS] * (longest - len(row))] for row in rows])
    labels = torch.full_like(tokens, -100)
    for row, (question, _), label in zip(rows, lines, labels, strict=True):
        label[len(question) : len(row)] = torch.tensor(row[len(question) :])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    model.train()
    for _ in range(_MOST_STEPS):
        loss = model(tokens, labels=labels).loss
        if loss < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    assert loss < 0.02, f"the training ended at a loss of {loss.item()}"


@pytest.mark.soak
@pytest.mark.parametrize("base", BASES)
def test_adapters_of_a_trained_base_give_the_trained_answers(base: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {} if base in RECURRENT_MODELS else {"num_hidden_layers": 2}
    config = make_config(base, vocab_size=len(CHARACTERS) + 1, eos_token_id=EOS, **layers)

    def load() -> PreTrainedModel:
        if (tmp_path / "base").exists():
            return find_auto_class(config).from_pretrained(tmp_path / "base", dtype=torch.float32)
        return find_auto_class(config).from_config(config, dtype=torch.float32)

    model = load()
    train(model, 1, 3e-3)
    model.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    shifts = {"default": 1}
    for number, (name, lora) in enumerate(BASES[base].items()):
        shifts[name] = number + 2
        with quiet_peft():
            adapted = get_peft_model(load(), LoraConfig(task_type="CAUSAL_LM", **lora))
            train(adapted, shifts[name], 4e-3)
            adapted.save_pretrained(tmp_path / name)
    with serving(tmp_path / "base", tmp_path / "data") as server:
        server.wait_until_ready()
        key = server.make_key("acme")
        for name in BASES[base]:
            words = ("adapter", "push", str(tmp_path / name), "--name", name)
            pushed = run_slora(server.url, *words, SLORA_API_KEY=key)
            assert re.search(f"^{name}@1  new version", pushed, re.MULTILINE), pushed
        client = server.sdk(key)
        for place in range(len(QUESTIONS)):
            for name, shift in shifts.items():
                question, answer = write_line(place, shift)
                found = client.completions.create(model=name, prompt=question, max_tokens=12, temperature=0)
                assert found.choices[0].text == answer, (name, question)


@pytest.mark.soak
def test_adapters_of_a_transformers_model_are_pushed_and_answer_as_peft_does(tmp_path: Path) -> None:
    """A model of transformers' own classes: processes without torch know its shape, too."""
    write_base(tmp_path / "base", "opt")
    adapter = write_adapter(tmp_path / "own", seed=3, model="opt", r=8)
    oracle = Oracle(tmp_path / "base", {"own": adapter})
    with serving(tmp_path / "base", tmp_path / "data") as server:
        server.wait_until_ready()
        key = server.make_key("acme", "own")
        answer = upload(server, key, "own", adapter)
        assert answer.status_code == 201, answer.text
        with server.sdk(key) as client:
            for model, judged in (("base", None), ("default", "own")):
                tokens = greedy_tokens(client, model, "hello")
                assert oracle.judge(ids("hello"), tokens, judged).equal
