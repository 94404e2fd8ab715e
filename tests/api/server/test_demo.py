"""The demo as a new user runs it: `slora demo` with default kernels, and one key for each tenant."""

import asyncio
import json
import shlex
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from demo.tasks import ADAPTERS, TASKS, unseen_sentences
from slora.models.model_spec import read_model_spec
from slora.text.tokenizer import Tokenizer
from slora_api.serve.demo import (
    DemoTenant,
    describe_demo,
    find_demo_adapters,
    find_demo_directory,
    set_up_demo,
)
from tests.adapters.hand_made import make_members, write_directory
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.api.served import SLORA, Served, environment, running, wait_for
from tests.support.oracle import Oracle, Verdict

DEMO = Path(__file__).parents[3] / "demo"
PROMPT = "the quick brown fox"
MAX_TOKENS = 160
LOWEST_ACCURACY = 0.95
NUM_SENTENCES = 2
NUM_JUDGED = 1  # of these are compared with peft; each needs one slow teacher-forced pass


@dataclass(frozen=True)
class Demo:
    """A demo server whose engine was killed before the demo's adapters were published.

    keys: API keys by tenant. statuses: the status of each tenant's first request after `/readyz` returned 200.
    """

    served: Served
    keys: dict[str, str]
    statuses: dict[str, int]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    data_dir = tmp_path_factory.mktemp("demo") / "data"
    command = [*SLORA, "demo", "--port", "0", "--data-dir", str(data_dir)]
    with running(command, environment(), data_dir) as served:
        wait_for(lambda: "demo" in httpx.get(served.url + "/readyz").text or None, served.alive)
        served.child("slora.engine.process").kill()
        served.wait_until_ready()
        keys = json.loads((data_dir / "demo-keys.json").read_text(encoding="utf-8"))
        statuses = {}
        for tenant, key in keys.items():
            with served.client(key) as client:
                body = {"model": "default", "prompt": "hello", "max_tokens": 1}
                statuses[tenant] = client.post("/v1/completions", json=body).status_code
        yield Demo(served, keys, statuses)


def task_of(tenant: str) -> str:
    return ADAPTERS[tenant].task if tenant in ADAPTERS else "echo"


def test_readiness_waits_for_the_demos_adapters_even_if_the_engine_dies_meanwhile(demo: Demo) -> None:
    """Born from a fault: the adapters appeared only seconds after /readyz returned 200."""
    assert demo.statuses == dict.fromkeys(["base", *ADAPTERS], 200)


def test_each_printed_curl_command_is_answered_by_its_adapter(demo: Demo) -> None:
    demo.served.wait_for_line("# tenant upper")
    wait_for(lambda: len(demo.served.lines) > 3 * len(demo.keys) or None)
    answers, lines = {}, demo.served.lines
    for at, line in enumerate(lines):
        if line.startswith("# tenant "):
            words = shlex.split(lines[at + 1])
            headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
            url = next(word for word in words if word.startswith("http"))
            answer = httpx.post(url, headers=headers, content=words[words.index("-d") + 1], timeout=60)
            assert answer.status_code == 200, answer.text
            answers[line.split()[2].rstrip(",")] = answer.json()["choices"][0]["message"]["content"]
    assert answers == {tenant: TASKS[task_of(tenant)].apply(PROMPT) for tenant in demo.keys}
    assert len(set(answers.values())) == len(answers) >= 7


def test_the_demos_keys_are_kept_for_the_next_start(tmp_path: Path) -> None:
    adapter = write_directory(tmp_path / "loud", make_members())
    keys_path = tmp_path / "demo-keys.json"

    def start() -> list[DemoTenant]:
        with running_platform(tmp_path, ScriptedEngine()) as platform:
            services = platform.services
            return asyncio.run(
                set_up_demo(
                    [adapter], services.tenant_store, services.keys.admin, services.publisher, keys_path
                )
            )

    first = start()
    assert [(tenant.name, tenant.adapter) for tenant in first] == [("base", None), ("loud", "loud")]
    assert json.loads(keys_path.read_text(encoding="utf-8")) == {tenant.name: tenant.key for tenant in first}
    assert stat.S_IMODE(keys_path.stat().st_mode) == 0o600
    assert start() == first


def test_the_last_line_opens_the_console_with_a_key() -> None:
    tenants = [DemoTenant("T1", "base", None, "slora_a"), DemoTenant("T2", "loud", "loud", "slora_b")]
    last = describe_demo("http://127.0.0.1:1", tenants).splitlines()[-1]
    assert last.endswith("tenant loud: http://127.0.0.1:1/console#key=slora_b")


def test_a_server_without_demo_mode_keeps_no_key_in_the_clear(server: Served) -> None:
    server.make_key("in-the-clear")
    assert (server.data_dir / "slora.db").exists()
    assert not (server.data_dir / "demo-keys.json").exists()


def test_the_demo_is_found_without_naming_it() -> None:
    adapters = find_demo_adapters(find_demo_directory() / "adapters")
    assert len(adapters) == 10


def test_an_empty_answer_in_a_terminal_is_explained(demo: Demo) -> None:
    """The demo model was trained only on chat messages. After any other text it ends its answer at once."""

    def complete(*options: str) -> subprocess.CompletedProcess[str]:
        variables = {"SLORA_URL": demo.served.url, "SLORA_API_KEY": demo.keys["upper"]}
        command = [*SLORA, "complete", "good morning", "--temperature", "0", *options]
        return subprocess.run(
            command,
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
        )

    raw = complete("--raw")
    assert raw.stdout == "\n"
    assert "the answer is empty; a model trained on chat messages may need a chat template" in raw.stderr
    chat = complete()
    assert (chat.stdout, chat.stderr) == (
        TASKS["upper"].apply("good morning") + "\n",
        "answered by upper@1\n",
    )


def ask(demo: Demo, tenant: str, sentence: str) -> str:
    with openai.OpenAI(base_url=demo.served.url + "/v1", api_key=demo.keys[tenant]) as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": sentence}],
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
    return answer.choices[0].message.content or ""


def test_unseen_sentences_are_answered_right_and_as_peft_answers_them(
    demo: Demo, soak: bool, report: Callable[[str], None]
) -> None:
    sentences = unseen_sentences(500 if soak else NUM_SENTENCES)
    asked = [(tenant, sentence) for sentence in sentences for tenant in demo.keys]
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda pair: ask(demo, *pair), asked))
    right = dict.fromkeys(demo.keys, 0)
    for (tenant, sentence), answer in zip(asked, answers, strict=True):
        right[tenant] += answer == TASKS[task_of(tenant)].apply(sentence)
    accuracy = {tenant: count / len(sentences) for tenant, count in right.items()}
    num_judged = len(asked) if soak else NUM_JUDGED * len(demo.keys)
    verdict = judge(list(zip(asked, answers, strict=True))[:num_judged])
    listed = ", ".join(f"{tenant} {share:.1%}" for tenant, share in accuracy.items())
    report(f"demo over HTTP, {len(sentences)} unseen sentences each: {listed}")
    report(f"demo against peft: {verdict.positions} tokens, {verdict.excused} excused, {verdict.wrong} wrong")
    assert min(accuracy.values()) >= LOWEST_ACCURACY
    assert verdict.equal


def judge(answered: list[tuple[tuple[str, str], str]]) -> Verdict:
    """Compares every answer, including its end token, with transformers + peft."""
    tokenizer = Tokenizer.from_directory(DEMO / "model")
    eos = read_model_spec(DEMO / "model").eos_token_ids[0]
    # The prefix is needed because peft adds modules with these names, and every module already has a method `double`.
    oracle = Oracle(DEMO / "model", {f"task_{name}": DEMO / "adapters" / name for name in ADAPTERS})
    verdict = Verdict()
    for (tenant, sentence), answer in answered:
        text = tokenizer.apply_chat_template([{"role": "user", "content": sentence}])
        prompt = tokenizer.encode(text, add_special_tokens=False)
        tokens = [*tokenizer.encode(answer, add_special_tokens=False), eos][:MAX_TOKENS]
        verdict += oracle.judge(prompt, tokens, f"task_{tenant}" if tenant in ADAPTERS else None)
    return verdict
