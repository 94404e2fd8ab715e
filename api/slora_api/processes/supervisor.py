"""Starts child processes, such as the engine and the loader, and restarts them when they die or stall.

This process holds the other end of each child's standard input. However this process ends, even by kill -9, the
children read end-of-file and exit. They log to this process's standard error.

Each child shares a page of memory with the supervisor and writes its heartbeat there. When the watchdog finds a stall,
/readyz fails. If the stall lasts for `restart_after_s`, the child is killed and restarted. The clients of the child
then see their sockets close.

A child that can never work is not restarted: the server exits with the reason. A child can never work if its exit code
says so, or if it dies several times before it was ever ready.

The watchdog decides from the heartbeats of a child whether the child is stalled. A child makes progress in three
cases: it completes units of work (engine steps, pieces of adapters), it has no work, or its working threads use CPU
time. CPU time distinguishes a slow step on a busy CPU from a hang: a process that waits for a hung device, or that is
stopped, uses no CPU time. CPU time alone counts as progress only for a limited time, because an endless loop also
uses CPU time.

A child that is still starting never counts as stalled, because reading weights and compiling kernels may take any time.
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
from pathlib import Path

from slora.core.errors import SloraError
from slora_adapters.process.children import describe_exit
from slora_adapters.process.heartbeat import Beat, HeartbeatPage
from slora_adapters.process.shortage import find_shortage

logger = logging.getLogger(__name__)

# The first restart is almost immediate, because requests wait until the model is loaded again.
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0
# If a child has lived this long, the pause before its next restart is the shortest one again.
_HEALTHY_S = 30.0
STOP_S = 10.0
_POLL_S = 0.25
# Exit code of a child whose configuration can never work. argparse uses the same code.
_REFUSED_EXIT = 2
# Exit code of a child that cannot start for an external reason, such as a store that does not answer yet.
_TRY_LATER_EXIT = os.EX_TEMPFAIL
# A child that crashes while it loads the model usually crashes each time. Two more tries cover a temporary fault of the
# machine.
_MAX_FAILED_STARTS = 3

# /readyz fails within 5 s of a stall: this time, one heartbeat, one poll, and a margin for a busy machine.
STALLED_AFTER_S = 3.0

# The minimum share of its time that a computing process spends on a CPU, even if it gets only a tenth of a core. An
# idle process spends far less.
_LEAST_CPU_SHARE = 0.01

# A child may use CPU time without completing any work for this many times `restart_after_s`.
_COMPUTING_PATIENCE = 10

_NO_BEAT = Beat(0, is_serving=False, is_busy=False, num_completed=0, computing_us=0)


@dataclass(slots=True)
class Watchdog:
    """Decides whether one child is stalled.

    restart_after_s: how long a stall may last.
    waits_for_others: whether the child's work may wait for a store. Such a child is stalled after STALLED_AFTER_S
    without a heartbeat, or after restart_after_s without progress.
    silent_s: seconds since the last heartbeat.
    stuck_s: seconds since the child last made progress.
    incomplete_s: seconds since the child last completed a unit of work or had no work.
    """

    restart_after_s: float
    waits_for_others: bool = False
    silent_s: float = 0.0
    stuck_s: float = 0.0
    incomplete_s: float = 0.0
    _last: Beat = _NO_BEAT
    _computing_us: int = 0  # The CPU time when the child last made progress.

    @property
    def is_stalled(self) -> bool:
        return (
            self.silent_s if self.waits_for_others else self.stuck_s
        ) > STALLED_AFTER_S or self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """Whether the child must be killed and restarted."""
        patience_s = _COMPUTING_PATIENCE * self.restart_after_s
        return self.stuck_s > self.restart_after_s or self.incomplete_s > patience_s

    def observe(self, beat: Beat, elapsed_s: float) -> None:
        """Updates the times of this watchdog from the content of the heartbeat page. elapsed_s: seconds since the last
        call.
        """
        is_fresh, last, self._last = beat.number != self._last.number, self._last, beat
        self.silent_s = 0.0 if is_fresh else self.silent_s + elapsed_s
        self.stuck_s += elapsed_s
        self.incomplete_s += elapsed_s
        has_completed = is_fresh and (not beat.is_busy or beat.num_completed != last.num_completed)
        if has_completed or not beat.is_serving:
            self.incomplete_s = 0.0
        computed_s = 1e-6 * (beat.computing_us - self._computing_us)
        if self.incomplete_s == 0.0 or (is_fresh and computed_s > _LEAST_CPU_SHARE * self.stuck_s):
            self.stuck_s = 0.0
            self._computing_us = beat.computing_us
        if not beat.is_serving:
            self.silent_s = 0.0


class RunQueue:
    """Measures the CPU waits of one process. `pop_wait_s` returns 0 if the kernel does not count waits, or if the
    process has ended.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._waited_ns = self._read()

    def pop_wait_s(self) -> float:
        """Returns the longest time, in seconds, that any one thread has waited since the last call."""
        last, self._waited_ns = self._waited_ns, self._read()
        waits = (waited - last.get(thread, waited) for thread, waited in self._waited_ns.items())
        return max(waits, default=0) / 1e9

    def _read(self) -> dict[str, int]:
        """Returns the nanoseconds that each thread has waited so far. A wait is counted when it ends."""
        waited: dict[str, int] = {}
        try:
            for task in self._tasks.iterdir():
                waited[task.name] = int((task / "schedstat").read_text(encoding="utf-8").split()[1])
        except (OSError, ValueError, IndexError):
            return waited
        return waited


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
        how = describe_exit(self.exit_code)
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
                is_stalled = self._stalls.pop(child.name, None) is not None
                del self._processes[child.name]
                # A child that is still starting has nothing to finish. It would not notice the end of its input until
                # it is ready.
                can_finish = page.read().is_serving and not is_stalled
                try:
                    await _stop(process, STOP_S if can_finish else 0)
                finally:
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
