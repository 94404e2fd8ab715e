"""Passes the state of the host from the main process to the API workers.

The state consists of the stalled processes, the unfinished parts of the start, and the restarts of each process.
"""

import asyncio
from collections import Counter
from typing import Any

from slora_api.completions.generation import Generator
from slora_api.core.host_board import HostBoard
from slora_api.operations.engines import Engines

_PERIOD_S = 0.1


class HostState:
    """Copies the state between the board and the `Readiness` and `Metrics` of `generator`."""

    def __init__(self, generator: Generator, engines: Engines, board: HostBoard) -> None:
        self._readiness = generator.readiness
        self._metrics = generator.metrics
        self._engines = engines
        self._board = board

    async def publish(self) -> None:
        """Writes each new state to the board, until cancelled. This runs in the main process."""
        written: dict[str, Any] = {}
        while True:
            state: dict[str, Any] = {
                "stalls": dict(self._readiness.stalls),
                "unfinished": dict(self._readiness.unfinished),
                "restarts": dict(self._metrics.restarts),
            }
            if state != written:
                self._board.write_state(state)
                written = state
            await asyncio.sleep(_PERIOD_S)

    async def follow(self) -> None:
        """Applies each new state, and reports which engines serve in this worker, until cancelled. This runs in each
        worker.
        """
        while True:
            if (state := self._board.read_state()) is not None:
                self._readiness.stalls = state["stalls"]
                self._readiness.unfinished = state["unfinished"]
                self._metrics.restarts = Counter(state["restarts"])
            self._engines.publish()
            await asyncio.sleep(_PERIOD_S)
