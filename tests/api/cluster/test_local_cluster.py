"""`slora deploy --local` with real Ray: replicas that are killed, scaled and replaced while streams run."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.api.conftest import Kit
from tests.api.served import (
    ADMIN_KEY,
    READY_S,
    SLORA,
    Served,
    environment,
    running,
    wait_for,
    wait_until,
)
from tests.api.server.test_replica_kills import DEMO, Streams, find_records, make_body
from tests.api.server.test_server import upload
from tests.postgresql_server import PostgresqlServer
from tests.redis_server import DURABLE, RedisServer
from tests.support.child_processes import find_children

ENGINE, LOADER = "slora.engine.process", "slora_adapters.loader.loader_process"
RANK = "slora.runner.rank_process"
LIMITS = ("--max-concurrent-requests", "1600", "--max-concurrent-per-tenant", "1200")


def run_slora(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", *SLORA[2:], *arguments]
    return subprocess.run(
        command, env=environment(SLORA_ADMIN_KEY=ADMIN_KEY), capture_output=True, timeout=READY_S,
        encoding="utf-8")  # fmt: skip


class LocalCluster:
    """A local cluster under test. flags: the settings, which each `slora deploy` gives again."""

    def __init__(self, served: Served, flags: Sequence[str]) -> None:
        self.served = served
        self._flags = flags

    def deploy(self, *flags: str) -> "subprocess.CompletedProcess[str]":
        """Changes the running cluster. Later flags take precedence."""
        return run_slora("deploy", *self._flags, *flags)

    def status(self) -> dict[str, Any]:
        shown = run_slora("cluster", "status", "--json", "--data-dir", str(self.served.data_dir))
        assert shown.returncode == 0, shown.stderr
        found: dict[str, Any] = json.loads(shown.stdout)
        return found

    def wait_for_replicas(self, number: int) -> None:
        wait_for(lambda: (self.served.metric("slora_replica_serving") == number) or None, self.served.alive)

    def engines(self) -> list[psutil.Process]:
        return list(find_children(ENGINE, self.served.process.pid, recursive=True))

    def loaders(self) -> list[psutil.Process]:
        return list(find_children(LOADER, self.served.process.pid, recursive=True))

    def actors(self) -> list[psutil.Process]:
        """The processes of Ray that hold a replica with an engine."""
        return [parent for engine in self.engines() if (parent := engine.parent()) is not None]

    def kill(self, draw: random.Random) -> None:
        """Kills an engine, or the actor of a replica with all that it runs."""
        victims = self.engines() if draw.random() < 0.5 else self.actors()
        if victims:
            draw.choice(victims).send_signal(signal.SIGKILL)


@contextmanager
def deployed(model: Path, data_dir: Path, *flags: str, kernels: str = "torch") -> Iterator[LocalCluster]:
    given = ["--model", str(model), "--data-dir", str(data_dir), "--port", "0", "--device", "cpu"]
    given += ["--dtype", "float32", "--kernels", kernels, "--pool-bytes", "8MiB"]
    given += ["--host-cache-bytes", "16MiB", *LIMITS, *flags]
    variables = environment(SLORA_ADMIN_KEY=ADMIN_KEY)
    with running([*SLORA, "deploy", "--local", *given], variables, data_dir) as served:
        served.wait_until_ready()
        yield LocalCluster(served, given)
        tree = psutil.Process(served.process.pid).children(recursive=True)
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(READY_S)
    assert not psutil.wait_procs(tree, timeout=READY_S)[1], "processes of Ray outlived the server"


def find_listeners(process: psutil.Process) -> set[str]:
    """The addresses at which a process listens."""
    return {one.laddr.ip for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def read_while(streams: Streams, num_chunks: int, shares: Sequence[float], act: Callable[[], object]) -> None:
    """Reads the streams, and calls `act` each time that a share of the chunks has arrived."""

    async def main() -> None:
        reading = asyncio.create_task(streams.read_all())
        for share in shares:
            await streams.wait_for_chunks(int(share * num_chunks))
            if not reading.done():
                await asyncio.to_thread(act)
        await reading

    asyncio.run(main())


def prepare_streams(
    cluster: LocalCluster, adapter: Path, number: int, max_tokens: int
) -> tuple[Streams, Streams]:
    """Uploads an adapter, and reads streams of it and of the base model undisturbed. Returns them, and the same streams
    of another key, which are not read yet.
    """
    keys = [cluster.served.make_key("acme") for _ in range(2)]
    assert upload(cluster.served, keys[0], "small", adapter).status_code == 201
    bodies = [make_body(index, ["base", "small"], max_tokens) for index in range(number)]
    alone, disturbed = (Streams(cluster.served, key, bodies) for key in keys)
    asyncio.run(alone.read_all())
    return alone, disturbed


def check_equal(
    cluster: LocalCluster, alone: Streams, disturbed: Streams, database: str | None = None
) -> None:
    """No stream is truncated or different, and each is billed once. database: a URL instead of the SQLite file."""
    assert len(disturbed.answers) == len(disturbed.bodies)
    for number, (expected, found) in enumerate(zip(alone.answers, disturbed.answers, strict=True)):
        assert found == expected, disturbed.bodies[number]
    place = database or cluster.served.data_dir / "slora.db"
    expected_records = find_records(place, alone.key, len(alone.bodies))
    assert len(expected_records) == len(disturbed.bodies)
    # An engine that is lost may record a part of an answer before the API process records all of it.
    wait_until(lambda: find_records(place, disturbed.key, len(disturbed.bodies)) == expected_records)


def test_a_local_cluster_loses_no_stream_when_an_actor_of_ray_and_an_engine_are_killed(
    kit: Kit, tmp_path: Path, *, soak: bool
) -> None:
    """Each start of an actor or an engine takes seconds of CPU time, so the quick run ends while Ray replaces the
    actor."""
    with deployed(kit.base, tmp_path / "data", "--replicas", "2") as cluster:
        served = cluster.served
        alone, disturbed = prepare_streams(cluster, kit.small, 10, 100)
        cluster.wait_for_replicas(2)
        secret = (served.data_dir / "cluster-secret").read_text(encoding="utf-8")
        for process in psutil.Process(served.process.pid).children(recursive=True):
            assert secret not in " ".join(process.cmdline())
        for engine in cluster.engines():
            assert find_listeners(engine) == {"127.0.0.1"}
        victims = [cluster.actors()[1], *cluster.engines()[:1]][: 2 if soak else 1]
        shares = (0.2, 0.5)[: len(victims)]
        read_while(disturbed, alone.num_chunks, shares, lambda: victims.pop(0).send_signal(signal.SIGKILL))
        assert not victims
        check_equal(cluster, alone, disturbed)
        if soak:
            cluster.wait_for_replicas(2)


@pytest.mark.soak
def test_settings_with_which_no_replica_can_start_end_the_command_with_the_reason(
    kit: Kit, tmp_path: Path
) -> None:
    given = ("--model", str(kit.base), "--data-dir", str(tmp_path), "--port", "0", "--device", "cpu")
    ended = run_slora("deploy", "--local", *given, "--tensor-parallel-size", "3")
    assert ended.returncode == 1
    assert "3" in ended.stderr.splitlines()[-1] and "attention heads" in ended.stderr.splitlines()[-1]


@pytest.mark.soak
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_thousand_streams_of_replicas_killed_at_random_equal_those_left_alone(
    tmp_path: Path, num_replicas: int, report: Callable[[str], None]
) -> None:
    flags = ("--replicas", str(num_replicas), "--pool-bytes", "256MiB", "--model-name", "base")
    with deployed(DEMO, tmp_path / "data", *flags, kernels="auto") as cluster:
        cluster.wait_for_replicas(num_replicas)
        keys = [cluster.served.make_key("acme") for _ in range(2)]
        bodies = [make_body(number, ["base"], 100) for number in range(1000)]
        alone, disturbed = (Streams(cluster.served, key, bodies) for key in keys)
        asyncio.run(alone.read_all())
        draw, kills = random.Random(5), []

        def kill() -> None:
            cluster.kill(draw)
            kills.append(1)

        shares = sorted(draw.uniform(0.05, 0.7) for _ in range(8))
        read_while(disturbed, alone.num_chunks, shares, kill)
        check_equal(cluster, alone, disturbed)
        cluster.wait_for_replicas(num_replicas)
        report(
            f"1,000 streams over {num_replicas} replicas on Ray: {len(kills)} kills, 0 truncated or different, each "
            "billed once, all replicas replaced"
        )


class Load:
    """Clients that send one request after the other, until the context ends. Each answer must be a 200 and complete."""

    def __init__(self, served: Served, key: str, num_clients: int = 4) -> None:
        self._served = served
        self._key = key
        self._has_ended = threading.Event()
        self._clients = [threading.Thread(target=self._run, args=(n,)) for n in range(num_clients)]
        self.num_answers = 0
        self.troubles: list[str] = []

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for client in self._clients:
            client.join()

    def _run(self, number: int) -> None:
        body = {
            "model": "base",
            "prompt": f"{number} hello",
            "max_tokens": 80,
            "temperature": 0,
            "ignore_eos": True,
        }
        first = ""
        with self._served.client(self._key) as client:
            while not self._has_ended.is_set():
                answer = client.post("/v1/completions", json=body)
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                first = first or text
                if answer.status_code != 200 or text != first:
                    self.troubles.append(text)
                self.num_answers += 1


@pytest.mark.soak
def test_scaling_and_an_upgrade_under_load_refuse_no_request_and_lose_no_record(
    kit: Kit, tmp_path: Path, report: Callable[[str], None]
) -> None:
    with deployed(kit.base, tmp_path / "data", "--replicas", "1") as cluster:
        key = cluster.served.make_key("acme")
        with Load(cluster.served, key) as load:
            for change in (
                ("--replicas", "3"),
                ("--replicas", "1"),
                ("--replicas", "1", "--pool-bytes", "12MiB"),
                ("--replicas", "2", "--pool-bytes", "16MiB"),
            ):
                changed = cluster.deploy(*change)
                assert changed.returncode == 0, changed.stderr
                cluster.wait_for_replicas(int(change[1]))
            stranger = cluster.deploy("--replicas", "2", "--max-lora-rank", "64")
            assert stranger.returncode == 1
            assert "its max_lora_rank is 64, but that of the other replicas is 128" in stranger.stderr
            unfit = cluster.deploy("--replicas", "2", "--device", "cuda", "--tensor-parallel-size", "2")
            assert unfit.returncode == 2
            assert "needs 2 CPU and 2 GPU on one host, but the largest host" in unfit.stderr
            status = cluster.status()
            listed = [one for one in status["replicas"] if not one["is_silent"]]
            assert len(listed) == 2 and status["hosts"] == 1
        assert not load.troubles, load.troubles[:3]
        records = find_records(cluster.served.data_dir / "slora.db", key, load.num_answers)
        assert len(records) == load.num_answers
        report(
            f"scale 1 -> 3 -> 1, two rolling upgrades and a refused one under load: {load.num_answers} requests, 0 "
            f"refused, {len(records)} records"
        )


@pytest.mark.soak
def test_replicas_are_added_under_load_and_removed_after_it(
    kit: Kit, tmp_path: Path, report: Callable[[str], None]
) -> None:
    flags = ("--replicas", "1", "--max-replicas", "3", "--max-num-seqs", "4")
    seconds = ("--scale-seconds", "0.5")
    with deployed(kit.base, tmp_path / "data", *flags, *seconds) as cluster:
        key = cluster.served.make_key("acme")
        began = time.monotonic()
        with Load(cluster.served, key, num_clients=8) as load:
            cluster.wait_for_replicas(3)
            up_s = time.monotonic() - began
        began = time.monotonic()
        # A single client remains, so that the removed replicas are drained beside a request.
        with Load(cluster.served, key, num_clients=1) as rest:
            cluster.wait_for_replicas(1)
            down_s = time.monotonic() - began
        assert not load.troubles and not rest.troubles, (load.troubles + rest.troubles)[:3]
        num_answers = load.num_answers + rest.num_answers
        records = find_records(cluster.served.data_dir / "slora.db", key, num_answers)
        assert len(records) == num_answers
        report(
            f"autoscaling from 1 to 3 replicas in {up_s:.0f} s and back in {down_s:.0f} s: {num_answers} requests, 0 "
            f"refused, {len(records)} records"
        )


@pytest.mark.soak
def test_groups_of_ranks_behind_two_workers_lose_no_stream(
    kit: Kit, tmp_path: Path, report: Callable[[str], None]
) -> None:
    flags = ("--replicas", "2", "--tensor-parallel-size", "2", "--api-workers", "2")
    with deployed(kit.base, tmp_path / "data", *flags) as cluster:
        served = cluster.served
        cluster.wait_for_replicas(2)
        alone, disturbed = prepare_streams(cluster, kit.small, 40, 150)
        kinds = iter([RANK, ENGINE])

        def kill() -> None:
            cluster.wait_for_replicas(2)
            victims = find_children(next(kinds), served.process.pid, recursive=True)
            next(iter(victims)).send_signal(signal.SIGKILL)

        read_while(disturbed, alone.num_chunks, (0.1, 0.3), kill)
        check_equal(cluster, alone, disturbed)
        cluster.wait_for_replicas(2)
        report("40 streams over 2 replicas of 2 ranks on Ray: a rank and an engine killed, all equal")


@pytest.mark.soak
def test_streams_survive_the_loss_of_postgresql_redis_and_engines_meanwhile(
    kit: Kit,
    tmp_path: Path,
    postgresql_server: PostgresqlServer,
    make_redis: type[RedisServer],
    report: Callable[[str], None],
) -> None:
    database, redis_server = postgresql_server.make_database(), make_redis(*DURABLE)
    flags = ("--replicas", "2", "--database", database, "--store", redis_server.tcp_url)
    with deployed(kit.base, tmp_path / "data", *flags) as cluster:
        served = cluster.served
        cluster.wait_for_replicas(2)
        alone, disturbed = prepare_streams(cluster, kit.small, 40, 300)
        # The server knows the key before its database is lost.
        with served.client(disturbed.key) as client:
            assert client.get("/v1/models").status_code == 200

        def kill_engine() -> None:
            cluster.engines()[0].kill()

        losses = (
            postgresql_server.kill,
            kill_engine,
            postgresql_server.start,
            redis_server.kill,
            kill_engine,
        )
        acts = iter([*losses, redis_server.start])
        read_while(disturbed, alone.num_chunks, (0.1, 0.2, 0.4, 0.45, 0.5, 0.7), lambda: next(acts)())
        assert next(acts, None) is None, "the streams ended before the last act"
        check_equal(cluster, alone, disturbed, database)
        cluster.wait_for_replicas(2)
        report("40 streams over 2 replicas on Ray: PostgreSQL, Redis and an engine meanwhile lost, all equal")
