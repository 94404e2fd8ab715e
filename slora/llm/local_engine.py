"""An engine on a thread of the same process, with the methods of `EngineClient` except those for usage.

The thread builds the engine, and no other thread calls it. PyTorch and the kernels release the GIL while they compute,
so event loops on other threads keep running. Text and tokenization are outside this module.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from slora.client.open_requests import OpenStreams
from slora.core.engine_state import AdapterPlace, EngineInfo, EngineStats, Pin, TenantPurge
from slora.core.errors import EngineUnavailable
from slora.core.messages import (
    Abort,
    Add,
    Call,
    Command,
    Observe,
    Prewarm,
    PurgeTenant,
    RemoveAdapter,
    SetPins,
)
from slora.core.request import EndedRequest, EngineRequest, StepOutput, TenantShare, TokenDelta
from slora.engine.engine import Engine
from slora.engine.worker import EngineWorker, Stop, Wake
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class LocalEngine:
    """An engine for any number of event loops. Call `start` before the first use and `close` after the last."""

    def __init__(self) -> None:
        self._worker = EngineWorker(self._deliver)
        self._thread: threading.Thread | None = None
        self._info: EngineInfo | None = None
        # Why no engine is running, or None while one runs. No command is posted while this is set.
        self._down_reason: str | None = "the engine was not started"
        self._gate = threading.Lock()
        # Written by the event loops; read by the engine's thread.
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
        self._pending_calls: set[Future[Any]] = set()
        self._streams = OpenStreams()

    def start(self, build: Callable[[], Engine]) -> None:
        """Blocks until the engine is built. Raises the errors of `build`."""
        built: Future[EngineInfo] = Future()
        self._thread = threading.Thread(
            target=self._run_engine, args=(build, built), name="engine", daemon=True
        )
        self._thread.start()
        self._info = built.result()

    def close(self) -> None:
        """Stops the engine after its current step. Unfinished requests end with EngineUnavailable. Idempotent."""
        self._worker.post(Stop())
        if self._thread is not None:
            self._thread.join()

    def wake(self) -> None:
        """Tells the engine that an adapter or a grammar arrived. May be called from any thread."""
        self._worker.post(Wake())

    @property
    def ready(self) -> bool:
        return self._down_reason is None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the engine was not started")
        return self._info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        try:
            async with aclosing(self._streams.open(request, self._send, self._abort)) as deltas:
                async for arrived in deltas:
                    yield arrived
        finally:
            self._loops.pop(request.request_id, None)

    def end_choice(self, request_id: str, index: int) -> None:
        self._streams.end_choice(request_id, index)
        self._worker.post(Abort(request_id, index))

    async def stats(self) -> EngineStats:
        return await self._call(Observe())

    async def remove_adapter(self, version: AdapterVersion) -> None:
        self._worker.post(RemoveAdapter(version))

    async def purge_tenant(self, tenant: str) -> TenantPurge:
        return await self._call(PurgeTenant(tenant))

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        return await self._call(Prewarm(version, share))

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        self._post(SetPins(list(pins)))

    async def _call(self, call: Call[_Result]) -> _Result:
        """Posts a call and waits for its result."""
        result: Future[_Result] = Future()
        self._pending_calls.add(result)
        try:
            self._post(call, partial(_resolve, result))
            return await asyncio.wrap_future(result)
        finally:
            self._pending_calls.discard(result)

    async def _send(self, request: EngineRequest) -> None:
        self._loops[request.request_id] = asyncio.get_running_loop()
        self._post(Add(request))

    def _post(self, command: Command, reply: Callable[[Any], None] = lambda result: None) -> None:
        """Posts a command that expects an answer. Raises EngineUnavailable if the engine has ended."""
        with self._gate:
            if self._down_reason is not None:
                raise EngineUnavailable(self._down_reason)
            self._worker.post(command, reply)

    def _abort(self, request_id: str) -> None:
        self._worker.post(Abort(request_id))

    def _run_engine(self, build: Callable[[], Engine], built: Future[EngineInfo]) -> None:
        """The body of the engine's thread: builds the engine, runs it and fails all open requests when it ends."""
        try:
            engine = build()
        except Exception as error:  # `start` raises this error.
            built.set_exception(error)
            return
        self._down_reason = None
        built.set_result(engine.info)
        reason = "the engine was closed"
        try:
            self._worker.run(engine)
        except BaseException:
            _log.critical("the engine failed and serves no more requests", exc_info=True)
            reason = "the engine failed; the log has the reason"
        with self._gate:
            self._down_reason = reason
        self._deliver([StepOutput(name, error=EngineUnavailable(reason)) for name in list(self._loops)], [])
        for result in list(self._pending_calls):
            _resolve(result, EngineUnavailable(reason))
        engine.close()

    def _deliver(self, outputs: list[StepOutput], ended: list[EndedRequest]) -> None:
        """Passes a step's outputs to the event loops, with one call per loop. Runs on the engine's thread."""
        batches: dict[asyncio.AbstractEventLoop, list[StepOutput]] = defaultdict(list)
        for output in outputs:
            loop = self._loops.get(output.request_id)
            if loop is not None:  # A request that was aborted meanwhile has no loop.
                batches[loop].append(output)
        for loop, batch in batches.items():
            with suppress(RuntimeError):  # Closed loop: its requests have ended.
                loop.call_soon_threadsafe(partial(self._put, batch))

    def _put(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self._streams.put(output)


def _resolve(result: Future[Any], found: object) -> None:
    with suppress(InvalidStateError):  # The caller was cancelled, or already has its answer.
        if isinstance(found, Exception):
            result.set_exception(found)
        else:
            result.set_result(found)
