"""The process that inspects uploads. If it crashes or is killed, the server reports this and goes on."""

import asyncio
import gzip
import os
import resource
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft.adapter import AdapterLimits, CheckedAdapter
from slora_api.adapters.publisher import InspectionBounds, Inspector
from slora_api.core.errors import InspectionFailed
from tests.adapters.hand_made import SHAPE, make_members, write_directory
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import ask_and_leave, wait_for
from tests.support.child_processes import find_children
from tests.support.forked_program import ForkedProgram

MIB = 1 << 20


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive that takes many seconds to unpack."""
    path = tmp_path_factory.mktemp("slow") / "slow.tar.gz"
    info = tarfile.TarInfo("README.md")
    info.size = 800 * 8 * MIB
    # A gzip file may consist of several concatenated members.
    zeros = gzip.compress(bytes(8 * MIB), 1)
    path.write_bytes(gzip.compress(info.tobuf()) + zeros * 800)
    return path


def make_scratch(directory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=directory))


def inspect(directory: Path, source: Path, bounds: InspectionBounds, **limits: int) -> CheckedAdapter:
    """The result of inspecting `source`."""
    inspector = Inspector(SHAPE, AdapterLimits(**limits), bounds)
    return asyncio.run(inspector.inspect("acme", source, make_scratch(directory)))


def children() -> list[psutil.Process]:
    return find_children("inspection_process")


def test_an_upload_over_the_cpu_bound_is_refused(tmp_path: Path, slow: Path) -> None:
    # 1 s for any upload, and 1 s more for the size of this archive.
    assert (
        InspectionBounds(cpu_seconds=1, bytes_per_cpu_second=slow.stat().st_size).cpu_seconds_for(slow) == 2
    )
    bounds = InspectionBounds(cpu_seconds=1, bytes_per_cpu_second=1 << 40)
    with pytest.raises(AdapterInvalid, match="takes over 1 s of CPU time") as refused:
        inspect(tmp_path, slow, bounds, max_tensor_bytes=1 << 40)
    assert refused.value.reasons[0].code == "inspection_limit"


def test_an_upload_over_the_memory_bound_is_refused(tmp_path: Path) -> None:
    # 4 MiB of JSON. Each pair of brackets becomes an object of at least 56 bytes.
    lists = b'{"x": [' + b"[]," * ((4 * MIB - 100) // 3) + b"0]}"
    source = write_directory(tmp_path / "up", make_members() | {"tokenizer_config.json": lists})
    assert inspect(tmp_path, source, InspectionBounds()).rank == 2
    with pytest.raises(AdapterInvalid, match=f"takes over {100 * MIB} bytes of memory") as refused:
        inspect(tmp_path, source, InspectionBounds(memory_bytes=100 * MIB))
    assert refused.value.reasons[0].code == "inspection_limit"


def test_elapsed_time_without_cpu_time_does_not_refuse_an_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a valid upload that reached the wall-clock limit beside two busy programs.

    A stopped process uses no CPU time, like a process that waits for a CPU.
    """
    source = write_directory(tmp_path / "up", make_members())
    bounds = InspectionBounds(cpu_seconds=2)
    inspector = Inspector(SHAPE, AdapterLimits(), bounds)
    start, started = asyncio.create_subprocess_exec, list[int]()

    async def start_and_stop(*arguments: str, **options: Any) -> Any:
        process = await start(*arguments, **options)
        os.kill(process.pid, signal.SIGSTOP)
        started.append(process.pid)
        return process

    async def stop_and_go_on() -> CheckedAdapter:
        task = asyncio.create_task(inspector.inspect("acme", source, make_scratch(tmp_path)))
        await asyncio.sleep(1.5)
        while not started:
            await asyncio.sleep(0.005)
        # A busy machine may run the whole inspection before it is stopped.
        with suppress(ProcessLookupError):
            os.kill(started[0], signal.SIGCONT)
        return await task

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_stop)
    # On an idle machine, an inspection takes less than a second.
    assert bounds.wall_time_factor * bounds.cpu_seconds_for(source) >= 120
    assert asyncio.run(stop_and_go_on()).rank == 2


def test_a_tenant_with_many_uploads_does_not_hold_up_another(tmp_path: Path, slow: Path) -> None:
    limits = AdapterLimits(max_tensor_bytes=1 << 40)
    inspector = Inspector(SHAPE, limits, InspectionBounds(cpu_seconds=600))
    honest = write_directory(tmp_path / "up", make_members())

    async def run(tenant: str, source: Path) -> int:
        return (await inspector.inspect(tenant, source, make_scratch(tmp_path))).rank

    async def main() -> None:
        hostile = [asyncio.create_task(run("hostile", slow)) for _ in range(6)]
        while len(children()) < 2:
            await asyncio.sleep(0.01)
        seen = {child.pid for child in children()}
        assert await run("honest", honest) == 2
        # The hostile tenant's waiting inspections were never started. They end with their clients.
        assert {child.pid for child in children()} <= seen
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        assert children() == []

    asyncio.run(main())


def test_an_inspection_that_hangs_is_ended(tmp_path: Path, slow: Path) -> None:
    with pytest.raises(InspectionFailed, match=r"did not finish within 0.5 s"):
        inspect(
            tmp_path,
            slow,
            InspectionBounds(cpu_seconds=10, bytes_per_cpu_second=1 << 40, wall_time_factor=0.05),
            max_tensor_bytes=1 << 40,
        )
    assert children() == []


@pytest.fixture
def killer() -> Iterator[None]:
    """Kills the first inspection process that it sees."""
    over = threading.Event()

    def crash() -> None:
        while not over.is_set():
            for child in children():
                os.kill(child.pid, signal.SIGSEGV)
                return

    thread = threading.Thread(target=crash)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("killer")
def test_an_inspection_that_crashes_is_a_503_and_the_next_upload_succeeds(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")]), InspectionBounds()) as platform:
        key = platform.key("crash")
        crashed = platform.upload(key, "a")
        error = crashed.json()["error"]
        assert (crashed.status_code, error["code"]) == (503, "inspection_failed")
        assert "SIGSEGV" in error["message"] and crashed.headers["Retry-After"]
        assert platform.upload(key, "a").status_code == 201


def test_a_client_that_disconnects_ends_its_inspection(tmp_path: Path, slow: Path) -> None:
    bounds = InspectionBounds(cpu_seconds=600)
    with running_platform(
        tmp_path, ScriptedEngine([deltas_of(b"ok")]), bounds, max_upload_bytes=1 << 40
    ) as platform:
        key = platform.key("impatient")
        content = {"data": {"name": "slow"}, "files": {"archive": ("a.tar.gz", slow.read_bytes())}}
        ask_and_leave(platform.api(key), "/v1/adapters", lambda: bool(children()), **content)
        # The whole inspection would take minutes.
        wait_for(lambda: not children() or None)
        assert platform.upload(key, "fine").status_code == 201
        assert not any((platform.directory / "quarantine").iterdir())


# Inspects the archive named in argv, and prints the pid of the inspection process.
SERVER = """
import asyncio, sys
from pathlib import Path
import psutil
from slora_adapters.peft.adapter import AdapterLimits
from slora_api.adapters.publisher import InspectionBounds, Inspector
from tests.adapters.hand_made import SHAPE

async def run():
    inspector = Inspector(SHAPE, AdapterLimits(max_tensor_bytes=1 << 40), InspectionBounds())
    await inspector.inspect("acme", Path(sys.argv[2]), Path(sys.argv[1]))

async def main():
    task = asyncio.create_task(run())
    while not (found := psutil.Process().children()):
        await asyncio.sleep(0.001)
    print(found[0].pid, flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["as it starts", "at work"])
def test_an_inspection_ends_when_its_server_is_killed(tmp_path: Path, slow: Path, when: str) -> None:
    # The inspection is a program of its own, which must find slora.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ForkedProgram(SERVER, tmp_path, slow, environment=environment) as server:
        inspection = psutil.Process(int(server.output.readline()))
        while when == "at work" and inspection.rlimit(resource.RLIMIT_DATA)[0] < 0:
            time.sleep(0.01)
        server.kill()
    # Without the kill, the inspection would need many more seconds of CPU time.
    with suppress(psutil.NoSuchProcess):
        while inspection.status() != psutil.STATUS_ZOMBIE:
            assert sum(inspection.cpu_times()[:2]) < 5
            time.sleep(0.02)


def test_an_inspection_runs_within_its_bounds_and_without_the_servers_secrets(
    tmp_path: Path, slow: Path, set_variables: Callable[..., None]
) -> None:
    set_variables(SLORA_ADMIN_KEY="secret")
    limits = AdapterLimits(max_tensor_bytes=1 << 40)
    bounds = InspectionBounds(memory_bytes=300 * MIB, cpu_seconds=50, bytes_per_cpu_second=1 << 40)
    inspector = Inspector(SHAPE, limits, bounds)

    async def look() -> tuple[dict[str, str], list[tuple[int, int]], int]:
        task = asyncio.create_task(inspector.inspect("acme", slow, make_scratch(tmp_path)))
        try:
            while not (found := children()) or found[0].rlimit(resource.RLIMIT_DATA)[0] < 0:
                await asyncio.sleep(0.01)
            kinds = (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_CORE)
            return found[0].environ(), [found[0].rlimit(kind) for kind in kinds], found[0].nice()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    environment, seen, nice = asyncio.run(look())
    assert not any(name.startswith("SLORA_") for name in environment)
    assert seen == [(300 * MIB, 300 * MIB), (50, 55), (0, 0)] and nice >= 10
