"""Starts child processes, such as the engine and the loader, and restarts them when they die or stall.

This process holds the other end of each child's standard input. However this process ends, even by kill -9, the
children read end-of-file and exit. They log to this process's standard error.

Each child shares a page of memory with the supervisor and writes its heartbeat there. When the watchdog finds a stall,
/readyz fails. If the stall lasts for `restart_after_s`, the child is killed and restarted. The clients of the child
then see their sockets close.

A child that can never work is not restarted: the server exits with the reason. A child can never work if its exit code
says so, or if it dies several times before it was ever ready.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from slora.core.errors import SloraError
from slora_adapters.process.heartbeat import HeartbeatPage
from slora_adapters.process.shortage import find_shortage
from slora_api.serve.run_queue import RunQueue
from slora_api.serve.watchdog import Watchdog

logger = logging.getLogger(__name__)

# The first restart is almost immediate, because requests wait until the model is loaded again.
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0
# If a child has lived this long, the pause before its next restart is the shortest one again.
_HEALTHY_S = 30.0
_STOP_S = 10.0
_POLL_S = 0.25
# Exit code of a child whose configuration can never work. argparse uses the same code.
_REFUSED_EXIT = 2
# Exit code of a child that cannot start for an external reason, such as a store that does not answer yet.
_TRY_LATER_EXIT = os.EX_TEMPFAIL
# A child that crashes while it loads the model usually crashes each time. Two more tries cover a temporary fault of the
# machine.
_MAX_FAILED_STARTS = 3


class ChildRefused(SloraError):
    """A child cannot work with this model or these settings, so restarting it would not help."""


@dataclass(frozen=True, slots=True)
class Child:
    """One child process: its name in logs, the module to run, its arguments, and its whole environment.

    waits_for_others: see `Watchdog`. descriptors: open files that it inherits. cores: those it may use; empty: all.
    """

    name: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    waits_for_others: bool = False
    descriptors: tuple[int, ...] = ()
    cores: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class _Exit:
    """The end of a child process. exit_code: negative if a signal ended it. reason: the child's own message, or
    empty.
    """

    exit_code: int
    reason: str
    was_ready: bool

    def __str__(self) -> str:
        how = f"exit code {self.exit_code}" if self.exit_code >= 0 else _name_signal(-self.exit_code)
        return f"{how}: {self.reason}" if self.reason else f"{how}; see its messages in the log above"


class Supervisor:
    """Keeps the children running until `stop` is called or `run` is cancelled.

    stalls: child name -> a sentence about its stall. The supervisor adds an entry while a child makes no progress.
    on_restart: called with the name of a child that died.
    """

    def __init__(
        self,
        children: Sequence[Child],
        restart_after_s: float,
        stalls: dict[str, str],
        on_restart: Callable[[str], None],
    ) -> None:
        self._children = children
        self._restart_after_s = restart_after_s
        self._stalls = stalls
        self._on_restart = on_restart
        self._processes: dict[str, Process] = {}
        self._stopping = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the running children, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    async def run(self) -> None:
        """Runs the children. Returns when all children have ended after `stop`. If a child can never work, stops the
        other children and raises ChildRefused.
        """
        tasks = [asyncio.create_task(self._keep_alive(child)) for child in self._children]
        try:
            # asyncio.gather would end with the first cancelled task. A second cancellation would then abandon the
            # remaining children before they have ended.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Sends SIGTERM to the children. From now on, a child that ends is not restarted."""
        self._stopping.set()
        for process in self._processes.values():
            _terminate(process)

    async def _keep_alive(self, child: Child) -> None:
        pause_s = _MIN_BACKOFF_S
        was_ever_ready, num_failed_starts = False, 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            try:
                death = await self._run_once(child)
            except (OSError, RuntimeError, MemoryError) as error:
                if (lacking := find_shortage(error)) is None:
                    raise
                death = _Exit(
                    _TRY_LATER_EXIT, f"it could not be started, because the machine lacks {lacking}", False
                )
            if self._stopping.is_set():
                return
            was_ever_ready |= death.was_ready
            num_failed_starts += death.exit_code != _TRY_LATER_EXIT
            if death.exit_code == _REFUSED_EXIT:
                raise ChildRefused(f"the {child.name} cannot start: {death}")
            if not was_ever_ready and num_failed_starts >= _MAX_FAILED_STARTS:
                raise ChildRefused(
                    f"the {child.name} died {num_failed_starts} times before it was ready, the last time with {death}"
                )
            if time.monotonic() - started_at > _HEALTHY_S:
                pause_s = _MIN_BACKOFF_S
            if death.exit_code == 0:  # An operator has sent SIGTERM to this child.
                logger.info("the %s has stopped; starting it again", child.name)
                pause_s = _MIN_BACKOFF_S
            else:
                logger.error("the %s died with %s; restarting it in %.1f s", child.name, death, pause_s)
            self._on_restart(child.name)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(2 * pause_s, _MAX_BACKOFF_S)

    async def _run_once(self, child: Child) -> _Exit:
        page = HeartbeatPage.create()
        try:
            process = await _start(child, page)
            self._processes[child.name] = process
            if self._stopping.is_set():
                _terminate(process)
            watching = asyncio.create_task(self._watch(child, process, page))
            try:
                exit_code = await process.wait()
                return _Exit(exit_code, page.reason, page.read().is_serving)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                is_stalled = self._stalls.pop(child.name, None) is not None
                del self._processes[child.name]
                # A child that is still starting has nothing to finish. It would not notice the end of its input until
                # it is ready.
                can_finish = page.read().is_serving and not is_stalled
                await _stop(process, _STOP_S if can_finish else 0)
                _kill_group(process.pid)
        finally:
            page.close()

    async def _watch(self, child: Child, process: Process, page: HeartbeatPage) -> None:
        """Reports each stall while it lasts, and kills the child if a stall lasts too long."""
        watchdog = Watchdog(self._restart_after_s, child.waits_for_others)
        run_queue = RunQueue(process.pid)
        looked_at = time.monotonic()
        while not watchdog.is_hopeless:
            await asyncio.sleep(_POLL_S)
            now = time.monotonic()
            # If this process itself was delayed, count only a part of the elapsed time. Also subtract the time for
            # which the child's threads waited for a CPU. Neither delay means that the child is stalled.
            elapsed_s = min(now - looked_at, 2 * _POLL_S)
            watchdog.observe(page.read(), max(0.0, elapsed_s - run_queue.pop_wait_s()))
            looked_at = now
            if watchdog.is_stalled:
                if child.name not in self._stalls:
                    logger.warning("the %s makes no progress", child.name)
                self._stalls[child.name] = (
                    f"the {child.name} makes no progress; it is restarted if this lasts longer than "
                    f"{self._restart_after_s:g} s"
                )
            elif self._stalls.pop(child.name, None) is not None:
                logger.warning("the %s makes progress again", child.name)
        logger.error(
            "the %s (process %d) made no progress for %.0f s (--stall-seconds): killing it",
            child.name, process.pid, max(watchdog.stuck_s, watchdog.incomplete_s),
        )  # fmt: skip
        process.kill()
        await asyncio.Event().wait()  # The stall stays reported until the process has ended.


async def _start(child: Child, page: HeartbeatPage) -> Process:
    # The child has its own process group: Ctrl-C in a terminal must reach only this process, which then lets requests
    # finish. It does not have its own session: Linux divides the cores equally among sessions, regardless of niceness
    # (autogroup). With its own session, a loader used a third of two cores that the engine needed.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", child.module, *child.arguments, "--heartbeat", str(page.descriptor),
        stdin=PIPE, stdout=sys.stderr.fileno(), process_group=0, env=dict(child.environment),
        pass_fds=(page.descriptor, *child.descriptors),
    )  # fmt: skip
    if child.cores:
        # The child has not imported torch yet. All threads that it starts later inherit the binding.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, child.cores)
    return process


def _terminate(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()


async def _stop(process: Process, grace_s: float) -> None:
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _kill_group(pid: int) -> None:
    """Kills the processes that an ended child has left in its process group.

    A tensor-parallel rank that hangs does not notice the end of its engine, and would keep the memory of its GPU.
    """
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
