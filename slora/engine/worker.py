"""The thread that owns the engine.

It takes commands from an inbox, runs steps while there is work, and delivers the outputs. All calls to the engine
happen on this one thread. Sockets are outside this module.
"""

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from slora.core.engine_state import REPORT_S, EngineReport, ServiceSpan
from slora.core.errors import RequestRefused
from slora.core.messages import (
    Abort,
    Add,
    Command,
    Observe,
    Prewarm,
    PurgeTenant,
    RemoveAdapter,
    SetPins,
)
from slora.core.request import EndedRequest, RequestUsage, StepOutput
from slora.engine.engine import Engine
from slora_adapters.process.heartbeat import WorkProgress

# A command, and what is called with its result.
_Posted = tuple["Command | Wake | Stop", Callable[[Any], None]]
# Seconds of idle time before the engine checks that no page was lost. The check walks every page, so it must not delay
# a request that closely follows another.
_IDLE_BEFORE_CHECK_S = 1.0
# The most frames of other engines' service that are kept until the next step. Later frames include what is dropped.
_MAX_ELSEWHERE = 256


class Wake:
    """Wakes the thread after an event outside the inbox, such as the arrival of an adapter or a grammar."""


class Stop:
    """Ends the thread."""


def _ignore(result: object) -> None:
    pass


class EngineWorker:
    """Owns the engine's loop and its inbox.

    deliver: called on the engine's thread with the outputs of each step, and with the usage of each request that has
        ended since the last call. A request's usage comes with its last output. `deliver` must not block.
    tell_begun: see `Engine.step`. It is called on the engine's thread, and must not block.
    tell_report: called in the same way with a report each `REPORT_S`, and not while nothing changes.
    """

    def __init__(
        self,
        deliver: Callable[[list[StepOutput], list[EndedRequest]], None],
        tell_begun: Callable[[list[str]], None] = lambda ids: None,
        tell_report: Callable[[EngineReport], None] | None = None,
    ) -> None:
        self._inbox: queue.SimpleQueue[_Posted] = queue.SimpleQueue()
        self._deliver = deliver
        self._tell_begun = tell_begun
        self._tell_report = tell_report
        # When the next report is due; None: not before the next step or command.
        self._report_due_at: float | None = None
        self._reported_at = float("-inf")
        self._num_taken = 0
        # What other engines have charged since the last step. The oldest are dropped.
        self._elsewhere: deque[tuple[str, list[ServiceSpan]]] = deque(maxlen=_MAX_ELSEWHERE)
        # Written by the engine's thread; read by others.
        self._num_completed = 0
        self._is_idle = False

    def post(self, command: Command | Wake | Stop, reply: Callable[[Any], None] = _ignore) -> None:
        """Adds a command to the inbox. May be called from any thread.

        reply: called on the engine's thread with the result of a `Call`.
        """
        self._inbox.put((command, reply))

    def add_service_elsewhere(self, engine: str, spans: list[ServiceSpan]) -> None:
        """Adds what another engine has charged, which counts from the next step on. May be called from any thread."""
        self._elsewhere.append((engine, spans))

    def measure(self) -> WorkProgress:
        """Number of steps and commands so far, and whether there is work now. May be called from any thread."""
        return WorkProgress(self._num_completed, not self._is_idle or not self._inbox.empty())

    def run(self, engine: Engine) -> None:
        """Runs steps until the command `Stop`. Raises AssertionError if pages were lost."""
        checked = True
        self._owe_report()
        while True:
            self._num_completed += 1
            self._report_if_due(engine)
            posted = self._next(engine, waiting_s=None if checked else _IDLE_BEFORE_CHECK_S)
            if posted is None and not engine.has_work:
                if not checked and self._report_due_at is None:
                    engine.check_invariants()
                    checked = True
                continue
            self._owe_report()
            while self._elsewhere:
                engine.add_service_elsewhere(*self._elsewhere.popleft())
            while posted is not None:
                command, reply = posted
                if isinstance(command, Stop):
                    self._deliver([], engine.pop_usage())
                    return
                reply(self._execute(command, engine))
                posted = None if self._inbox.empty() else self._inbox.get()
            outputs, ended = engine.step(self._tell_begun), engine.pop_usage()
            checked = False
            if outputs or ended:
                self._deliver(outputs, ended)

    def _next(self, engine: Engine, waiting_s: float | None) -> _Posted | None:
        """Returns the next command, or None if there is none.

        It waits only while the engine has no work: for `waiting_s`, or until a deadline, a retry or a report is due.
        """
        due_s = engine.next_due_in_s
        if due_s is not None:
            waiting_s = due_s if waiting_s is None else min(waiting_s, due_s)
        if self._report_due_at is not None:
            due_s = max(0.0, self._report_due_at - time.monotonic())
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

    def _owe_report(self) -> None:
        if self._tell_report is not None and self._report_due_at is None:
            self._report_due_at = self._reported_at + REPORT_S

    def _report_if_due(self, engine: Engine) -> None:
        now = time.monotonic()
        if self._tell_report is not None and self._report_due_at is not None and now >= self._report_due_at:
            self._report_due_at, self._reported_at = None, now
            self._tell_report(engine.report(self._num_taken))

    def _execute(self, command: Command | Wake | Stop, engine: Engine) -> Any:
        """Executes a command. Returns the result of a `Call`."""
        match command:
            case Add(request):
                self._num_taken += 1
                try:
                    engine.add(request)
                except RequestRefused as error:
                    refused = StepOutput(request.request_id, error=error)
                    self._deliver([refused], [EndedRequest(request.request_id, RequestUsage())])
            case Abort(request_id, index):
                engine.abort(request_id, index)
            case RemoveAdapter(version):
                engine.remove_adapter(version)
            case SetPins(pins):
                engine.set_pins(pins)
            case Prewarm(version, share):
                return engine.prewarm(version, share)
            case PurgeTenant(tenant):
                purge, ended = engine.purge_tenant(tenant)
                self._deliver(ended, engine.pop_usage())
                return purge
            case Observe(watched):
                return engine.stats(watched)
        return None
