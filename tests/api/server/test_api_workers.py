"""`slora serve --api-workers 2`: two processes answer, behave as one server, and one may die."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any

import psutil
import pytest

from slora_adapters.process.heartbeat import HeartbeatPage
from slora_api.core.host_board import BoardSize
from slora_api.serve.api_workers import WorkerConfig
from tests.api.conftest import Kit
from tests.api.platform import bearer
from tests.api.served import (
    ADMIN_KEY,
    READY_S,
    Served,
    environment,
    parse_metrics,
    serving,
    sum_series,
    wait_for,
)
from tests.api.server.test_server import upload
from tests.support.child_processes import find_children

MAX_PER_TENANT = 4


class Connection:
    """One connection to one worker. worker: the worker's process."""

    def __init__(self, server: Served) -> None:
        self._http = HTTPConnection(*server.url.removeprefix("http://").split(":"), timeout=READY_S)  # type: ignore[arg-type]
        self._http.connect()
        self.get("/healthz", "")
        port = self._http.sock.getsockname()[1]
        self.worker = next(
            worker
            for worker in workers(server)
            if any(one.raddr and one.raddr.port == port for one in worker.net_connections("tcp"))
        )

    def send(self, method: str, path: str, key: str, body: Any = None) -> HTTPResponse:
        raw = None if body is None else json.dumps(body)
        self._http.request(method, path, raw, {**bearer(key), "Content-Type": "application/json"})
        return self._http.getresponse()

    def call(self, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
        """Returns the status and the JSON of the answer."""
        answer = self.send(method, path, key, body)
        raw = answer.read()
        return answer.status, json.loads(raw)

    def get(self, path: str, key: str) -> tuple[int, Any]:
        return self.call("GET", path, key)

    def complete(self, key: str, model: str = "default", **fields: Any) -> HTTPResponse:
        return self.send(
            "POST", "/v1/completions", key, {"model": model, "prompt": "hello", "max_tokens": 1, **fields}
        )

    def stream(self, key: str, num_tokens: int) -> HTTPResponse:
        """Starts a stream and reads its first event."""
        answer = self.complete(key, "base", max_tokens=num_tokens, stream=True, ignore_eos=True)
        if answer.status == 200:
            answer.readline()
        return answer

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.get("/readyz", "")[0] == 200 or None)

    def close(self) -> None:
        self._http.close()


def workers(server: Served) -> list[psutil.Process]:
    return find_children("slora_api.serve.api_process", server.process.pid)


@contextmanager
def connect_to_both(server: Served) -> Iterator[tuple[Connection, Connection]]:
    """Yields a connection to each worker."""
    with ExitStack() as stack:
        found: dict[int, Connection] = {}

        def connect() -> tuple[Connection, ...] | None:
            connection = Connection(server)
            stack.callback(connection.close)
            found.setdefault(connection.worker.pid, connection)
            return tuple(found.values()) if len(found) == 2 else None

        first, second = wait_for(connect, server.alive)
        yield first, second


def serve_two(kit: Kit, directory: Path) -> AbstractContextManager[Served]:
    """A server with two workers, whose model has room for long streams."""
    base = directory / "base"
    shutil.copytree(kit.base, base)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (base / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 4096}), encoding="utf-8"
    )
    flags = ("--max-concurrent-per-tenant", str(MAX_PER_TENANT), "--admin-key", ADMIN_KEY)
    return serving(base, directory / "data", "--api-workers", "2", "--stall-seconds", "5", *flags)


@pytest.fixture(scope="module")
def two(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_two(kit, tmp_path_factory.mktemp("two")) as served:
        served.wait_until_ready()
        yield served


def test_no_child_process_has_the_admin_key_on_its_command_line(two: Served) -> None:
    """Every user of the machine can read command lines. The operator may have put the key on that of `slora serve`."""
    children = psutil.Process(two.process.pid).children(recursive=True)
    assert len(children) >= 4
    assert not any(ADMIN_KEY in part for child in children for part in child.cmdline())
    with two.client(ADMIN_KEY) as admin:
        assert admin.get("/admin/keys").status_code == 200


def read_metric(connection: Connection, name: str) -> float:
    """The sum of all series of a metric, as the worker of this connection tells it."""
    text = connection.send("GET", "/metrics", ADMIN_KEY).read().decode()
    return sum_series(parse_metrics(text), name) or 0.0


def wait_for_metric(connection: Connection, name: str, value: float) -> None:
    wait_for(lambda: read_metric(connection, name) == value or None)


def test_a_change_through_one_worker_holds_for_the_next_request_to_the_other(two: Served, kit: Kit) -> None:
    with connect_to_both(two) as (one, other):
        for at, (writer, reader) in enumerate([(one, other), (other, one)]):
            tenant = f"shared-{at}"
            assert writer.call("POST", "/admin/tenants", ADMIN_KEY, {"name": tenant})[0] == 201
            status, made = writer.call(
                "POST", f"/admin/tenants/{tenant}/keys", ADMIN_KEY, {"adapter": "tuned@prod"}
            )
            key = made["key"]
            assert status == 201 and reader.get("/v1/models", key)[0] == 200
            assert upload(two, key, "tuned", kit.small).status_code == 201
            assert upload(two, key, "tuned", kit.wide).status_code == 201
            versions = {1: set[str](), 2: set[str]()}
            for move in range(10):
                number = 1 + move % 2
                alias = {"versions": {str(number): 100}}
                assert writer.call("PUT", "/v1/adapters/tuned/aliases/prod", key, alias)[0] == 200
                answer = reader.complete(key)
                answer.read()
                versions[number].add(answer.headers["x-slora-adapter-digest"])
            assert len(versions[1]) == len(versions[2]) == 1 and versions[1] != versions[2]
            pin = f"/admin/tenants/{tenant}/adapters/tuned/pin"
            for method, num_pins in (("PUT", 1), ("DELETE", 0)):
                assert writer.call(method, pin, ADMIN_KEY)[0] == 200
                wait_for_metric(reader, "slora_pinned_adapters_loaded", num_pins)
            assert writer.call("DELETE", f"/admin/keys/{made['key_id']}", ADMIN_KEY)[0] == 200
            assert reader.get("/v1/models", key)[0] == 401


def test_workers_show_the_same_models_and_one_sum_of_metrics(two: Served) -> None:
    key = two.make_key("metrics")
    with connect_to_both(two) as both:
        assert both[0].get("/v1/models", key) == both[1].get("/v1/models", key)
        before = read_metric(both[0], "vllm:request_success_total")
        for connection in (*both, *both):
            connection.complete(key, "base").read()
        counts = [read_metric(connection, "vllm:request_success_total") for connection in both]
        assert counts == [before + 4] * 2
        steps = [read_metric(connection, "slora_engine_steps_total") for connection in both]
        assert 0 < steps[0] <= steps[1] < 1.5 * steps[0] + 100, "the engine is not counted twice"


def test_a_tenants_limit_counts_its_answers_in_all_workers(two: Served) -> None:
    hostile, honest = two.make_key("hostile"), two.make_key("honest")
    with two.slowed(), ExitStack() as stack:
        pairs = [stack.enter_context(connect_to_both(two)) for _ in range(3)]
        for one, other in pairs[:2]:
            assert one.stream(hostile, 4000).status == other.stream(hostile, 4000).status == 200
        for connection in pairs[2]:
            status, body = connection.call(
                "POST", "/v1/completions", hostile, {"model": "base", "prompt": "x", "max_tokens": 1}
            )
            assert status == 429
            assert f"Your tenant has {MAX_PER_TENANT} answers in progress" in body["error"]["message"]
            answer = connection.complete(honest, "base")
            answer.read()
            assert answer.status == 200


def read_stream(answer: HTTPResponse) -> str:
    """Returns how the stream ended."""
    try:
        raw = answer.read()
    except (IncompleteRead, ConnectionError):
        return "broken"
    return "done" if raw.endswith(b"data: [DONE]\n\n") else "broken"


def folder_of(server: Served, connection: Connection) -> Path:
    """The worker's part of the quarantine."""
    command = connection.worker.cmdline()
    config = WorkerConfig.from_json(command[command.index("--config") + 1])
    return server.data_dir / "quarantine" / str(config.number)


def read_quota(server: Served, tenant: str) -> dict[str, int]:
    with server.client(ADMIN_KEY) as admin:
        used: dict[str, int] = admin.get(f"/admin/tenants/{tenant}/quota").raise_for_status().json()["used"]
    return used


def set_quota(server: Served, tenant: str, **limits: int) -> None:
    with server.client(ADMIN_KEY) as admin:
        admin.patch(f"/admin/tenants/{tenant}/quota", json=limits).raise_for_status()


def wait_until_nothing_is_reserved(server: Served, tenant: str) -> None:
    """Streams of these tests reserve 4,000 tokens each. The ledger may know of more tokens of a killed process."""
    used = wait_for(
        lambda: found if not (found := read_quota(server, tenant))["concurrent_answers"] else None,
        server.alive,
    )
    assert used["tokens_per_minute"] <= used["tokens_per_day"] < 4000


def test_a_killed_worker_breaks_only_its_own_streams_and_leaves_nothing_reserved(two: Served) -> None:
    doomed_key, other_key = two.make_key("doomed"), two.make_key("survivor")
    set_quota(two, "doomed", tokens_per_minute=20_000, tokens_per_day=20_000)
    with ExitStack() as stack:
        doomed, other = stack.enter_context(connect_to_both(two))
        extra = stack.enter_context(connect_to_both(two))
        before = read_metric(other, "vllm:request_success_total")
        left, needed = ((folder_of(two, one) / "upload") for one in (doomed, other))
        for upload_folder in (left, needed):
            upload_folder.mkdir()
        with two.slowed():
            survivors = [one.stream(other_key, 150) for one in (other, *extra) if one.worker == other.worker]
            victims = [
                one.stream(doomed_key, 4000) for one in (doomed, *extra) if one.worker == doomed.worker
            ]
            assert len(survivors) == len(victims) == 2
            assert read_quota(two, "doomed")["tokens_per_day"] > 7000
            doomed.worker.kill()
        assert [read_stream(one) for one in victims] == ["broken"] * 2
        # New connections are answered by the other worker, until there is a new one.
        fresh = stack.enter_context(connect_to_both(two))
        assert doomed.worker.pid not in [one.worker.pid for one in fresh]
        assert [read_stream(one) for one in survivors] == ["done"] * 2
        assert not left.exists() and needed.exists(), "a worker empties its own part of the quarantine"
        needed.rmdir()
        wait_until_nothing_is_reserved(two, "doomed")
        for connection in fresh:
            connection.wait_until_ready()
            answer = connection.complete(doomed_key, "base", n=MAX_PER_TENANT, temperature=1)
            answer.read()
            assert answer.status == 200, "the permits of the dead worker are free again"
        assert read_metric(fresh[0], "vllm:request_success_total") == before + 2 + 2 * MAX_PER_TENANT
        assert read_metric(fresh[1], "slora_process_restarts_total") == 1


@pytest.mark.soak
def test_pins_and_readiness_of_all_workers_survive_the_engine(two: Served, kit: Kit) -> None:
    key = two.make_key("pinner")
    assert upload(two, key, "tuned", kit.small).status_code == 201
    with connect_to_both(two) as both:
        assert both[0].call("PUT", "/admin/tenants/pinner/adapters/tuned/pin", ADMIN_KEY)[0] == 200
        wait_for_metric(both[1], "slora_pinned_adapters_loaded", 1)
        two.child("slora.engine.process").kill()
        for connection in both:
            wait_for(lambda one=connection: one.get("/readyz", "")[0] == 503 or None)  # type: ignore[misc]
        for connection in both:
            connection.wait_until_ready()
            assert connection.get("/healthz", "")[0] == 200
        wait_for_metric(both[1], "slora_pinned_adapters_loaded", 1)


@pytest.mark.soak
def test_a_stopped_worker_is_replaced_and_the_other_one_answers_meanwhile(two: Served) -> None:
    key = two.make_key("patient")
    with connect_to_both(two) as (hung, other):
        hung.worker.suspend()
        for _ in range(20):
            answer = other.complete(key, "base")
            answer.read()
            assert answer.status == 200
            # A new connection is accepted by the worker that runs.
            with closing(Connection(two)) as fresh:
                assert fresh.worker == other.worker
        assert not psutil.wait_procs([hung.worker], timeout=READY_S)[1]
    with connect_to_both(two) as both:
        assert hung.worker.pid not in [one.worker.pid for one in both]


def test_a_worker_that_cannot_start_tells_the_supervisor_why() -> None:
    page = HeartbeatPage.create()
    config = WorkerConfig(1, {"port": "many"}, 0, Path("metrics"), Path("engine.sock"), 0, 0, BoardSize(3, 1))
    command = [sys.executable, "-P", "-m", "slora_api.serve.api_process", "--config", config.to_json()]
    with subprocess.Popen(
        [*command, "--heartbeat", str(page.descriptor)],
        stdin=subprocess.PIPE, pass_fds=(page.descriptor,), env=environment(),
    ) as process:  # fmt: skip
        assert process.wait(READY_S) == 2
    assert page.reason.startswith("--port is 'many'")
    page.close()


@pytest.mark.soak
def test_a_killed_engine_leaves_nothing_reserved_in_a_quota(two: Served) -> None:
    key = two.make_key("metered")
    set_quota(two, "metered", tokens_per_minute=20_000, tokens_per_day=20_000)
    with two.slowed(), connect_to_both(two) as both:
        for connection in both:
            connection.stream(key, 3990)
        assert read_quota(two, "metered")["tokens_per_day"] > 7000
        two.child("slora.engine.process").kill()
    # The connections are closed, because the streams would continue in the restarted engine.
    wait_until_nothing_is_reserved(two, "metered")
    with connect_to_both(two) as both:
        for connection in both:
            connection.wait_until_ready()


def test_sigterm_lets_the_streams_of_all_workers_finish(two: Served) -> None:
    """Ends the server of this module, so it is the last test that uses it."""
    key = two.make_key("last")
    with connect_to_both(two) as both:
        with two.slowed():
            streams = [connection.stream(key, 100) for connection in both]
            processes = workers(two)
            two.process.send_signal(signal.SIGTERM)
            two.wait_for_line("stopping; 2 answers in progress")
        assert [read_stream(stream) for stream in streams] == ["done"] * 2
    assert two.process.wait(READY_S) == 0
    assert not any(process.is_running() for process in processes)


@pytest.mark.soak
def test_killing_everything_leaves_nothing_reserved_in_a_quota(kit: Kit, tmp_path: Path) -> None:
    with serve_two(kit, tmp_path) as server:
        server.wait_until_ready()
        key = server.make_key("metered")
        set_quota(server, "metered", tokens_per_minute=9000, tokens_per_day=9000)
        with server.slowed(), connect_to_both(server) as both:
            assert [connection.stream(key, 3990).status for connection in both] == [200, 200]
            server.kill_everything()
    with serving(tmp_path / "base", tmp_path / "data", "--api-workers", "2") as server:
        server.wait_until_ready()
        wait_until_nothing_is_reserved(server, "metered")
        with connect_to_both(server) as both:
            answers = [connection.stream(key, 3990) for connection in both]
            assert [answer.status for answer in answers] == [200, 200], "the whole quota is free again"


@pytest.mark.soak
def test_workers_end_with_a_server_that_is_killed(kit: Kit, tmp_path: Path) -> None:
    with serve_two(kit, tmp_path) as server:
        server.wait_until_ready()
        processes = workers(server)
        server.process.kill()
        assert len(processes) == 2 and not psutil.wait_procs(processes, timeout=READY_S)[1]
