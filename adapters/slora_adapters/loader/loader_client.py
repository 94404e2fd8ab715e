"""An `AdapterSource` that uses a loader process: small frames over a Unix socket, adapters through shared memory.

One thread connects, reads responses, and reconnects when the loader dies. Requests that were in flight are then sent to
the restarted loader. Calls only write a frame into the socket's buffer, and never block.

Each connection maps the arena of the connected loader process. A fetched copy stays readable until it is released, even
after its loader has died. `release` is sent only if the copy came from the loader that is connected now.
"""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

from slora_adapters.loader.cached_versions import CacheCounts, CachedVersions
from slora_adapters.loader.host_cache import map_arena
from slora_adapters.loader.loader_messages import (
    LoaderMismatch,
    Message,
    decode_cache,
    decode_hello,
    decode_loaded,
    decode_version,
    encode_call,
    encode_purge,
)
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.peft.packing import ByteArray
from slora_adapters.process.wire import BrokenFrame, encode, receive
from slora_adapters.version import AdapterVersion

logger = logging.getLogger(__name__)

RECONNECT_S = 0.05
# A loader that accepts a connection but sends nothing is stuck. Requests must not wait for it without a limit.
HANDSHAKE_S = 5.0
# A request fails after this time if no loader is connected.
GIVE_UP_S = 30.0
# See `LoaderClient`.
OnArena = Callable[[ByteArray, int], object]
# A request fails if this many loaders died while it was in flight, because it may have caused the crashes.
MAX_DEATHS = 3


@dataclass(slots=True)
class _LoadRequest:
    """A requested version. The request is kept until `poll` has returned its result."""

    number: int
    since: float
    num_deaths: int = 0
    answered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _LoaderConnection:
    """The socket to one loader process, and the arena of that process.

    Each held copy refers to the connection that it came from. The arena thus stays mapped after the socket is closed,
    until the last copy is released.
    """

    socket: socket.socket
    arena: ByteArray
    # The object that `on_arena` returned for this arena. It is stored here only to live as long as the arena.
    kept: object


class LoaderClient:
    """Implements `source.AdapterSource` by requests to a loader process.

    notify: called from this client's thread when `poll` would return a result.
    on_arena: called from the same thread with each arena and its memfd, before any copy in the arena is delivered. The
      memfd is closed afterwards. The return value is kept until the connection has ended and no copy in the arena is
      held.
    give_up_s: how long a request waits while no loader is connected.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        notify: Callable[[], None] = lambda: None,
        on_arena: OnArena = lambda arena, descriptor: None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._path = str(path)
        self._notify = notify
        self._on_arena = on_arena
        self._give_up_s = give_up_s
        # Guards everything below; notified on `close`.
        self._changed = Condition()
        self._connection: _LoaderConnection | None = None
        self._num_requests = 0
        self._requests: dict[AdapterVersion, _LoadRequest] = {}
        self._results: list[Fetched | FetchFailed] = []
        # The connection that each held copy came from, oldest first.
        self._held: dict[AdapterVersion, deque[_LoaderConnection]] = {}
        self._paces: Mapping[str, float] = {}
        self._cached = CachedVersions(0)
        self.is_closed = False
        self._thread = Thread(target=self._maintain_connection, name="loader-client", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def capacity_bytes(self) -> int | None:
        """Size of the arena; None while no loader is connected. With None, the engine sets no limit, so all requests
        are queued here. They fail together if no loader connects.
        """
        connection = self._connection
        return len(connection.arena) if connection is not None else None

    @property
    def paces(self) -> Mapping[str, float]:
        """The last reported pace of each tier. If the current loader has not used a tier, the pace is from an earlier
        loader.
        """
        return self._paces

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        with self._changed:
            return self._cached.versions

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        with self._changed:
            return self._cached.count(most, labels)

    def request(self, version: AdapterVersion) -> None:
        with self._changed:
            if version in self._requests:
                return
            self._num_requests += 1
            self._requests[version] = _LoadRequest(self._num_requests, time.monotonic())
            self._send(encode_call("load", version, self._num_requests))

    def poll(self) -> list[Fetched | FetchFailed]:
        with self._changed:
            results, self._results = self._results, []
            for result in results:
                del self._requests[result.version]
        return results

    def release(self, version: AdapterVersion) -> None:
        with self._changed:
            connections = self._held[version]
            if connections.popleft() is self._connection:
                self._send(encode_call("release", version))
            if not connections:
                del self._held[version]

    def discard(self, version: AdapterVersion) -> None:
        """Tells the connected loader, if any, to drop a deleted version. A new loader process starts with an empty
        cache.
        """
        with self._changed:
            self._send(encode_call("discard", version))

    def purge(self, tenant: str) -> None:
        with self._changed:
            self._send(encode_purge(tenant))

    def close(self) -> None:
        """Ends the thread. The client must not be used afterwards."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            self._hang_up()
        self._thread.join()

    def _send(self, message: Message) -> None:
        """Sends a frame. The caller holds the lock.

        A loader that leaves its socket's buffer full is stuck. The client then disconnects, and sends the requests
        again after it reconnects.
        """
        if self._connection is None:
            return
        frame = encode(message)
        try:
            sent = self._connection.socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the reading thread detects the end of the connection and handles it
        if sent < len(frame):
            logger.error("the loader does not read its messages; reconnecting")
            self._hang_up()

    def _hang_up(self) -> None:
        if self._connection is not None:
            with suppress(OSError):  # the other end closed first
                self._connection.socket.shutdown(socket.SHUT_RDWR)

    def _maintain_connection(self) -> None:
        while not self.is_closed:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.settimeout(HANDSHAKE_S)
                    sock.connect(self._path)
                    # No local variable holds the connection, because it would keep the arena of an ended loader.
                    self._serve(_handshake(sock, self._on_arena))
            except (OSError, BrokenFrame) as error:  # a timeout is also an OSError
                logger.debug("cannot connect to the loader at %s: %s", self._path, error)
            except LoaderMismatch as error:
                logger.error("%s", error)
            except Exception:  # top of the thread's loop: a bug must not leave the engine without a loader
                logger.exception("the connection to the loader failed; reconnecting")
            self._fail_hopeless()
            with self._changed:
                if not self.is_closed:
                    self._changed.wait(RECONNECT_S)

    def _serve(self, connection: _LoaderConnection) -> None:
        """Handles one connection from the end of the handshake until the connection ends."""
        with self._changed:
            if self.is_closed:  # `close` ran during the handshake and had no connection to end
                return
            self._connection = connection
            self._cached = CachedVersions(len(connection.arena))
            for version, request in self._requests.items():
                if not request.answered:
                    self._send(encode_call("load", version, request.number))
        try:
            while (message := receive(connection.socket.recv)) is not None:
                self._receive(connection, message)
        finally:
            with self._changed:
                self._connection = None
                self._cached = CachedVersions(0)
                for request in self._requests.values():
                    request.num_deaths += not request.answered

    def _receive(self, connection: _LoaderConnection, message: Message) -> None:
        with self._changed:
            if message["op"] == "cache":
                self._cached.update(*decode_cache(message))
                return
            version = decode_version(message)
            request = self._requests[version]
            assert request.number == message["number"] and not request.answered, (
                "the loader answered a request that is not open"
            )
            request.answered = True
            if message["op"] == "loaded":
                self._held.setdefault(version, deque()).append(connection)
                self._paces = {**self._paces, **message["paces"]}
                self._results.append(Fetched(version, decode_loaded(message, connection.arena)))
            else:
                self._results.append(FetchFailed(version, message["code"], message["message"]))
        self._notify()

    def _fail_hopeless(self) -> None:
        now = time.monotonic()
        with self._changed:
            hopeless = [
                version
                for version, request in self._requests.items()
                if not request.answered
                and (now - request.since > self._give_up_s or request.num_deaths >= MAX_DEATHS)
            ]
            for version in hopeless:
                self._requests[version].answered = True
                message = "the process that loads adapters does not respond; try again"
                self._results.append(FetchFailed(version, "unavailable", message))
        if hopeless:
            self._notify()


def _handshake(sock: socket.socket, on_arena: OnArena) -> _LoaderConnection:
    """Receives the arena and the `hello` of a loader. Raises OSError or BrokenFrame if the loader disconnects, and
    LoaderMismatch if it is from another release.
    """
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    if not descriptors:
        raise BrokenFrame("the loader closed the connection before it sent its memory descriptor")
    try:
        message = receive(sock.recv)
        if message is None:
            raise BrokenFrame("the loader closed the connection before its first message")
        sock.settimeout(None)
        arena = map_arena(descriptors[0], decode_hello(message).arena_bytes)
        return _LoaderConnection(sock, arena, on_arena(arena, descriptors[0]))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
