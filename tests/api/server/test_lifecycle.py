"""A server recovers from crashes of its engine, of its loader and of all processes. Also tests how it shuts down."""

import json
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from slora_api.keys.key_record import Pepper, open_admin_key
from tests.api.command import run_command
from tests.api.conftest import Kit
from tests.api.platform import FIELDS
from tests.api.served import ADMIN_KEY, READY_S, Served, environment, serving, wait_for
from tests.api.server.test_server import upload

ENGINE, LOADER = "slora.engine.process", "slora_adapters.loader.loader_process"
# In a server that is slowed down, it runs until the test has acted.
LONG = {"model": "base", "prompt": "hello", "max_tokens": 250, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 8}


def kill(served: Served, module: str) -> None:
    os.kill(served.child(module).pid, signal.SIGKILL)


def is_ready(served: Served) -> bool:
    return httpx.get(served.url + "/readyz").status_code == 200


def wait_until_running(served: Served, count: int) -> None:
    """Waits until the engine computes exactly `count` sequences."""

    wait_for(lambda: served.metric("vllm:num_requests_running") == count or None)


class LongRequest(threading.Thread):
    """Sends a long request and reads its answer. `begun` is set at the first byte."""

    def __init__(self, served: Served, key: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.status = 0
        self.text = ""
        self._served, self._key, self._body = served, key, body

    def run(self) -> None:
        with (
            self._served.client(self._key) as client,
            client.stream("POST", "/v1/completions", json=self._body) as answer,
        ):
            self.status = answer.status_code
            for part in answer.iter_text():
                self.text += part
                self.begun.set()


def test_requests_in_flight_continue_after_their_engine_was_killed_and_its_successor_loads_the_pins(
    mortal: Served, kit: Kit
) -> None:
    """Meanwhile the official client retries. A pinned adapter is loaded before any request for it."""
    restarts = 'slora_process_restarts_total{process="engine"}'
    num_restarts = mortal.metric(restarts) or 0
    key = mortal.make_key("engine-dies", "mine")
    upload(mortal, key, "mine", kit.small)
    upload(mortal, key, "pinned", kit.wide)
    pin = "/admin/tenants/engine-dies/adapters/pinned/pin"
    with mortal.client(key) as client, mortal.client(ADMIN_KEY) as operator:
        assert operator.put(pin).json()["pinned"]
        mortal.wait_for_metric("slora_pinned_adapters_loaded", 1)
        answer = client.post("/v1/completions", json=SHORT | {"model": "mine"}).json()
        before = [choice["text"] for choice in answer["choices"]]
        streaming, waiting = LongRequest(mortal, key, LONG | {"stream": True}), LongRequest(mortal, key, LONG)
        with mortal.slowed():
            streaming.start()
            waiting.start()
            assert streaming.begun.wait(READY_S)
            wait_until_running(mortal, 2)
            kill(mortal, ENGINE)
        wait_for(lambda: not is_ready(mortal) or None)
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert not is_ready(mortal) and httpx.get(mortal.url + "/healthz").status_code == 200
        streaming.join(READY_S)
        waiting.join(READY_S)
        assert streaming.status == 200 and waiting.status == 200
        assert "[DONE]" in streaming.text and "error" not in streaming.text
    with openai.OpenAI(base_url=mortal.url + "/v1", api_key=key, max_retries=20) as patient:
        after = patient.completions.create(
            model="mine", prompt="hello", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        assert [choice.text for choice in after.choices] == before
    mortal.wait_until_ready()
    assert mortal.metric(restarts) == num_restarts + 1
    mortal.wait_for_metric("slora_pinned_adapters_loaded", 1)
    assert mortal.metric("slora_adapter_loads_total") == 2, "the pinned adapter, and the requested one"
    with mortal.client(key) as client, mortal.client(ADMIN_KEY) as operator:
        assert client.post("/v1/completions", json=SHORT | {"model": "pinned"}).status_code == 200
        assert mortal.metric("slora_adapter_loads_total") == 2, "the request had to load it"
        operator.delete(pin)
        mortal.wait_for_metric("slora_pinned_adapters", 0)
        assert mortal.metric("slora_resident_adapters") == 2, "it leaves when its pages are wanted"


def test_a_prewarmed_adapter_is_loaded_before_any_request(mortal: Served, kit: Kit) -> None:
    key = mortal.make_key("warm")
    upload(mortal, key, "voice", kit.small)

    def place(client: httpx.Client) -> str:
        answer = client.post("/v1/adapters/voice@1/prewarm")
        assert answer.status_code == 202
        return str(answer.json()["versions"][0]["place"])

    with mortal.client(key) as client:
        assert place(client) == "fetching"
        wait_for(lambda: place(client) == "pool" or None, mortal.alive)
        loads = mortal.metric("slora_adapter_loads_total")
        assert client.post("/v1/completions", json=SHORT | {"model": "voice"}).status_code == 200
        assert mortal.metric("slora_adapter_loads_total") == loads, "the request had to load it"


def test_a_pin_follows_its_name_and_share_and_is_deleted_with_the_name(mortal: Served, kit: Kit) -> None:
    key = mortal.make_key("moves")
    upload(mortal, key, "name", kit.small)
    with mortal.client(ADMIN_KEY) as operator, mortal.client(key) as client:
        operator.put("/admin/tenants/moves/adapters/name/pin").raise_for_status()
        mortal.wait_for_metric("slora_pinned_adapters_loaded", 1)
        loads = mortal.metric("slora_adapter_loads_total")
        assert loads is not None
        files = {FIELDS[path.name]: path.read_bytes() for path in kit.wide.iterdir() if path.name in FIELDS}
        moved = client.post("/v1/adapters", data={"name": "name"}, files=files)
        assert moved.status_code == 201 and moved.json()["pinned"]
        # One load for the canary, and one for the pin.
        mortal.wait_for_metric("slora_adapter_loads_total", loads + 2)
        mortal.wait_for_metric("slora_pinned_adapters_loaded", 1)
        assert mortal.metric("slora_pinned_adapters") == 1
        assert client.post("/v1/completions", json=SHORT | {"model": "name"}).status_code == 200
        assert mortal.metric("slora_adapter_loads_total") == loads + 2
        # The bound can't be lowered below the pinned bytes. But a pinned alias may move to a version that exceeds the
        # bound.
        client.post("/v1/adapters/name/aliases/latest/rollback").raise_for_status()
        refused = operator.patch("/admin/tenants/moves", json={"max_pool_share": 0})
        assert refused.status_code == 409
        message = refused.json()["error"]["message"]
        (needed,), (whole,) = re.findall(r"take (\d+) pages", message), re.findall(r"pool's (\d+)", message)
        operator.patch(
            "/admin/tenants/moves", json={"max_pool_share": int(needed) / int(whole)}
        ).raise_for_status()
        mortal.wait_for_metric("slora_pinned_adapters_loaded", 1)
        # Otherwise the version would still be loaded, and the test would not see a load.
        client.delete("/v1/adapters/name@2").raise_for_status()
        client.post("/v1/adapters", data={"name": "name"}, files=files).raise_for_status()
        mortal.wait_for_metric("slora_pinned_adapters_loaded", 0)
        mortal.wait_for_metric("slora_pinned_adapters", 1)
        operator.patch("/admin/tenants/moves", json={"max_pool_share": 1}).raise_for_status()
        mortal.wait_for_metric("slora_pinned_adapters_loaded", 1)
        client.delete("/v1/adapters/name").raise_for_status()
        mortal.wait_for_metric("slora_pinned_adapters", 0)


def test_requests_finish_on_their_version_while_its_alias_moves_and_it_is_deleted(
    mortal: Served, kit: Kit
) -> None:
    key = mortal.make_key("rollout")
    resident = mortal.metric("slora_resident_adapters")
    assert resident is not None
    upload(mortal, key, "voice", kit.small)
    digest = upload(mortal, key, "voice", kit.wide).json()["digest"]
    with mortal.client(key) as client:

        def point(number: str) -> None:
            body = {"versions": {number: 100}}
            client.put("/v1/adapters/voice/aliases/latest", json=body).raise_for_status()

        point("1")
        whole = client.post("/v1/completions", json=LONG | {"model": "voice"})
        assert whole.headers["x-slora-adapter"] == "voice@1"
        reader = LongRequest(mortal, key, LONG | {"model": "voice", "stream": True})
        with mortal.slowed():
            reader.start()
            assert reader.begun.wait(READY_S)
            point("2")
            newer = client.post("/v1/completions", json=SHORT | {"model": "voice", "stream": True})
            assert newer.headers["x-slora-adapter"] == "voice@2"
            assert newer.headers["x-slora-adapter-digest"] == digest
            removed = client.delete("/v1/adapters/voice@1")
            assert removed.status_code == 200 and reader.is_alive(), "it was to be deleted while it runs"
        reader.join(READY_S)
        assert reader.text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in reader.text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole.json()["choices"][0]["text"]
        assert client.post("/v1/completions", json=SHORT | {"model": "voice@1"}).status_code == 404
        assert client.delete("/v1/adapters/voice@2").status_code == 409
        assert client.delete("/v1/adapters/voice").status_code == 200
    mortal.wait_for_metric("slora_resident_adapters", resident)


def test_a_killed_loader_fails_readiness_and_is_restarted(mortal: Served, kit: Kit) -> None:
    key = mortal.make_key("loader-dies")
    kill(mortal, LOADER)
    wait_for(lambda: None if is_ready(mortal) else True)
    mortal.wait_until_ready()
    upload(mortal, key, "after", kit.wide)
    with mortal.client(key) as client:
        assert client.post("/v1/completions", json=SHORT | {"model": "after"}).status_code == 200


def test_the_loader_has_a_lower_priority_and_children_get_no_terminal_signals(mortal: Served) -> None:
    """Niceness is relative to the processes of one session. A terminal sends its signals to one process group."""
    engine, loader, server = mortal.child(ENGINE), mortal.child(LOADER), mortal.process.pid
    assert loader.nice() == min(engine.nice() + 10, 19)
    assert {os.getsid(child.pid) for child in (engine, loader)} == {os.getsid(server)}
    assert os.getpgid(server) not in {os.getpgid(child.pid) for child in (engine, loader)}


def test_a_second_server_on_the_same_data_is_refused_by_name(mortal: Served, kit: Kit) -> None:
    flags = ("--port", "0", "--model", str(kit.base), "--data-dir", str(mortal.data_dir))
    ended = run_command("serve", *flags)
    message = ended.stderr
    assert ended.returncode == 1 and message.count("\n") == 1
    assert str(mortal.process.pid) in message and "--data-dir" in message
    assert is_ready(mortal)


def test_a_server_that_cannot_start_says_why_in_one_line(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    data = ("--data-dir", str(tmp_path / "data"))
    base = ("--model", str(kit.base), *data)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (("--model", str(tmp_path / "nowhere"), *data), 1, "no model at"),
            (("--model", str(tmp_path / "empty"), *data), 1, "config.json"),
            ((*base, "--port", port), 1, "--port"),
            ((*base, "--pool-bytes", "much"), 2, "--pool-bytes is 'much'"),
            ((*base, "--max-model-len", "100000"), 1, "this model's positions end at"),
            ((*base, "--port", "0", "--store", "nowhere://x"), 1, "s3://, gs://"),
            ((*base, "--port", "0", "--store", "hf://a/b"), 1, "adapter push hf://"),
            ((*base, "--port", "0", "--store", "memory://x"), 1, "other processes do not see"),
            ((*base, "--port", "0", "--store", "redis://127.0.0.1:9"), 1, "127.0.0.1:9"),
            ((), 2, "--model (SLORA_MODEL)"),
        ]
        commands = [(("serve", *flags), expected, words) for flags, expected, words in cases]
        demo = ("demo", str(tmp_path), *base, "--port", "0")
        for command, expected, words in [*commands, (demo, 1, "contains no adapters")]:
            ended = run_command(*command)
            message = ended.stderr
            assert ended.returncode == expected, command
            assert message.startswith("slora: ") and words in message and message.count("\n") == 1


def test_an_engine_that_can_never_run_ends_the_server_with_its_reason(
    kit: Kit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(kit.base, tmp_path, "--pool-bytes", "100") as served:
        assert served.process.wait(READY_S) == 1
    message = capfd.readouterr().err
    assert "pool_bytes is 100, but one page of this model takes" in message
    assert message.splitlines()[-1].startswith("slora: the engine cannot start: exit code 2")


def test_the_first_server_prints_its_admin_key_kill_9_loses_no_adapter_and_sigterm_no_request(
    kit: Kit, tmp_path: Path
) -> None:
    """No child process outlives its server."""
    data_dir = tmp_path / "data"
    nowhere = environment(
        SLORA_DATABASE="postgresql://127.0.0.1:1/slora", SLORA_STORE=str(tmp_path / "store")
    )
    with serving(kit.base, data_dir, env=nowhere) as refused:
        refused.process.wait(READY_S)
        assert refused.process.returncode == 1
    assert not any("admin key" in line for line in refused.lines), "else it would never be seen again"
    with serving(kit.base, data_dir, env=environment()) as served:
        served.wait_until_ready()
        children = [served.child(module) for module in (ENGINE, LOADER)]
        # A log does not show the key, but says in which file it is until the operator has taken it.
        kept_in = Path(served.wait_for_line("the admin key is in ").split(" is in ")[1].split(";")[0])
        admin_key = kept_in.read_text(encoding="utf-8")
        assert kept_in.stat().st_mode & 0o777 == 0o600
        kept_in.unlink()
        key = served.make_key("survivor", "mine", admin_key=admin_key)
        created = upload(served, key, "mine", kit.wide)
        served.process.kill()
        assert created.status_code == 201
        served.process.wait()
        psutil.wait_procs(children, timeout=READY_S)
        assert not any(child.is_running() for child in children)
    assert data_dir.stat().st_mode & 0o777 == 0o700
    files = [path for path in data_dir.rglob("*") if path.is_file()]
    assert files and not any(admin_key.encode() in path.read_bytes() for path in files)
    again = open_admin_key("", data_dir, Pepper.from_file(data_dir / "pepper"))
    assert again.shown_once is None and again.matches(admin_key)
    with serving(kit.base, data_dir, env=environment()) as served:
        served.wait_until_ready()
        assert not any("admin key" in line for line in served.lines), "it is made once"
        children = [served.child(module) for module in (ENGINE, LOADER)]
        with served.client(key) as client:
            (kept,) = client.get("/v1/adapters").json()["data"]
            assert kept.items() <= created.json().items()
            answer = client.post("/v1/completions", json=SHORT | {"model": "default"})
            assert answer.status_code == 200 and answer.headers["x-slora-adapter"] == "mine@1"
        reader = LongRequest(served, key, LONG | {"stream": True})
        with served.slowed():
            reader.start()
            assert reader.begun.wait(READY_S)
            served.process.send_signal(signal.SIGTERM)
            served.wait_for_line("stopping; 1 answer")
        reader.join(READY_S)
        assert reader.text.endswith("data: [DONE]\n\n") and "error" not in reader.text
        assert served.process.wait(READY_S) == 0
        assert not any(child.is_running() for child in children)
