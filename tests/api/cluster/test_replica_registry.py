"""Which replicas count as alive, how an API process follows them, and how many the load needs."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slora.client.replica_group import ReplicaGroup
from slora.core.engine_address import TcpAddress
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion
from slora_api.cluster.deployment import AdapterRequestRouter
from slora_api.cluster.replica import PRESSURE, choose_num_replicas, measure_pressure
from slora_api.cluster.replica_registry import Sightings
from slora_api.processes.replica_list import ListedReplica, ReplicaList, ReplicaListFiles, write_replicas
from tests.support.clock import Clock

SECRET = b"s" * 64
A, B = ListedReplica("a", "127.0.0.1", 1, "v1"), ListedReplica("b", "127.0.0.1", 2, "v1")


def test_a_replica_whose_entry_no_longer_changes_is_lost() -> None:
    clock = Clock(100.0)
    sightings = Sightings(clock)
    assert sightings.select_alive([(A, 7), (B, 1)]) == [A, B]
    clock.now += 14
    assert sightings.select_alive([(A, 7), (B, 2)]) == [A, B]
    clock.now += 2
    assert sightings.select_alive([(A, 7), (B, 2)]) == [B]
    assert sightings.select_alive([(A, 8), (B, 2)]) == [A, B]
    assert sightings.select_alive([(B, 3)]) == [B]


class Group(ReplicaGroup):
    """Counts what is added and removed."""

    def __init__(self) -> None:
        super().__init__((), 0)
        self.calls: list[object] = []

    def add(self, name: str, address: Any) -> None:
        self.calls.append((name, address))
        super().add(name, address)

    def remove(self, name: str) -> None:
        self.calls.append(name)
        super().remove(name)


def test_an_api_process_adds_and_removes_engines_as_the_file_lists_them(tmp_path: Path) -> None:
    files = ReplicaListFiles(tmp_path / "replicas.json", tmp_path / "secret")
    files.secret.write_bytes(SECRET + b"\n")
    group = Group()

    async def main() -> None:
        replicas = ReplicaList(files, group)
        replicas.apply()
        assert not group.calls
        write_replicas(files.replicas, [B, A])
        replicas.apply()
        replicas.apply()
        added = [(one.name, TcpAddress(one.host, one.port, SECRET)) for one in (A, B)]
        assert group.calls == added
        stalled = ListedReplica("a", "127.0.0.1", 1, "v1", is_stalled=True)
        moved = ListedReplica("b", "127.0.0.1", 3, "v2")
        write_replicas(files.replicas, [stalled, moved])
        replicas.apply()
        assert group.calls[2:] == ["b", ("b", TcpAddress("127.0.0.1", 3, SECRET))]
        assert replicas.stalled == {"a"}
        write_replicas(files.replicas, [])
        replicas.apply()
        assert group.calls[4:] == ["a", "b"] and not group.health

    asyncio.run(main())


def test_the_last_list_stays_in_use_when_the_file_is_gone(tmp_path: Path) -> None:
    files = ReplicaListFiles(tmp_path / "replicas.json", tmp_path / "secret")
    files.secret.write_bytes(SECRET)
    group = Group()

    async def main() -> None:
        replicas = ReplicaList(files, group)
        write_replicas(files.replicas, [A])
        replicas.apply()
        files.replicas.unlink()
        replicas.apply()
        assert set(group.health) == {"a"}

    asyncio.run(main())


def stats(**counts: int) -> Any:
    defaults = {"running": 0, "waiting": 0, "awaiting_adapter": 0, "pages_held": 0, "pages_total": 1000}
    return SimpleNamespace(**defaults | counts)


def test_the_pressure_is_the_larger_of_pool_and_queue_divided_by_the_target() -> None:
    assert measure_pressure(stats(pages_held=400), 256) == pytest.approx(0.8)
    assert measure_pressure(stats(pages_held=400, running=256, waiting=44), 256) == pytest.approx(
        2.34, abs=0.01
    )
    assert measure_pressure(stats(awaiting_adapter=128), 256) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("pressures", "current", "expected"),
    [
        ([1.0, 1.0], 2, 2),
        ([1.8, 1.8], 2, 4),
        ([0.2, 0.2, 0.2], 3, 1),
        ([0.0], 1, 1),
        ([1.5], 2, 3),
        ([], 2, 2),
    ],
)
def test_as_many_replicas_are_wanted_as_bring_each_to_the_target(
    pressures: list[float], current: int, expected: int
) -> None:
    metrics = {PRESSURE: dict(enumerate(pressures))}
    context: Any = SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=current, target_num_replicas=2
    )
    assert choose_num_replicas(context)[0] == expected


def test_requests_by_handle_go_to_the_replica_that_has_their_adapter() -> None:
    router = AdapterRequestRouter.__new__(AdapterRequestRouter)  # Ray's constructor needs a cluster.
    router.initialize_state()
    adapter = AdapterVersion("acme", "d1")

    def replica(name: str, **report: Any) -> Any:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=report)

    busy = replica("a", resident=[["acme", "d1"]], running=1, waiting=0)
    replicas: list[Any] = [busy, replica("b", resident=[], running=0, waiting=0), replica("c")]
    request = EngineRequest("r", "acme", [1], single_adapter(adapter), SamplingParams(max_tokens=1))
    ranked = asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=[request])))  # type: ignore[arg-type]
    assert ranked[0] == [busy] and len(ranked) == 3
    other = asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=[])))  # type: ignore[arg-type]
    assert other[0] != [busy]
