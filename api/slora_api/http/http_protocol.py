"""HTTP/1.1 on one connection: uvicorn's protocol over h11, with additional deadlines.

uvicorn limits only the pause between two requests. This protocol also ends a connection in these cases:

- It has had no request for `idle_s` after it was opened. It is closed without an answer.
- Its request head is not complete `head_s` after its first byte (408), or is larger than 32 KiB (431).
- The body of its request has too many tiny chunks (400). Parsing a chunk takes 10 us, whatever its size.
- Its client does not read what the server writes. The limit applies while the transport holds more than 64 KiB, or the
rest of a complete answer. The client must then read `min_read_bytes_per_s` on average, with a grace of `write_grace_s`.
`close` would wait for a client that never reads, so the transport is aborted. The application sees a disconnect,
cancels the work of the request and returns its permits.
- Its client has closed it (see `has_left`) before its request was read. The request is dropped.

`body_limit.py` limits the time of the body, because only the application knows whether it waits for the body.

The protocol uses h11 rather than httptools, because uvicorn always installs h11.
"""

import http
import ipaddress
import json
import re
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from slora_api.core.errors import BadRequest, ErrorAnswer, HeadersTooLarge, RequestTooSlow, describe_error
from slora_api.core.fair_slots import reserved_slots
from slora_api.core.host_board import HostBoard, Tally
from slora_api.core.rate_limited_log import get_rate_limited_logger

_log = get_rate_limited_logger(__name__)

# A batch closes 1 in 64 connections. Connections are closed in batches, because each search for idle ones visits all
# connections. That takes 5 ms for 4,096 connections.
_BATCHES = 64
# A process waits only if it has at least an eighth more connections than another process. Without this margin,
# processes would wait for one another when many clients connect at once.
_FAIR_MARGIN = 8
# A home network usually has its own /64 prefix of IPv6, so all addresses of a /64 count as one client.
_IPV6_PREFIX = 64


# A body may have this many chunks of any size, and one more for each so many bytes.
_FREE_CHUNKS, _MIN_CHUNK_BYTES = 1024, 64
# Seconds for which the rest of such a body is read and dropped.
_DROPPED_S = 2.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one API process.

    max_connections: the maximum number of open connections of the process.
    max_per_address: the maximum number of open connections of one client address to all processes. None: three quarters
    of the connections of all processes together.
    num_processes: API processes of the host.
    idle_s: how long a connection may stay open without a request. Load balancers commonly keep idle connections for 60
    s. The default is longer, so that the load balancer closes the connection first.
    head_s: the time limit from the first byte of a request to the end of its headers.
    write_grace_s, min_read_bytes_per_s: how slowly a client may read its answer (see `MinRateTimeout`). Time counts
    only while more than 64 KiB wait to be sent, or while the rest of a complete answer is sent. The default rate, 16
    KiB/s, is slower than any link that can carry a stream.
    sweep_s: how often these limits are checked.
    """

    max_connections: int = 4096
    max_per_address: int | None = None
    num_processes: int = 1
    idle_s: float = 75.0
    head_s: float = 10.0
    write_grace_s: float = 20.0
    min_read_bytes_per_s: float = 16 << 10
    sweep_s: float = 1.0

    @property
    def per_address(self) -> int:
        """The maximum number of open connections of one client address."""
        num_connections = self.num_processes * self.max_connections
        if self.max_per_address is not None:
            return min(self.max_per_address, num_connections)
        return num_connections - reserved_slots(num_connections)


class Connections:
    """Counts the open connections of this process by client address, and makes room for new ones.

    A connection without a request uses a descriptor and serves no client, so it is closed first. A connection is idle
    until the whole head of a request has arrived. It is idle again when the answer is complete, or while the server
    only drops the rest of the body. So a client without an API key cannot keep a connection busy, and cannot keep other
    clients out.

    If the server is full when a new connection arrives, a batch of idle connections is closed. The batch is taken from
    the address with the most connections, longest idle first. An address at its own limit replaces only its own idle
    connections. If no connection is idle, the new one is refused.

    The limit of an address holds for all API processes of the host. A process closes only its own idle connections, so
    an address at its limit may be refused while another process has an idle one.

    board: None if this process is the only one.
    """

    def __init__(self, limits: ConnectionLimits, board: HostBoard | None = None) -> None:
        self.limits = limits
        self._board = board
        self._on_host = Tally() if board is None else board.tally("connections")
        self._addresses: dict[HttpProtocol, str] = {}
        self._num_of: Counter[str] = Counter()
        # Addresses for which a search found no idle connection; None stands for all addresses. The next sweep clears
        # the set.
        self._without_idle: set[str | None] = set()

    def __len__(self) -> int:
        return len(self._addresses)

    def has_more_than_another(self) -> bool:
        """Whether another API process that is ready has clearly fewer connections."""
        least = None if self._board is None else self._board.least_connections_elsewhere()
        return least is not None and len(self) > least + least // _FAIR_MARGIN

    def make_room(self, host: str) -> str | None:
        """Makes room for a connection from `host`, if necessary by closing idle ones. Returns the reason if the
        connection must be refused, else None.
        """
        address, per_address = _group(host), self.limits.per_address
        num_open = self._on_host.count_of(address)
        if num_open >= per_address and not self.close_idle(address):
            return (
                f"Your address has {num_open} connections to this server, all with "
                f"requests in progress. The limit is {per_address} (max_connections_per_address). "
                "Reuse connections, or close some."
            )
        if len(self) >= self.limits.max_connections and not self.close_idle():
            _log.warning(
                "all %d connections have requests in progress; new connections are refused", len(self)
            )
            return (
                f"All {len(self)} connections of this server have requests in progress. Connect "
                "again shortly."
            )
        return None

    def add(self, connection: "HttpProtocol", host: str) -> None:
        """Counts a connection from `host`."""
        address = _group(host)
        self._addresses[connection] = address
        self._num_of[address] += 1
        self._share(address, 1)

    def discard(self, connection: "HttpProtocol") -> None:
        """Removes a closed connection. Does nothing if the connection is unknown."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._num_of[address] -= 1
            if not self._num_of[address]:
                del self._num_of[address]
            self._share(address, -1)

    def close_idle(self, address: str | None = None) -> int:
        """Closes a batch of idle connections of `address`, or of all addresses. Returns how many it closed."""
        if address in self._without_idle:
            return 0
        count = 1 + (len(self) if address is None else self._num_of[address]) // _BATCHES
        idle = [
            (-self._num_of[own], since, connection)
            for connection, own in self._addresses.items()
            if address in (None, own) and (since := connection.idle_since) is not None
        ]
        chosen = nsmallest(count, idle, key=lambda entry: entry[:2])
        if not chosen:
            self._without_idle.add(address)
        for _, _, connection in chosen:
            self.discard(connection)
            connection.close_now()
        return len(chosen)

    def sweep(self, now_s: float) -> None:
        """Closes connections whose clients have kept the server waiting for too long."""
        self._without_idle.clear()
        for connection in list(self._addresses):
            connection.sweep(now_s)

    def _share(self, address: str, count: int) -> None:
        self._on_host.add(address, count)
        if self._board is not None:
            self._board.set_connections(len(self))


def _group(host: str) -> str:
    """Returns the address or the network whose connections are counted together."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


class MinRateTimeout:
    """A timeout with a minimum rate: `left_s` is the time for which a slow peer may still keep the server waiting.

    `left_s` starts at `grace_s`. Waiting for the peer reduces it. Each byte that moves gives back 1 / `bytes_per_s`
    seconds, but `left_s` never exceeds `grace_s`. Three bounds follow. A peer that stops is disconnected after
    `grace_s`. A peer that is slower than `bytes_per_s` is disconnected somewhat later. N bytes never take more than
    `grace_s + N / bytes_per_s` seconds of waiting.

    Example with 20 s and 128 KiB/s: 512 MiB may take 20 + 4096 s. A client that sends 64 KiB/s is disconnected after 40
    s.
    """

    __slots__ = ("_bytes_per_s", "_grace_s", "left_s")

    def __init__(self, grace_s: float, bytes_per_s: float) -> None:
        self.left_s = grace_s
        self._grace_s = grace_s
        self._bytes_per_s = bytes_per_s

    def charge(self, waited_s: float, num_bytes: int) -> None:
        """Charges a wait of `waited_s` seconds in which `num_bytes` moved."""
        self.left_s = min(self._grace_s, self.left_s - waited_s + num_bytes / self._bytes_per_s)

    def credit(self, seconds: float) -> None:
        """Gives back `seconds` during which the server did not wait for the peer."""
        self.left_s = min(self._grace_s, self.left_s + seconds)


# Parsing a head of this size on the event loop takes up to 10 ms, if it consists of the shortest headers.
_MAX_HEAD_BYTES = 32 << 10
# The end of a head as h11 finds it, a line end without CR, and a line that continues the one before it.
_BLANK_LINE, _BARE_LF, _FOLDED = re.compile(rb"\n\r?\n"), re.compile(rb"(?<!\r)\n"), re.compile(rb"\n[ \t]")
_LENGTHS = re.compile(rb"\n(content-length|transfer-encoding)[ \t]*:")
# struct linger: enabled, with a timeout of zero, so that closing the socket resets the connection.
_NO_LINGER = struct.pack("ii", 1, 0)


# The states of a TCP connection that the client has reset or closed: TCP_CLOSE and TCP_CLOSE_WAIT.
_LEFT = frozenset({7, 8})
_READS = (b"GET ", b"HEAD")
_START_BYTES = 4


def has_left(connection: socket.socket, start: bytes) -> bool:
    """Whether the client has closed the connection, so that the request that begins with `start` is dropped.

    A client may close only its writing side and still read. TCP shows no difference. uvicorn ends the request of such a
    client as soon as it reads the end of the stream, and nginx does so for a request that it passes on, because nearly
    all such clients have gone. By then, the request has been parsed and authenticated, and its prompt is on its way to
    the engine, so it is dropped earlier here. A GET or HEAD is answered, because it computes nothing, and because
    health checks such as `printf ... | nc` close their writing side at once.
    """
    if start.startswith(_READS):
        return False
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _LEFT


def encode_answer(answer: ErrorAnswer) -> bytes:
    """Encodes an error as a complete HTTP/1.1 answer that closes the connection."""
    body = json.dumps(answer.body).encode()
    headers = {
        **answer.headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body


class _Reader:
    """Measures how long the server waits for the client to read the answer."""

    __slots__ = ("_num_buffered", "_rested_at", "_since", "_timeout")

    def __init__(self, limits: ConnectionLimits, now_s: float) -> None:
        self._timeout = MinRateTimeout(limits.write_grace_s, limits.min_read_bytes_per_s)
        self._since: float | None = None
        self._rested_at = now_s
        self._num_buffered = 0

    def wait(self, now_s: float, num_buffered: int) -> None:
        """Notes that the server now waits for the client to read the buffered bytes."""
        if self._since is None:
            self._timeout.credit(now_s - self._rested_at)
            self._since, self._num_buffered = now_s, num_buffered

    def account(self, now_s: float, num_buffered: int) -> float:
        """Charges the wait so far. Returns the seconds for which the client may still keep the server waiting."""
        if self._since is not None:
            self._timeout.charge(now_s - self._since, max(0, self._num_buffered - num_buffered))
            self._since, self._num_buffered = now_s, num_buffered
        return self._timeout.left_s

    def resume(self, now_s: float, num_buffered: int) -> None:
        """Notes that the server no longer waits; a no-op if it did not wait."""
        if self._since is not None:
            self.account(now_s, num_buffered)
            self._since, self._rested_at = None, now_s


# The headers of an answer from which h11 derives how its body ends.
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})


class _Connection(h11.Connection):
    """h11's connection. It holds back the head of an answer until the first bytes of the body, so that one system call
    sends both.

    ASGI asks servers to send the head only with the first message of the body.

    fault: why the rest of the body is not parsed.
    """

    fault: str | None = None
    _head = b""
    _is_chunked = False  # Whether the body of the present answer is sent in chunks.
    _num_chunks = _num_bytes = 0

    def next_event(self) -> Any:
        """Raises RemoteProtocolError if the body has too many tiny chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _MIN_CHUNK_BYTES:
                self.fault = (
                    f"The body has {self._num_chunks} chunks with {self._num_bytes} bytes in all. After {_FREE_CHUNKS} "
                    f"chunks, they must have {_MIN_CHUNK_BYTES} bytes on average. Send larger chunks, or the body with "
                    "a Content-Length."
                )
                raise h11.RemoteProtocolError(self.fault)
        return event

    def send(self, event: Any) -> Any:
        """Returns the bytes to send. Writes the chunks of a body, and the headers of an answer that has none of
        `_FRAMING`, in place of h11, which takes five times as long.
        """
        head, self._head = self._head, b""
        if type(event) is h11.Data and self._is_chunked and self.our_state is h11.SEND_BODY:
            return b"%b%x\r\n%b\r\n" % (head, len(event.data), event.data) if event.data else head
        if type(event) is not h11.Response:
            sent = super().send(event)
            return head + sent if head and sent is not None else sent
        self._head = self._write_head(event)
        self._is_chunked = b"\r\nTransfer-Encoding: chunked\r\n" in self._head
        return b""

    def _write_head(self, event: h11.Response) -> bytes:
        headers = event.headers.raw_items()
        if any(name.lower() in _FRAMING for name, _ in headers):
            return super().send(event)
        # h11 checks all other headers again for each header that it adds.
        bare = h11.Response(status_code=event.status_code, headers=[], reason=event.reason)
        status, _, framing = super().send(bare).partition(b"\r\n")
        return b"%b\r\n%b%b" % (status, b"".join([b"%b: %b\r\n" % header for header in headers]), framing)


class HttpProtocol(H11Protocol):
    """uvicorn's protocol of one connection, with the deadlines of `ConnectionLimits`."""

    def __init__(self, connections: Connections, config: Config, server_state: ServerState) -> None:
        super().__init__(config, server_state, app_state={})
        self.conn = self._connection = _Connection(h11.SERVER)
        self._all = connections
        self._limits = connections.limits
        self._quiet_at = self.loop.time()
        self._head_at: float | None = None
        self._reader = _Reader(self._limits, self._quiet_at)

    @property
    def idle_since(self) -> float | None:
        """Monotonic time in seconds at which the connection became idle; None while it has a request, and while asyncio
        has not opened its transport yet.
        """
        if self.transport is None:
            return None
        return self._quiet_at if self._awaits_request or self._drops_body else None

    @property
    def _awaits_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _drops_body(self) -> bool:
        """Whether the answer began before the body ended, so that the rest of the body is dropped."""
        return self.cycle is not None and self.cycle.response_started and self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._connection.fault is not None:
            return
        start = self._find_start(data)
        if start is not None and has_left(self.transport.get_extra_info("socket"), start):
            self.transport.abort()
            return
        super().data_received(data)
        self._watch_head()

    def _find_start(self, data: bytes) -> bytes | None:
        """Returns how the request begins of which `data` is the next part; None if it belongs to a later request."""
        if self.conn.their_state is h11.SEND_BODY:
            return f"{self.scope['method']} ".encode()
        if self.conn.their_state is not h11.IDLE:
            return None
        received, _ = self.conn.trailing_data
        return received[:_START_BYTES] + data[:_START_BYTES]

    def handle_events(self) -> None:
        """Parses the received bytes. Refuses every head that is too large. h11 would accept such a head if it is
        complete.
        """
        if self.conn.their_state is h11.IDLE and self._is_head_too_large():
            error = HeadersTooLarge(
                f"The request line and the headers are larger than {_MAX_HEAD_BYTES} bytes. Send fewer or shorter "
                "headers; a prompt belongs in the body."
            )
            self.transport.write(encode_answer(describe_error(error)))
            self.transport.close()
            return
        has_two_lengths = False
        if self.conn.their_state is h11.IDLE:
            if (fault := self._find_fault()) is not None:
                self.transport.write(encode_answer(describe_error(BadRequest(fault))))
                self.transport.close()
                return
            has_two_lengths = len(set(_LENGTHS.findall(self._head().lower()))) > 1
        super().handle_events()
        if has_two_lengths and self.cycle is not None:
            # h11 reads the body by Transfer-Encoding. A proxy in front may have read it by Content-Length, so what
            # follows may not be a request of the same client.
            self.cycle.keep_alive = False
            self.headers.append((b"connection", b"close"))

    def send_400_response(self, msg: str) -> None:
        """Says what is wrong with the body, unless its answer has begun, and ends the request. The rest is dropped for
        a moment, because a client that is still sending would not read the answer on a closed connection.
        """
        if self._connection.fault is None or self.cycle is None:
            super().send_400_response(msg)
            return
        if not self.cycle.response_started:
            self.transport.write(encode_answer(describe_error(BadRequest(self._connection.fault))))
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.flow.resume_reading()
        self.loop.call_later(_DROPPED_S, self.transport.abort)

    def _head(self) -> bytes:
        """The received part of the next request's head."""
        received, _ = self.conn.trailing_data
        end = _BLANK_LINE.search(received)
        return received if end is None else received[: end.end()]

    def _find_fault(self) -> str | None:
        """Says what is wrong with the lines of the head. h11 accepts both faults, and proxies read them differently."""
        head = self._head()
        if _BARE_LF.search(head):
            return "A line of the request's head ends without CR; each line must end with CR LF."
        if _FOLDED.search(head):
            return "A header continues on another line, which is obsolete; send each header in one line."
        return None

    def _is_head_too_large(self) -> bool:
        received, _ = self.conn.trailing_data
        if len(received) <= _MAX_HEAD_BYTES:
            return False
        head = received[:_MAX_HEAD_BYTES]
        return b"\n\r\n" not in head and b"\n\n" not in head

    def on_response_complete(self) -> None:
        self._quiet_at = self.loop.time()
        # If the client is still sending the body, the application has answered without it and does not need the rest.
        drops_body = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if drops_body:
            self.transport.close()
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.wait(self.loop.time(), self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.resume(self.loop.time(), self.transport.get_write_buffer_size())

    def close_now(self) -> None:
        """Closes the connection without waiting for its client."""
        if self.transport.get_write_buffer_size():
            self._reset()
        else:
            self.transport.close()

    def sweep(self, now_s: float) -> None:
        """Ends the connection if one of its deadlines has passed."""
        if self.transport is None:
            return
        if self._is_stuck(now_s):
            _log.warning("a connection was closed, because its client does not read its answer")
            self._reset()
        elif self._head_at is not None and now_s - self._head_at > self._limits.head_s:
            error = RequestTooSlow(
                f"The headers of the request were not complete {self._limits.head_s:g} s after their first byte. Send "
                "them at once, on a new connection."
            )
            self.transport.write(encode_answer(describe_error(error)))
            self.close_now()
        elif self.cycle is None and now_s - self._quiet_at > self._limits.idle_s:
            self.close_now()

    def _is_stuck(self, now_s: float) -> bool:
        """Whether buffered bytes have waited for longer than the client's timeout."""
        num_buffered = self.transport.get_write_buffer_size()
        ends_here = self._awaits_request or self.transport.is_closing()
        if num_buffered and (self.flow.write_paused or ends_here):
            self._reader.wait(now_s, num_buffered)
            return self._reader.account(now_s, num_buffered) <= 0
        self._reader.resume(now_s, num_buffered)
        return False

    def _reset(self) -> None:
        """Resets the connection. This drops the bytes that the client has not read, which the kernel would otherwise
        keep for minutes.
        """
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _watch_head(self) -> None:
        """Records when the head of a request began to arrive, or None once the head is complete."""
        if not self._awaits_request or not self.conn.trailing_data[0]:
            self._head_at = None
        elif self._head_at is None:
            self._head_at = self.loop.time()
