"""Starts the engine and the loader as child processes, and starts them again when they die.

A child lives exactly as long as we hold the other end of its standard input: however this process ends, kill -9
included, the children read end-of-file and go. Their logs go to our standard error.

Knows nothing of what the children do; whether the engine answers is the engine client's business.
"""

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slora.errors import SloraError

__all__ = ["Child", "ChildRefused", "Supervisor"]

logger = logging.getLogger(__name__)

# The first restart is at once: whoever waits for an engine waits for its model to load anyway.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
# A child that lived this long did start; its next death is a new story.
_HEALTHY_S = 30.0
_STOP_S = 10.0
# What children must not have: theirs is the work, not the authority.
_SECRETS = ("SLORA_ADMIN_KEY", "SLORA_API_KEY", "SLORA_REDIS", "SLORA_STORE")
# What a child exits with when its configuration can never work, as argparse does.
_REFUSED_EXIT = 2


class ChildRefused(SloraError):
    """A child says that what it was told to run cannot work; starting it again would not help."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process: a name for logs, and the module and arguments that make it."""

    name: str
    module: str
    arguments: Sequence[str]


class Supervisor:
    """`run` keeps the children alive until it is cancelled. pids: of the children that live now, by name."""

    def __init__(self, children: Sequence[Child], on_restart: Callable[[str], None]) -> None:
        self.pids: dict[str, int] = {}
        self._children = children
        self._on_restart = on_restart

    async def run(self) -> None:
        """Raises ChildRefused when a child cannot work as configured; the others are stopped then."""
        tasks = [asyncio.create_task(self._keep_alive(child)) for child in self._children]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_alive(self, child: Child) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            started_at = time.monotonic()
            exit_code = await self._run_once(child)
            if exit_code == _REFUSED_EXIT:
                raise ChildRefused(f"the {child.name} cannot run with these settings; its message is above")
            if time.monotonic() - started_at > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            logger.error(
                "the %s died (exit code %d); starting it again in %.1f s", child.name, exit_code, pause_s
            )
            self._on_restart(child.name)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run_once(self, child: Child) -> int:
        # A process group of its own: Ctrl-C in a terminal is for us, who then let requests finish. Not a session: to
        # each of those Linux gives the same part of the cores, however nice what runs in it is (autogroup), so a loader
        # in one of its own took a third of two cores from an engine that computes on both.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", child.module, *child.arguments,
            stdin=PIPE, stdout=sys.stderr.fileno(), process_group=0, env=_environment(),
        )  # fmt: skip
        self.pids[child.name] = process.pid
        try:
            return await process.wait()
        finally:
            del self.pids[child.name]
            await _stop(process)


def _environment() -> dict[str, str]:
    # OpenMP threads that spin while they wait take the cores from this process and from whoever else is there: with
    # other programs on the 2 cores, a decode step of 64 took 2 to 8 times longer (medians, bench of the CPU path).
    # Threads that sleep at once (OMP_WAIT_POLICY=PASSIVE) cost a quarter of the speed on free cores: a few
    # microseconds of spinning bridge the gaps within a step and nothing else. A setting of the user's wins.
    return {"GOMP_SPINCOUNT": "10000"} | {
        name: value for name, value in os.environ.items() if name not in _SECRETS
    }


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
