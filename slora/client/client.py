"""The API's client of the engine. It sends requests and receives token streams over the engine's socket.

Routes depend on the protocol `EngineClient`. `RemoteEngine` implements it over the socket. When the engine dies, the
socket closes at once: `RemoteEngine` fails all unfinished requests with EngineUnavailable and reconnects as soon as an
engine listens again. This module does not import torch.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from slora.client.open_requests import OpenStream, OpenStreams
from slora.client.router import ReportedState
from slora.core.engine_address import EngineAddress, HandshakeFailed, connect
from slora.core.engine_state import AdapterPlace, EngineInfo, EngineStats, Pin, TenantPurge
from slora.core.errors import EngineUnavailable, SloraError
from slora.core.messages import (
    Abort,
    Add,
    Begun,
    Call,
    Drain,
    InvalidMessage,
    Message,
    Observe,
    Outputs,
    Prewarm,
    PurgeTenant,
    Recorded,
    Release,
    RemoveAdapter,
    Reply,
    Report,
    Served,
    SetPins,
    Status,
    Usage,
    decode_info,
    unpack,
)
from slora.core.request import EngineRequest, RequestTiming, RequestUsage, TenantShare, TokenDelta
from slora_adapters.process.wire import BrokenFrame, MessageReader, write_message
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_RECONNECT_S = 0.05
# Pause after a failed handshake: only an operator can end the cause.
_REFUSED_S = 1.0
# With more bytes that the engine has not read yet, service of other engines is not sent to it.
_MAX_UNSENT_BYTES = 1 << 20
_STOPS = "the server stops before this request has ended; send the request again"
_DIED = "the engine died while it processed this request and is being restarted; send the request again"
_LEFT = "the engine stopped while it processed this request; send the request again"


# Receives the id, the usage and the timing of an ended request. Usage and timing are None if the engine died before it
# reported the usage. A refused request also has no timing.
UsageListener = Callable[[str, RequestUsage | None, RequestTiming | None], None]


class EngineClient(Protocol):
    """The interface of the engine that the API uses."""

    @property
    def ready(self) -> bool:
        """True when both the engine and its loader are connected."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts of the engine. Raises EngineUnavailable before the first connection."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Yields lists of the deltas that have arrived since the last list. Closing the iterator early aborts the
        request.

        May raise at any step: RequestRefused, AdapterFetchFailed, RequestFailed, StepFailed, DeadlineMissed or
        EngineUnavailable.
        """

    def end_choice(self, request_id: str, index: int) -> None:
        """Ends one choice of a request. The other choices continue. Ending a finished or unknown choice is a no-op.

        Lists that `generate` has already yielded may contain more deltas of this choice.
        """

    def listen_for_usage(self, listener: UsageListener) -> None:
        """Sets the function that is called once for each request that `generate` sends, however the request ends.

        It is called on the event loop, before `generate` yields the last token or raises. If the caller ends the
        request early, it is called soon afterwards. It must not block or raise. A refused request has used nothing.
        """

    def acknowledge_usage(self, request_id: str) -> None:
        """Tells the engine that the request's usage is durable.

        When this process ends, the engine records the usage of all requests that were not acknowledged.
        """

    async def stats(self, watched: Collection[str] | None = None) -> EngineStats:
        """Returns a snapshot of the engine. Raises EngineUnavailable.

        watched: for a console, the tenants that must be listed, even if they are small. With None, the snapshot has no
            live state.
        """

    async def remove_adapter(self, version: AdapterVersion) -> None:
        """Tells the engine that an adapter was deleted. A no-op when no engine is connected."""

    async def purge_tenant(self, tenant: str) -> TenantPurge:
        """Ends the tenant's requests, and drops all of its data in the engine and the host cache.

        Its pages in the page pool are overwritten with zeros. Idempotent. Raises EngineUnavailable.
        """

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        """Loads an adapter into the host cache, and into the pool if that needs no eviction.

        Returns where the adapter is now. share: the share of the adapter's tenant. Raises EngineUnavailable.
        """

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        """Replaces the set of pinned adapters. A restarted engine has no pins, so the caller must send them again.

        Raises EngineUnavailable.
        """


@dataclass(frozen=True, slots=True)
class _PendingCall:
    call: Call[Any]
    result: asyncio.Future[Any]


class RemoteEngine:
    """An EngineClient over a socket. The coroutine `run` must run for as long as the client is used.

    state: what the engine has reported, for the router.
    """

    def __init__(self, address: EngineAddress) -> None:
        self.state = ReportedState()
        self._address = address
        self._info: EngineInfo | None = None
        # Why this process cannot talk to the connected engine; None if it can.
        self.refusal: EngineUnavailable | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loader_connected = False
        self._streams = OpenStreams()
        self._pending_calls: dict[int, _PendingCall] = {}
        self._numbers = itertools.count()
        self._on_hello: Callable[[], None] = lambda: None
        self._on_change: Callable[[], None] = lambda: None
        self._is_leaving = False
        self._sent_versions: set[AdapterVersion] = set()
        self._on_usage: UsageListener = lambda request_id, usage, timing: None
        self._on_begin: Callable[[str], None] = lambda request_id: None
        self._on_service: Callable[[Served], None] = lambda service: None
        # The requests whose usage the engine has not reported yet. A dict keeps their order.
        self._unreported: dict[str, None] = {}
        self._recorded: list[str] = []

    @property
    def sent_versions(self) -> Set[AdapterVersion]:
        """The adapters that this engine may hold: those requested since its start and not removed afterwards.
        `state` has those that it has reported.
        """
        return self._sent_versions

    @property
    def connected(self) -> bool:
        return self._writer is not None and self._info is not None

    @property
    def device(self) -> str | None:
        """The device of the engine that was connected last; None before the first connection."""
        return None if self._info is None else self._info.device

    @property
    def is_leaving(self) -> bool:
        """Whether the engine drains. It gets no new requests, and another engine continues those in progress."""
        return self._is_leaving

    @property
    def ready(self) -> bool:
        return self.connected and self._loader_connected and not self._is_leaving

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the engine is starting")
        return self._info

    async def run(
        self, on_hello: Callable[[], None] = lambda: None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Connects, and reconnects after each loss, until cancelled.

        on_hello: called each time an engine sends its hello.
        on_change: called each time `ready` or `connected` may have changed.
        """
        self._on_hello, self._on_change = on_hello, on_change
        explained = ""
        while True:
            try:
                reader, writer = await connect(self._address)
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            except HandshakeFailed as error:
                if str(error) != explained:
                    explained = str(error)
                    _log.error("%s", explained)
                await asyncio.sleep(_REFUSED_S)
                continue
            self._writer = writer
            lost = _DIED
            try:
                async for frames in MessageReader(reader):
                    for frame in frames:
                        self._receive(frame)
            except (BrokenFrame, InvalidMessage, ConnectionError) as error:
                level = logging.INFO if self._is_leaving else logging.ERROR
                _log.log(level, "the connection to the engine failed: %s", error)
            except asyncio.CancelledError:
                self._unreported.clear()  # This process ends, so the engine records their usage.
                lost = _STOPS
                raise
            finally:
                self._disconnect(lost)
                writer.close()
            await asyncio.sleep(_RECONNECT_S)

    def generate(self, request: EngineRequest) -> OpenStream:
        self._sent_versions.update(request.versions)
        return self._streams.open(request, self._send_request, self._abort)

    def end_choice(self, request_id: str, index: int) -> None:
        self._streams.end_choice(request_id, index)
        self._abort(request_id, index)

    def listen_for_usage(self, listener: UsageListener) -> None:
        self._on_usage = listener

    def listen_for_begins(self, listener: Callable[[str], None]) -> None:
        """Sets the function that is called with the id of a request when the engine begins to compute it. It is not
        called while the request waits in the engine's queue.
        """
        self._on_begin = listener

    def listen_for_service(self, listener: Callable[[Served], None]) -> None:
        """Sets the function that is called with what the engine has charged to tenants."""
        self._on_service = listener

    def tell_service_elsewhere(self, service: Served) -> None:
        """Tells the engine what another engine has charged. Nothing is sent while the engine does not read."""
        writer = self._writer
        if writer is None or self._info is None:
            return
        if writer.transport.get_write_buffer_size() < _MAX_UNSENT_BYTES:
            write_message(writer, service.pack())

    def acknowledge_usage(self, request_id: str) -> None:
        if not self._recorded:  # Send one message for all requests that share a sync of the journal.
            asyncio.get_running_loop().call_soon(self._send_recorded)
        self._recorded.append(request_id)

    async def stats(self, watched: Collection[str] | None = None) -> EngineStats:
        return await self._call(Observe(None if watched is None else frozenset(watched)))

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        self._sent_versions.add(version)
        return await self._call(Prewarm(version, share))

    async def remove_adapter(self, version: AdapterVersion) -> None:
        self._sent_versions.discard(version)
        if self._writer is not None:
            await self._send(RemoveAdapter(version))

    async def purge_tenant(self, tenant: str) -> TenantPurge:
        self._sent_versions -= {version for version in self._sent_versions if version.tenant == tenant}
        return await self._call(PurgeTenant(tenant))

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        self._sent_versions.update(pin.version for pin in pins)
        await self._send(SetPins(list(pins)))

    def release(self) -> None:
        """Ends all requests in progress with EngineUnavailable, so that another engine can continue them.

        The engine drops them without usage records, because the other engine reports the usage of the whole answers.
        The usage listener is called with None. From now on, the engine gets no new requests.
        """
        self._is_leaving = True
        released = list(self._unreported)
        if self._writer is not None and released:
            write_message(self._writer, Release(released).pack())
        for request_id in released:
            self._report_usage(request_id, None)
        self._streams.fail(EngineUnavailable(_LEFT))

    def stop(self) -> None:
        """Tells the engine to drain and to end, as SIGTERM does. Raises EngineUnavailable if it is not connected."""
        self._write(Drain())
        self.release()

    def _abort(self, request_id: str, index: int | None = None) -> None:
        # No await here: this function may run while its task is being cancelled.
        if self._writer is not None:
            write_message(self._writer, Abort(request_id, index).pack())

    async def _call(self, call: Call[_Result]) -> _Result:
        """Sends the call with a fresh number and waits for the reply with the same number."""
        number = next(self._numbers)
        result: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._pending_calls[number] = _PendingCall(call, result)
        try:
            await _drain(self._write(call, number=number))
            return await result
        finally:
            self._pending_calls.pop(number, None)

    async def _send_request(self, request: EngineRequest) -> None:
        self._unreported[request.request_id] = None
        try:
            writer = self._write(Add(request))
        except SloraError:
            self._report_usage(request.request_id, RequestUsage())
            raise
        self.state.add_sent(request)
        # If the connection is lost, `_disconnect` reports the usage and fails the stream.
        with suppress(EngineUnavailable):
            await _drain(writer)

    def _send_recorded(self) -> None:
        recorded, self._recorded = self._recorded, []
        if self._writer is not None:
            write_message(self._writer, Recorded(recorded).pack())

    def _report_usage(
        self, request_id: str, usage: RequestUsage | None, timing: RequestTiming | None = None
    ) -> None:
        if request_id in self._unreported:
            del self._unreported[request_id]
            self._on_usage(request_id, usage, timing)

    async def _send(self, message: Message) -> None:
        await _drain(self._write(message))

    def _write(self, message: Message, **extra: object) -> asyncio.StreamWriter:
        writer = self._writer
        if writer is None or self._info is None:
            raise EngineUnavailable("the engine is not running and is being started; send the request again")
        write_message(writer, message.pack(**extra))
        return writer

    def _receive(self, frame: dict[str, Any]) -> None:
        if frame["op"] == "hello":
            try:
                self._info, self.refusal = decode_info(frame), None
            except EngineUnavailable as error:
                self._info, self.refusal = None, error
            self._on_hello()
            self._on_change()
            return
        if self.refusal is not None:
            return  # The messages of another protocol version may have another form.
        match unpack(frame):
            case Outputs() as outputs:
                for output in outputs.read():
                    self._streams.put(output)
            case Begun(request_ids):
                for request_id in request_ids:
                    self._on_begin(request_id)
            case Usage(ended):
                for request_id, usage, timing in ended:
                    self._report_usage(request_id, usage, timing)
            case Report() as report:
                self.state.receive(report)
                if report.spans:
                    self._on_service(Served(report.engine, list(report.spans)))
            case Reply(number, result):
                pending = self._pending_calls.get(number)
                if pending is not None and not pending.result.done():
                    pending.result.set_result(pending.call.read_result(result))
            case Status(loader, draining):
                self._loader_connected = loader
                if draining:
                    self.release()
                self._on_change()

    def _disconnect(self, reason: str) -> None:
        """Cleans up after the connection to the engine is lost. reason: what the open streams end with."""
        self._writer = None
        self._loader_connected = self._is_leaving = False
        self._sent_versions.clear()
        self.state.clear()
        for request_id in list(self._unreported):
            self._report_usage(request_id, None)
        self._streams.fail(EngineUnavailable(reason))
        for pending in self._pending_calls.values():
            if not pending.result.done():
                pending.result.set_exception(EngineUnavailable("the engine died"))
        self._on_change()


async def _drain(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.drain()
    except ConnectionError as error:
        raise EngineUnavailable(_DIED) from error
