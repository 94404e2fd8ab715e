"""The thread that owns the engine: takes commands from an inbox, steps while there is work, hands out what comes.

Knows no socket. Everything that touches the engine happens on this one thread.
"""

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass

from slora.adapter_place import AdapterPlace
from slora.engine.engine import Engine
from slora.engine.info import EngineStats
from slora.engine.pin import Pin
from slora.errors import RequestRefused
from slora.request import EngineRequest, StepOutput
from slora.tenant_share import TenantShare
from slora_adapters.heartbeat import Progress
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

# How long the engine is idle before it proves that no page was lost. The proof walks every page, so a request that
# comes right behind another must not wait for it.
_IDLE_BEFORE_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """One choice of a request, or all of it."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Forget:
    version: AdapterVersion


@dataclass(frozen=True, slots=True)
class SetPins:
    pins: list[Pin]


@dataclass(frozen=True, slots=True)
class Prewarm:
    """`answer` is called on the engine's thread."""

    version: AdapterVersion
    share: TenantShare
    answer: Callable[[AdapterPlace], None]


@dataclass(frozen=True, slots=True)
class AskStats:
    """`answer` is called on the engine's thread."""

    answer: Callable[[EngineStats], None]


@dataclass(frozen=True, slots=True)
class Wake:
    """Something outside the inbox happened (an adapter arrived)."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Add | Abort | Forget | SetPins | Prewarm | AskStats | Wake | Stop


class EngineWorker:
    """`deliver` is called on the engine's thread with the outputs of each step; it must not block."""

    def __init__(self, deliver: Callable[[list[StepOutput]], None]) -> None:
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deliver = deliver
        # Written by the engine's thread, read by others.
        self._num_completed = 0
        self._is_idle = False

    def post(self, command: Command) -> None:
        """From any thread."""
        self._inbox.put(command)

    def measure(self) -> Progress:
        """Steps and commands so far, and whether there is work now. From any thread."""
        return Progress(self._num_completed, not self._is_idle or not self._inbox.empty())

    def run(self, engine: Engine) -> None:
        """Serves until `Stop`. Raises AssertionError if pages were lost: then nothing here can be trusted."""
        checked = True
        while True:
            self._num_completed += 1
            command = self._next(engine, waiting_s=None if checked else _IDLE_BEFORE_CHECK_S)
            if command is None and not engine.has_work:
                if not checked:
                    engine.check()
                    checked = True
                continue
            while command is not None:
                if isinstance(command, Stop):
                    return
                self._obey(command, engine)
                command = None if self._inbox.empty() else self._inbox.get()
            outputs = engine.step()
            checked = False
            if outputs:
                self._deliver(outputs)

    def _next(self, engine: Engine, waiting_s: float | None) -> Command | None:
        """The next command; None when there is work to do instead, or nothing came for `waiting_s`, or before
        something is due."""
        due_s = engine.next_due_in_s
        if due_s is not None:
            waiting_s = due_s if waiting_s is None else min(waiting_s, due_s)
        try:
            if engine.has_work:
                return self._inbox.get_nowait()
            self._is_idle = True
            return self._inbox.get(timeout=waiting_s)
        except queue.Empty:
            return None
        finally:
            self._is_idle = False

    def _obey(self, command: Command, engine: Engine) -> None:
        match command:
            case Add(request):
                try:
                    engine.add(request)
                except RequestRefused as error:
                    self._deliver([StepOutput(request.request_id, error=error)])
            case Abort(request_id, index):
                engine.abort(request_id, index)
            case Forget(version):
                engine.forget(version)
            case SetPins(pins):
                engine.set_pins(pins)
            case Prewarm(version, share, tell_place):
                tell_place(engine.prewarm(version, share))
            case AskStats(answer):
                answer(engine.stats())
