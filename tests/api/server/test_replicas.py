"""A server with several engine processes (`--replicas`)."""

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.completions.services import Obstacles
from slora_api.core.data_dir import open_data_dir
from slora_api.core.settings import Settings
from slora_api.processes.children import Sockets, choose_cores, choose_gpus, engines_and_loader
from tests.api.command import run_command
from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, READY_S, Served, serving, wait_for
from tests.support.child_processes import find_children

BODY = {"model": "base", "prompt": "hello", "max_tokens": 250, "temperature": 0, "ignore_eos": True}
SHORT = BODY | {"max_tokens": 8}


def test_each_engine_has_a_socket_of_its_own(kit: Kit, tmp_path: Path) -> None:
    settings = Settings(EngineConfig(kit.base), replicas=3)
    with open_data_dir(tmp_path) as data:
        children = engines_and_loader(settings, BaseModelFiles(settings), data, Sockets(tmp_path, 3))
    assert [child.name for child in children] == ["loader", "engine-0", "engine-1", "engine-2"]
    sockets = {json.loads(child.arguments[-1])["socket"] for child in children[1:]}
    assert sockets == {str(tmp_path / f"engine-{number}.sock") for number in range(3)}


def test_each_engine_has_gpus_of_its_own() -> None:
    assert choose_gpus({"A": "1"}, 0, 1) == {"A": "1"}
    assert [choose_gpus({}, number, 2)["CUDA_VISIBLE_DEVICES"] for number in range(2)] == ["0", "1"]
    given = {"CUDA_VISIBLE_DEVICES": "4,2"}
    assert [choose_gpus(given, number, 2)["CUDA_VISIBLE_DEVICES"] for number in range(2)] == ["4", "2"]
    pairs = [choose_gpus({}, number, 2, num_gpus=2)["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert pairs == ["0,1", "2,3"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert choose_gpus(hidden, 1, 2) == hidden


def test_too_few_visible_gpus_for_the_engines_are_refused() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,2,3"}
    with pytest.raises(
        ConfigError, match="=4,2,3 has 3 devices, but --replicas 4 needs 4: name more devices"
    ):
        choose_gpus(given, 0, 4)
    with pytest.raises(ConfigError, match="--replicas 2 with --tensor-parallel-size 2 needs 4"):
        choose_gpus(given, 0, 2, num_gpus=2)


def test_the_engines_divide_the_cores() -> None:
    assert [list(choose_cores(range(7), number, 3)) for number in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert not choose_cores(range(8), 0, 1) and not choose_cores(range(1), 0, 2)


def test_a_stalled_engine_beside_a_working_one_does_not_stop_the_server() -> None:
    obstacles = Obstacles(
        {"engine-0": "engine-0 makes no progress"}, engines=frozenset({"engine-0", "engine-1"})
    )
    assert obstacles.stall is None
    obstacles.stalls["engine-1"] = "engine-1 makes no progress"
    assert obstacles.stall == "engine-0 makes no progress"
    obstacles.stalls = {"loader": "the loader makes no progress"}
    assert obstacles.stall == "the loader makes no progress"


_COUNT_FROZEN = """
import gc
from slora_api.cli.main import main
code = main()
print("frozen", gc.get_freeze_count())
raise SystemExit(code)
"""


@pytest.fixture(scope="module")
def pair(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two engines, of which tests may kill one. Each test leaves one serving at least."""
    data, command = tmp_path_factory.mktemp("pair") / "data", (sys.executable, "-P", "-c", _COUNT_FROZEN)
    with serving(kit.base, data, "--replicas", "2", command=command) as served:
        served.wait_until_ready()
        wait_until_both_serve(served)
        yield served


def wait_until_both_serve(served: Served) -> None:
    for number in range(2):
        served.wait_for_metric(f'slora_replica_serving{{replica="engine-{number}"}}', 1)


def begin_stream(
    stack: ExitStack, client: httpx.Client, body: dict[str, object]
) -> tuple[str, Iterator[str]]:
    """The first event of a stream, and the others. stack: closes the stream."""
    answer = stack.enter_context(client.stream("POST", "/v1/completions", json=body | {"stream": True}))
    lines = (line for line in answer.iter_lines() if line.startswith("data: "))
    return next(lines), lines


def test_a_server_stays_ready_and_completes_streams_when_it_loses_one_of_two_engines(pair: Served) -> None:
    if len(cores := os.sched_getaffinity(0)) > 1:
        engines = find_children("slora.engine.process", pair.process.pid, recursive=True)
        shares = [frozenset(engine.cpu_affinity()) for engine in engines]
        assert frozenset().union(*shares) == cores and not shares[0] & shares[1]
    with pair.client(pair.make_key("acme")) as client:
        alone = client.post("/v1/completions", json=BODY).json()
        with ExitStack() as stack:
            with pair.slowed():
                first, lines = begin_stream(stack, client, BODY)
                # The other engine continues the stream if it was on this one.
                victim = pair.child("slora.engine.process")
                victim.send_signal(signal.SIGKILL)
            assert not psutil.wait_procs([victim], timeout=READY_S)[1]
            ready = client.get("/readyz")
            assert ready.status_code == 200 and "Not serving: engine-" in ready.text
            *rest, end = [first, *lines]
        assert end == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in rest]
        assert "".join(texts) == alone["choices"][0]["text"]
        assert client.post("/v1/completions", json=SHORT).status_code == 200
    wait_until_both_serve(pair)


def test_an_operator_restarts_an_engine_in_the_middle_of_its_stream(pair: Served) -> None:
    with pair.client(pair.make_key("acme")) as client, pair.client(ADMIN_KEY) as admin:
        alone = client.post("/v1/completions", json=BODY).json()
        with ExitStack() as stack:
            with pair.slowed():
                first, lines = begin_stream(stack, client, BODY)
                owner = next(one for one in _list_engines(admin) if one["running"])
                assert admin.post(f"/admin/engines/{owner['name']}/restart").status_code == 202
                assert client.post("/v1/completions", json=SHORT).status_code == 200
            *rest, end = [first, *lines]
        assert end == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in rest]
        assert "".join(texts) == alone["choices"][0]["text"]
        wait_for(lambda: _is_restarted(_list_engines(admin), owner) or None, pair.alive)


def test_at_the_second_signal_a_stream_ends_because_the_server_stops_and_long_lived_objects_were_frozen(
    pair: Served,
) -> None:
    """Born from a bug: a full collection of 75 MiB of modules and routes blocked the event loop for 50 ms.

    Ends the server of this module, so it is the last test that uses it."""
    body = {"model": "default", "prompt": "hi", "max_tokens": 400, "ignore_eos": True}
    with pair.slowed(), pair.client(pair.make_key("last")) as client, ExitStack() as stack:
        _, lines = begin_stream(stack, client, body)
        pair.process.send_signal(signal.SIGTERM)
        pair.wait_for_line("stopping")
        pair.process.send_signal(signal.SIGTERM)
        rest = []
        with suppress(httpx.TransportError):
            rest.extend(lines)
    assert pair.process.wait(READY_S) == 0
    frozen = next(line for line in pair.lines if line.startswith("frozen "))
    assert int(frozen.split()[1]) > 10_000
    assert not any("died" in line for line in rest)
    assert any("stop" in line or "shutting down" in line for line in rest[-3:])


@pytest.mark.soak
def test_a_rolling_restart_with_several_workers_refuses_no_request(kit: Kit, tmp_path: Path) -> None:
    with serving(kit.base, tmp_path / "data", "--replicas", "2", "--api-workers", "2") as served:
        served.wait_until_ready()
        is_over = threading.Event()
        statuses: Counter[int] = Counter()

        def send(key: str) -> None:
            body = BODY | {"max_tokens": 30}
            while not is_over.is_set():
                with served.client(key) as client:  # A new connection, which either worker may accept.
                    statuses[client.post("/v1/completions", json=body).status_code] += 1

        key = served.make_key("acme")
        threads = [threading.Thread(target=send, args=(key,)) for _ in range(4)]
        with served.client(ADMIN_KEY) as admin:
            wait_for(lambda: all(one["serving"] for one in _list_engines(admin)) or None, served.alive)
            for thread in threads:
                thread.start()
            try:
                ended = run_command(
                    "engine", "restart", "--rolling", SLORA_URL=served.url, SLORA_ADMIN_KEY=ADMIN_KEY
                )
            finally:
                is_over.set()
                for thread in threads:
                    thread.join()
            assert ended.returncode == 0, ended.stderr
            assert [one["restarts"] for one in _list_engines(admin)] == [1, 1]
        assert statuses.keys() == {200} and statuses[200] > 10, statuses


def _list_engines(admin: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = admin.get("/admin/engines").raise_for_status().json()["data"]
    return found


def _is_restarted(engines: list[dict[str, Any]], before: dict[str, Any]) -> bool:
    (engine,) = (one for one in engines if one["name"] == before["name"])
    return bool(engine["restarts"] == before["restarts"] + 1)
