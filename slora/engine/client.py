"""The engine as an API process sees it: requests out, streams of tokens back, over the engine's Unix socket.

`EngineClient` is the seam that routes depend on. `RemoteEngine` notices the engine's death at once (the stream
ends), fails what was in flight with EngineUnavailable, and connects again when there is a new one. Knows no torch.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from slora.adapter_place import AdapterPlace
from slora.engine.info import EngineInfo, EngineStats
from slora.engine.messages import (
    Message,
    decode_info,
    decode_output,
    decode_stats,
    encode_add,
    encode_pins,
    encode_prewarm,
    encode_version,
)
from slora.engine.open_streams import OpenStreams
from slora.engine.pin import Pin
from slora.errors import EngineUnavailable
from slora.request import EngineRequest, TokenDelta
from slora.tenant_share import TenantShare
from slora_adapters.version import AdapterVersion
from slora_adapters.wire import BrokenFrame, read_message, write_message

_log = logging.getLogger(__name__)

_RECONNECT_S = 0.05
_MAX_FRAME_BUFFER = 1 << 20
_DIED = "the engine died while it held this request; it is being restarted, send the request again"


class EngineClient(Protocol):
    """What the API needs of an engine."""

    @property
    def ready(self) -> bool:
        """The engine is connected, and so is its loader."""

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before the first connection."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """The answer as it comes. Closing the iterator early aborts the request.

        Raises RequestRefused, AdapterFetchFailed, RequestFailed, StepFailed, DeadlineMissed or
        EngineUnavailable, at any step.
        """

    def end_choice(self, request_id: str, index: int) -> None:
        """Nothing more of one choice of a request is wanted; the others go on. Over or unknown ones are no error."""

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable."""

    async def forget(self, version: AdapterVersion) -> None:
        """An adapter was deleted. An engine that is not there has nothing to forget."""

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        """Brings an adapter to the host, and into the pool if nothing has to leave for it. Returns where it is now.

        share: its tenant's. Raises EngineUnavailable.
        """

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        """These adapters and no others are to be in the pool; an engine that starts again has to be told again.

        Raises EngineUnavailable.
        """


class RemoteEngine:
    """An EngineClient over a Unix socket. `run` must be running for as long as it is used."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._info: EngineInfo | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loader_connected = False
        self._streams = OpenStreams()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._on_hello: Callable[[], None] = lambda: None
        self._versions: set[AdapterVersion] = set()

    @property
    def versions(self) -> Set[AdapterVersion]:
        """What the engine may hold: all that it was asked for and not told to forget, since it was started."""
        return self._versions

    @property
    def ready(self) -> bool:
        return self._writer is not None and self._info is not None and self._loader_connected

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the engine is starting")
        return self._info

    async def run(self, on_hello: Callable[[], None] = lambda: None) -> None:
        """Connects, and again after each loss, until cancelled. on_hello: called whenever an engine has said hello."""
        self._on_hello = on_hello
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket, limit=_MAX_FRAME_BUFFER)
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._writer = writer
            try:
                while (message := await read_message(reader)) is not None:
                    self._receive(message)
            except (BrokenFrame, ConnectionError) as error:
                _log.error("connection to the engine broke: %s", error)
            finally:
                self._lose()
                writer.close()
            await asyncio.sleep(_RECONNECT_S)

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        if request.adapter is not None:
            self._versions.add(request.adapter)
        return self._streams.read(request, lambda request: self._send(encode_add(request)), self._abort)

    def end_choice(self, request_id: str, index: int) -> None:
        self._streams.end_choice(request_id, index)
        self._abort(request_id, index)

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask({"op": "stats"})
        return stats

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        self._versions.add(version)
        place: AdapterPlace = await self._ask(encode_prewarm(version, share))
        return place

    async def forget(self, version: AdapterVersion) -> None:
        self._versions.discard(version)
        if self._writer is not None:
            await self._send({"op": "forget", "version": encode_version(version)})

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        self._versions.update(pin.version for pin in pins)
        await self._send(encode_pins(pins))

    def _abort(self, request_id: str, index: int | None = None) -> None:
        # No await here: this may run while the task is being cancelled.
        if self._writer is not None:
            write_message(self._writer, {"op": "abort", "id": request_id, "index": index})

    async def _ask(self, message: Message) -> Any:
        """What the engine answers under the number that the message gets."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            await self._send({**message, "number": number})
            return await answer
        finally:
            self._asked.pop(number, None)

    async def _send(self, message: Message) -> None:
        writer = self._writer
        if writer is None or self._info is None:
            raise EngineUnavailable("the engine is not running; it is being started, send the request again")
        write_message(writer, message)
        try:
            await writer.drain()
        except ConnectionError as error:
            raise EngineUnavailable(_DIED) from error

    def _receive(self, message: Message) -> None:
        match message["op"]:
            case "outputs":
                for row in message["outputs"]:
                    self._streams.put(decode_output(row))
            case "stats":
                self._settle(message, decode_stats(message))
            case "place":
                self._settle(message, AdapterPlace(message["place"]))
            case "hello":
                self._info = decode_info(message)
                self._on_hello()
            case "status":
                self._loader_connected = message["loader"]

    def _settle(self, message: Message, found: EngineStats | AdapterPlace) -> None:
        answer = self._asked.get(message["number"])
        if answer is not None and not answer.done():
            answer.set_result(found)

    def _lose(self) -> None:
        """The engine is gone."""
        self._writer = None
        self._loader_connected = False
        self._versions.clear()
        self._streams.fail(EngineUnavailable(_DIED))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine died"))
