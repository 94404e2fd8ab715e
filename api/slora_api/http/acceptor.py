"""Accepts connections from the listening socket, a few at a time, up to the connection limits.

asyncio's own server accepts as many connections at once as its backlog holds. With the backlog of 2,048 used here, that
blocks the event loop for 0.2 s. Without free file descriptors, asyncio retries up to 2,048 times and logs each failure.
This acceptor accepts at most 16 connections at once. Without free descriptors, it closes idle connections, logs one
line per minute, and retries after a second.

Several API processes may accept from the same socket. If a process has more connections than another process, it waits
a few milliseconds, so that the other process can accept first.

A connection over a limit is answered 503 at once. Its descriptor stays open for a second, so that the client can read
the answer before the reset.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress

from slora_api.core.errors import ServerBusy, describe_error
from slora_api.core.rate_limited_log import get_rate_limited_logger
from slora_api.http.http_protocol import Connections, HttpProtocol, encode_answer, has_left

_log = get_rate_limited_logger(__name__)

# Accepting this many connections blocks the event loop for about 2 ms.
_MAX_AT_ONCE = 16
_RETRY_S = 1.0
# If a process has more connections than another process, it waits this long, so that the other process can accept
# first.
_YIELD_S = 0.002
_LINGER_S = 1.0
# At most this many refused connections stay open for `_LINGER_S`. Further refused connections are closed at once.
_MAX_LINGERING = 32
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts connections and hands each connection to a new protocol. The acceptor does not close the listening
    socket.
    """

    def __init__(
        self, listener: socket.socket, connections: Connections, make_protocol: Callable[[], HttpProtocol]
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._refused: set[socket.socket] = set()

    def start(self) -> None:
        """Starts accepting connections."""
        self._listener.setblocking(False)
        self._listen()

    def stop(self) -> None:
        """Stops accepting connections."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        while self._refused:
            self._refused.pop().close()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            if self._connections.has_more_than_another():
                self._pause(_YIELD_S, self._accept_after_yielding)
                return
            if not self._accept_one():
                return

    def _accept_after_yielding(self) -> None:
        """Resumes accepting. Accepts one connection immediately, because the other processes may be busy or stopped."""
        self._listen()
        self._accept_one()

    def _accept_one(self) -> bool:
        """Accepts one connection, and serves or refuses it. Returns False if no connection was accepted."""
        try:
            accepted, address = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._report_exhausted(error)
                self._pause(_RETRY_S, self._listen)
            return False  # No connection is waiting, or a client hung up before the accept.
        accepted.setblocking(False)
        if self._has_left(accepted):
            accepted.close()
            return True
        host = str(address[0])
        reason = self._connections.make_room(host)
        if reason is None:
            self._hand_over(accepted, host)
        else:
            self._refuse(accepted, reason)
        return True

    def _has_left(self, accepted: socket.socket) -> bool:
        """Whether the client has left while the connection waited to be accepted, so that it need not be served."""
        try:
            return has_left(accepted, accepted.recv(4, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:  # The client has reset the connection.
            return True

    def _pause(self, seconds: float, resume: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(seconds, resume)

    def _report_exhausted(self, error: OSError) -> None:
        num_closed = self._connections.close_idle()
        _log.warning(
            "a new connection cannot be accepted (%s): %d are open, and %d idle ones were closed",
            error,
            len(self._connections),
            num_closed,
        )

    def _hand_over(self, accepted: socket.socket, host: str) -> None:
        protocol = self._make_protocol()
        self._connections.add(protocol, host)
        task = self._loop.create_task(self._start(accepted, protocol))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, accepted: socket.socket, protocol: HttpProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted)
        except OSError as error:  # The client has hung up.
            accepted.close()
            self._connections.discard(protocol)
            _log.warning("an accepted connection could not be served: %s", error)

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        with suppress(OSError):
            accepted.send(encode_answer(describe_error(ServerBusy(reason))))
            accepted.shutdown(socket.SHUT_WR)
        if len(self._refused) >= _MAX_LINGERING:
            accepted.close()
            return
        self._refused.add(accepted)
        self._loop.call_later(_LINGER_S, self._close_refused, accepted)

    def _close_refused(self, accepted: socket.socket) -> None:
        self._refused.discard(accepted)
        accepted.close()
