"""Child processes that crash, refuse to start, or hang."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from slora_adapters.process.children import ENGINE_VARIABLES, LOADER_VARIABLES, pass_on
from slora_api.processes import supervisor
from slora_api.processes.children import SANDBOXES, await_sandboxes
from slora_api.processes.supervisor import Child, ChildRefused, Supervisor
from tests.support.engine_stack import WAIT_S, wait_until

ENVIRONMENT = pass_on(os.environ, ENGINE_VARIABLES)


class SupervisedChild:
    """A supervisor of one child with the given behaviour, and the supervisor's reports."""

    def __init__(self, behaviour: str, folder: Path, restart_after_s: float = 60.0) -> None:
        self._told = folder / "told"
        self.stalls: dict[str, str] = {}
        self.restarts: list[str] = []
        child = Child("child", "tests.api.server.stubborn_child", [behaviour, str(self._told)], ENVIRONMENT)
        self.supervisor = Supervisor([child], restart_after_s, self.stalls, self.restarts.append)

    @property
    def pid(self) -> int | None:
        return self.supervisor.pids.get("child")

    async def wait_until_ready(self) -> int:
        """Waits until the supervisor can know that the child is ready. Returns the child's pid."""
        await wait_until(self._told.exists)
        self._told.unlink()
        assert self.pid is not None
        return self.pid

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.supervisor.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert self.pid is None


@pytest.fixture(autouse=True)
def _import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    folders = (root, *(root / folder for folder in ("kernels", "adapters", "api")))
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join(map(str, folders)))


@pytest.mark.parametrize(
    ("behaviour", "num_restarts", "words"),
    [
        ("2", 0, "the child cannot start: exit code 2: told to end with 2"),
        (
            "70",
            2,
            "the child died 3 times before it was ready, the last time with exit code 70: told to end with 70",
        ),
    ],
)
def test_a_child_that_cannot_start_ends_the_server_with_its_reason_and_exit_code(
    behaviour: str, num_restarts: int, words: str, tmp_path: Path
) -> None:
    """Born from a fault: a model that crashed during its start was restarted for ever."""
    watched = SupervisedChild(behaviour, tmp_path)
    with pytest.raises(ChildRefused) as refused:
        asyncio.run(watched.supervisor.run())
    assert str(refused.value) == words
    assert watched.restarts == ["child"] * num_restarts


def test_a_child_whose_store_does_not_answer_yet_is_restarted_until_it_does(tmp_path: Path) -> None:
    watched = SupervisedChild(str(os.EX_TEMPFAIL), tmp_path)

    async def main() -> None:
        async with watched.running():
            await wait_until(lambda: len(watched.restarts) > 3)

    asyncio.run(main())


def test_a_child_that_was_ready_once_is_always_restarted(tmp_path: Path) -> None:
    watched = SupervisedChild("idle", tmp_path)

    async def main() -> None:
        async with watched.running():
            os.kill(await watched.wait_until_ready(), signal.SIGKILL)
            for number in range(1, 4):
                await wait_until(lambda number=number: len(watched.restarts) == number)  # type: ignore[misc]
                await wait_until(lambda: watched.pid is not None)
                os.kill(watched.pid or 0, signal.SIGKILL)

    asyncio.run(main())


def test_a_child_that_still_starts_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_S", 3600.0)
    watched = SupervisedChild("starts", tmp_path)

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), watched.running():
            await watched.wait_until_ready()

    asyncio.run(main())


def test_the_processes_that_a_child_leaves_behind_are_killed(tmp_path: Path) -> None:
    """Otherwise a stopped tensor-parallel rank would outlive its engine, and keep the memory of its GPU."""
    watched = SupervisedChild("parent", tmp_path)

    async def main() -> None:
        async with watched.running():
            pid = await watched.wait_until_ready()
            left = psutil.Process(int((tmp_path / "child").read_text(encoding="utf-8")))
            os.kill(pid, signal.SIGKILL)
            await wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)

    asyncio.run(main())


def test_a_stop_while_an_ended_child_is_cleaned_up_after_kills_what_it_left(tmp_path: Path) -> None:
    """Born from a fault: the stop cancelled the clean-up."""
    watched = SupervisedChild("parent", tmp_path)

    async def main() -> None:
        async with watched.running():
            pid = await watched.wait_until_ready()
            os.kill(pid, signal.SIGKILL)
            while not any(task.cancelling() for task in asyncio.all_tasks()):
                await asyncio.sleep(0)
        left = int((tmp_path / "child").read_text(encoding="utf-8"))
        await wait_until(
            lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
        )

    asyncio.run(main())


def test_a_child_whose_worker_thread_hangs_is_reported_then_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket thread still answers."""
    monkeypatch.setattr(supervisor, "STALLED_AFTER_S", 1.5)
    watched = SupervisedChild("hangs", tmp_path, restart_after_s=2.0)

    async def main() -> None:
        async with watched.running():
            first = await watched.wait_until_ready()
            await wait_until(lambda: "child" in watched.stalls)
            assert "the child makes no progress" in watched.stalls["child"] and not watched.restarts
            await wait_until(lambda: watched.pid not in (None, first))
            assert watched.restarts == ["child"] and not watched.stalls

    asyncio.run(main())


def test_a_server_is_not_ready_before_its_sandboxes_can_import_what_they_need(
    tmp_path: Path, set_variables: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    set_variables(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    broken = tmp_path / "jinja2.py"
    broken.write_text("raise ImportError('the package of this user is missing')", encoding="utf-8")
    unfinished = {SANDBOXES: "not tried yet"}

    async def try_and_mend() -> None:
        trying = asyncio.create_task(await_sandboxes(unfinished, pause_s=0.01))
        while "the package of this user is missing" not in unfinished[SANDBOXES]:
            await asyncio.sleep(0.01)
        broken.unlink()
        await trying

    asyncio.run(try_and_mend())
    assert not unfinished and "the package of this user is missing" in caplog.text


def test_children_get_only_the_variables_that_they_need() -> None:
    """Born from a fault: children received a setting that has a password in its URL."""
    secrets = {
        "SLORA_DATABASE": "postgresql://u:secret@host/n",
        "SLORA_ADMIN_KEY": "k",
        "DATABASE_PASSWORD": "p",
    }
    cloud = {"AWS_SECRET_ACCESS_KEY": "a", "FSSPEC_S3_ENDPOINT_URL": "https://minio", "HTTPS_PROXY": "p"}
    harmless = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0", "LC_ALL": "C"}
    environment = secrets | cloud | harmless
    defaults = pass_on({}, ENGINE_VARIABLES)
    assert {"LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"} == set(defaults)
    assert pass_on(environment, ENGINE_VARIABLES) == harmless | defaults
    assert pass_on(environment, LOADER_VARIABLES) == harmless | cloud | defaults
    assert (
        pass_on({"OCI_KEY": "o", "OTHER": "x"}, (*LOADER_VARIABLES, "OCI_*")) == {"OCI_KEY": "o"} | defaults
    )
    chosen = {"GOMP_SPINCOUNT": "1", "LRU_CACHE_CAPACITY": "32", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
    assert pass_on(chosen, ENGINE_VARIABLES) == chosen
