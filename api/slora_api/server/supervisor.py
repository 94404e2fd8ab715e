"""Starts the engine and the loader as child processes, and starts them again when they die or stall.

A child lives exactly as long as this process holds the other end of its standard input. However this process ends,
kill -9 included, the children read end-of-file and go. Their logs go to this process's standard error.

Each child shares a page of memory with the supervisor and shows there that it moves (see `watchdog`). A child that
stalls is reported at once, which fails /readyz; after `restart_after_s` it is killed and started again. Its clients
see the end of its socket then.

A child that can never work is not started again. It says so by its exit code, or it dies a few times without ever
having been ready; the server ends with the reason then.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slora.errors import SloraError
from slora_adapters.heartbeat import HeartbeatPage
from slora_api.server.watchdog import Watchdog

__all__ = ["Child", "ChildRefused", "Supervisor"]

logger = logging.getLogger(__name__)

# The first restart is immediate, because requests wait for the model to load anyway.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
# A child that lived this long had started; its next death begins a new series.
_HEALTHY_S = 30.0
_STOP_S = 10.0
_POLL_S = 0.25
# Exit code of a child whose configuration can never work, as of argparse.
_REFUSED_EXIT = 2
# Exit code of a child that something outside keeps from starting, such as a store that does not answer yet.
_TRY_LATER_EXIT = os.EX_TEMPFAIL
# A model that crashes while it starts crashes each time; a second and third try cover an accident of the machine.
_MOST_FAILED_STARTS = 3


class ChildRefused(SloraError):
    """A child cannot work with this model or these settings; starting it again would not help."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process: a name for logs, the module and arguments that make it, and its whole environment.

    waits_for_others: see `Watchdog`.
    """

    name: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    waits_for_others: bool = False


@dataclass(frozen=True, slots=True)
class _Death:
    """exit_code: negative for a signal. reason: the child's own words, or empty."""

    exit_code: int
    reason: str
    was_ready: bool

    def __str__(self) -> str:
        how = f"exit code {self.exit_code}" if self.exit_code >= 0 else _name_signal(-self.exit_code)
        return f"{how}: {self.reason}" if self.reason else f"{how}; its messages are in the log above"


class Supervisor:
    """`run` keeps the children alive until it is cancelled. pids: of the children that live now, by name.

    stalls: filled with a sentence about each child that makes no progress, by name. on_restart: called with the name of
    a child that died.
    """

    def __init__(
        self,
        children: Sequence[Child],
        restart_after_s: float,
        stalls: dict[str, str],
        on_restart: Callable[[str], None],
    ) -> None:
        self.pids: dict[str, int] = {}
        self._children = children
        self._restart_after_s = restart_after_s
        self._stalls = stalls
        self._on_restart = on_restart

    async def run(self) -> None:
        """Raises ChildRefused when a child can never work; the others are stopped then."""
        tasks = [asyncio.create_task(self._keep_alive(child)) for child in self._children]
        try:
            # Not gather: it ends with the first task that is cancelled, and a second cancellation would then leave the
            # other child before it has ended.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_alive(self, child: Child) -> None:
        pause_s = _FIRST_PAUSE_S
        was_ever_ready, num_failed_starts = False, 0
        while True:
            started_at = time.monotonic()
            death = await self._run_once(child)
            was_ever_ready |= death.was_ready
            num_failed_starts += death.exit_code != _TRY_LATER_EXIT
            if death.exit_code == _REFUSED_EXIT:
                raise ChildRefused(f"the {child.name} refuses to start with {death}")
            if not was_ever_ready and num_failed_starts >= _MOST_FAILED_STARTS:
                raise ChildRefused(
                    f"the {child.name} died {num_failed_starts} times before it was ready, the last time with {death}"
                )
            if time.monotonic() - started_at > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            logger.error("the %s died with %s; starting it again in %.1f s", child.name, death, pause_s)
            self._on_restart(child.name)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run_once(self, child: Child) -> _Death:
        page = HeartbeatPage.create()
        try:
            process = await _start(child, page)
            self.pids[child.name] = process.pid
            watching = asyncio.create_task(self._watch(child, process, page))
            try:
                exit_code = await process.wait()
                return _Death(exit_code, page.reason, page.read().is_serving)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                is_stalled = self._stalls.pop(child.name, None) is not None
                del self.pids[child.name]
                await _stop(process, 0 if is_stalled else _STOP_S)
        finally:
            page.close()

    async def _watch(self, child: Child, process: Process, page: HeartbeatPage) -> None:
        """Reports a stall as long as it lasts, and kills the child when that is too long."""
        watchdog = Watchdog(self._restart_after_s, child.waits_for_others)
        looked_at = time.monotonic()
        while not watchdog.is_hopeless:
            await asyncio.sleep(_POLL_S)
            now = time.monotonic()
            # When this process was held up itself, the time proves nothing about the child.
            watchdog.observe(page.read(), min(now - looked_at, 2 * _POLL_S))
            looked_at = now
            if watchdog.is_stalled:
                if child.name not in self._stalls:
                    logger.warning("the %s makes no progress", child.name)
                self._stalls[child.name] = (
                    f"the {child.name} makes no progress; it is started again if that lasts longer than "
                    f"{self._restart_after_s:g} s"
                )
            elif self._stalls.pop(child.name, None) is not None:
                logger.warning("the %s makes progress again", child.name)
        logger.error(
            "the %s (process %d) made no progress for %.0f s (--stall-seconds): killing it",
            child.name, process.pid, max(watchdog.stuck_s, watchdog.incomplete_s),
        )  # fmt: skip
        process.kill()
        await asyncio.Event().wait()  # the stall stays reported until the process is gone


async def _start(child: Child, page: HeartbeatPage) -> Process:
    # A process group of its own: Ctrl-C in a terminal is for this process, which then lets requests finish. Not a
    # session: Linux gives each session the same part of the cores, however nice its processes are (autogroup). A loader
    # in its own session took a third of two cores from an engine that computes on both.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", child.module, *child.arguments, "--heartbeat", str(page.descriptor),
        stdin=PIPE, stdout=sys.stderr.fileno(), process_group=0, env=dict(child.environment),
        pass_fds=(page.descriptor,),
    )  # fmt: skip


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


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
