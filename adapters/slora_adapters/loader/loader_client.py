"""An `AdapterSource` that asks a loader process: small frames over a Unix socket, adapters through shared memory.

One thread connects, reads answers, and connects again when the loader died; requests that were in flight then are
sent to its successor. Calls only put a frame into the socket's buffer, and never wait.

Each connection maps the arena of that loader's run. A copy that was fetched stays readable until it is let go, even
when its loader is dead; `release` reaches the loader only if it is still the one that the copy came from.
"""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Thread

from slora_adapters.loader.host_cache import map_arena
from slora_adapters.loader.loader_messages import (
    LoaderMismatch,
    Message,
    decode_hello,
    decode_loaded,
    decode_version,
    encode_call,
)
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.peft.packing import ByteArray
from slora_adapters.version import AdapterVersion
from slora_adapters.wire import BrokenFrame, encode, receive

logger = logging.getLogger(__name__)

RECONNECT_S = 0.05
# A loader that accepts connections but does not speak is stuck; requests must not wait for it without end.
HANDSHAKE_S = 5.0
# A request that no loader has answered for this long, while none is connected, fails.
GIVE_UP_S = 30.0
# A request that was in flight at this many deaths of loaders fails: it may be what kills them.
MAX_DEATHS = 3


@dataclass(slots=True)
class _Request:
    """A version that was asked for. It stays until `poll` has delivered the answer."""

    number: int
    since: float
    num_deaths: int = 0
    answered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One connection to one run of the loader, until it has ended and no copy of it is held. kept: see `on_arena`."""

    socket: socket.socket
    arena: ByteArray
    kept: object = None


class LoaderClient:
    """See `source.AdapterSource`. `notify` is called, from this client's thread, when `poll` would return something.

    `on_arena` is called, from that thread too, with each arena before anything in it is handed out; what it returns is
    kept as long as a copy there is held, and at least as long as the connection. `give_up_s`: how long a request
    waits for a loader to be there at all.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        notify: Callable[[], None] = lambda: None,
        on_arena: Callable[[ByteArray], object] = lambda arena: None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._path = str(path)
        self._notify = notify
        self._on_arena = on_arena
        self._give_up_s = give_up_s
        # Guards everything below; notified on `close`.
        self._changed = Condition()
        self._run: _Run | None = None
        self._num_requests = 0
        self._requests: dict[AdapterVersion, _Request] = {}
        self._results: list[Fetched | FetchFailed] = []
        # Where each copy that is held came from, oldest first.
        self._held: dict[AdapterVersion, deque[_Run]] = {}
        self._paces: Mapping[str, float] = {}
        self._closed = False
        self._thread = Thread(target=self._connect_for_ever, name="loader-client", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._run is not None

    @property
    def capacity_bytes(self) -> int | None:
        """The arena's. Not known while no loader is connected: then all are taken, so that all give up together."""
        run = self._run
        return len(run.arena) if run is not None else None

    @property
    def paces(self) -> Mapping[str, float]:
        """As the loader last said, or the one before it, of places that this one has not loaded from."""
        return self._paces

    def request(self, version: AdapterVersion) -> None:
        with self._changed:
            if version in self._requests:
                return
            self._num_requests += 1
            self._requests[version] = _Request(self._num_requests, time.monotonic())
            self._send(encode_call("load", version, self._num_requests))

    def poll(self) -> list[Fetched | FetchFailed]:
        with self._changed:
            results, self._results = self._results, []
            for result in results:
                del self._requests[result.version]
        return results

    def release(self, version: AdapterVersion) -> None:
        with self._changed:
            runs = self._held[version]
            if runs.popleft() is self._run:
                self._send(encode_call("release", version))
            if not runs:
                del self._held[version]

    def forget(self, version: AdapterVersion) -> None:
        """A loader that is not there has forgotten everything anyway."""
        with self._changed:
            self._send(encode_call("forget", version))

    def close(self) -> None:
        """Ends the thread; the client must not be used afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._hang_up()
        self._thread.join()

    def _send(self, message: Message) -> None:
        """The lock is held. A loader that leaves its socket's buffer full is stuck: hang up, and it is sent again."""
        if self._run is None:
            return
        frame = encode(message)
        try:
            sent = self._run.socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the reading thread sees the end of the connection and deals with it
        if sent < len(frame):
            logger.error("the loader does not read what it is sent; connecting again")
            self._hang_up()

    def _hang_up(self) -> None:
        if self._run is not None:
            with suppress(OSError):  # the other end was quicker
                self._run.socket.shutdown(socket.SHUT_RDWR)

    def _connect_for_ever(self) -> None:
        while not self._closed:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(HANDSHAKE_S)
                    connection.connect(self._path)
                    run = _shake_hands(connection)
                    connection.settimeout(None)
                    self._serve(replace(run, kept=self._on_arena(run.arena)))
            except (OSError, BrokenFrame) as error:  # timeouts are OSErrors
                logger.debug("no loader at %s: %s", self._path, error)
            except LoaderMismatch as error:
                logger.error("%s", error)
            except Exception:  # top of the thread's loop: a bug must not leave the engine without a loader
                logger.exception("talking to the loader failed; connecting again")
            self._fail_hopeless()
            with self._changed:
                if not self._closed:
                    self._changed.wait(RECONNECT_S)

    def _serve(self, run: _Run) -> None:
        """One connection, from after the handshake to its end."""
        with self._changed:
            if self._closed:  # meanwhile, when there was nothing yet to hang up
                return
            self._run = run
            for version, request in self._requests.items():
                if not request.answered:
                    self._send(encode_call("load", version, request.number))
        try:
            while (message := receive(run.socket)) is not None:
                self._receive(run, message)
        finally:
            with self._changed:
                self._run = None
                for request in self._requests.values():
                    request.num_deaths += not request.answered

    def _receive(self, run: _Run, message: Message) -> None:
        with self._changed:
            version = decode_version(message)
            request = self._requests[version]
            assert request.number == message["number"] and not request.answered, "an answer to no question"
            request.answered = True
            if message["op"] == "loaded":
                self._held.setdefault(version, deque()).append(run)
                self._paces = {**self._paces, **message["paces"]}
                seconds = time.monotonic() - request.since
                self._results.append(Fetched(version, decode_loaded(message, run.arena), seconds))
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
                message = "the process that loads adapters does not answer; try again"
                self._results.append(FetchFailed(version, "unavailable", message))
        if hopeless:
            self._notify()


def _shake_hands(connection: socket.socket) -> _Run:
    """Raises OSError or BrokenFrame if the loader goes away meanwhile, LoaderMismatch if it is of another release."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise BrokenFrame("the loader closed the connection at once")
    try:
        message = receive(connection)
        if message is None:
            raise BrokenFrame("the loader closed the connection before its hello")
        return _Run(connection, map_arena(descriptors[0], decode_hello(message).arena_bytes))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
