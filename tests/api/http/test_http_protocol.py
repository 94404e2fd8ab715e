"""Timeouts of a connection, over real sockets, with short limits."""

import asyncio
import re
import socket
import time
from asyncio import selector_events
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from slora_api.http.http_protocol import ConnectionLimits
from tests.api.http.test_acceptor import connect, is_closed
from tests.api.live_server import live_server
from tests.api.served import wait_until

# Long enough that a patient client never exceeds these limits, and short enough that a test waits less than a second.
LIMITS = ConnectionLimits(
    idle_s=1.0, head_s=0.5, write_grace_s=0.5, min_read_bytes_per_s=1 << 20, sweep_s=0.05
)
PART = bytes(1 << 16)


class LargeResponseApp:
    """An application that sends bytes on /endless for ever and 4 MiB on /large. It answers other paths at once."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.num_disconnected = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in ("/endless", "/large"):
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/large":
            await send({"type": "http.response.body", "body": bytes(4 << 20)})
            return
        await receive()
        watch = asyncio.ensure_future(receive())
        part: Message = {"type": "http.response.body", "body": PART, "more_body": True}
        while not watch.done():
            await send(part)
            self.num_parts += 1
            await asyncio.sleep(0)
        self.num_disconnected += 1


@pytest.fixture
def app() -> LargeResponseApp:
    return LargeResponseApp()


@pytest.fixture
def url(app: LargeResponseApp) -> Iterator[str]:
    with live_server(app, limits=LIMITS) as address:
        yield address


def request(url: str, path: str, stack: ExitStack) -> socket.socket:
    connection = connect(url, stack)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return connection


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the end of the connection. A reset counts as the end."""
    connection.settimeout(30)
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_a_stream_that_is_never_read_is_ended_and_its_work_is_cancelled(
    app: LargeResponseApp, url: str
) -> None:
    """Born from a bug: four such streams held all places for 90 s."""
    with ExitStack() as stack:
        streams = [request(url, "/endless", stack) for _ in range(4)]
        wait_until(lambda: app.num_disconnected == 4)
        # The client's kernel has buffered some data. The server has buffered hardly any.
        assert app.num_parts < 4 * 200
        assert all(len(read_all(stream)) < 200 * len(PART) for stream in streams)


def test_a_stream_that_is_read_may_last_longer_than_the_grace(app: LargeResponseApp) -> None:
    # A grace that a reader on a busy machine does not miss.
    limits = replace(LIMITS, write_grace_s=2.0)
    with live_server(app, limits=limits) as url, httpx.stream("GET", url + "/endless") as answer:
        started_at = time.monotonic()
        for part in answer.iter_raw():
            assert part
            if time.monotonic() - started_at > 2 * limits.write_grace_s:
                break
            time.sleep(0.01)
    wait_until(lambda: app.num_disconnected == 1)


def test_the_rest_of_a_response_is_dropped_if_the_client_does_not_read(url: str) -> None:
    """Born from a bug: closing the connection after its timeout waited for the client for ever."""
    with ExitStack() as stack:
        silent = request(url, "/large", stack)
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_until(lambda: httpx.get(url + "/").status_code == 200 and is_ended(silent))
        assert len(read_all(silent)) < 4 << 20
        assert len(httpx.get(url + "/large").content) == 4 << 20


def test_the_head_of_an_answer_is_sent_with_its_first_bytes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    write = selector_events._SelectorSocketTransport.write  # type: ignore[attr-defined]

    def record(transport: asyncio.Transport, data: bytes) -> None:
        if data:
            sent.append(bytes(data))
        write(transport, data)

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write", record)  # type: ignore[attr-defined]
    assert httpx.get(url + "/").json() == {"status": "ok"}
    (answer,) = sent
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'{"status":"ok"}')


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has reset the connection, even if a part of the answer is still unread on this side."""
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == 7  # TCP_CLOSE


def test_an_incomplete_request_head_is_a_408(url: str) -> None:
    with ExitStack() as stack:
        connection = connect(url, stack)
        connection.sendall(b"GET / HTTP/1.1\r\n")
        answer = b""
        connection.settimeout(0.05)
        for _ in range(600):
            connection.sendall(b"X: x\r\n")
            try:
                answer = connection.recv(65536)
                break
            except TimeoutError:
                pass
        answer += read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b"Connection: close" in answer
    assert b'"code": "request_too_slow"' in answer and b"not complete 0.5 s after" in answer


@pytest.mark.parametrize("earlier", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize(("num_headers", "status"), [(2_000, b"200"), (4_000, b"431")])
def test_a_complete_request_head_above_the_limit_is_a_431(
    url: str, earlier: bytes, num_headers: int, status: bytes
) -> None:
    """Born from a fuzzer: h11 limits only incomplete heads, and 7,000 headers in one segment took 21 ms."""
    headers = b"".join(b"x%d: y\r\n" % at for at in range(num_headers))
    with ExitStack() as stack:
        connection = connect(url, stack)
        connection.sendall(
            earlier + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n"
        )
        answer = read_all(connection)
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
    assert statuses == [b"200"] * bool(earlier) + [status]
    assert (b"larger than 32768 bytes" in answer) == (status == b"431")


def test_the_second_head_of_a_connection_has_its_own_deadline(url: str) -> None:
    with ExitStack() as stack:
        connection = connect(url, stack)
        for _ in range(3):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HT")
        assert read_all(connection).startswith(b"HTTP/1.1 408")


def test_a_connection_without_a_request_is_closed_without_a_response(url: str) -> None:
    with ExitStack() as stack:
        fresh, used = connect(url, stack), request(url, "/", stack)
        assert read_all(fresh) == b""
        assert read_all(used).startswith(b"HTTP/1.1 200")


def test_a_body_that_no_route_reads_does_not_keep_its_connection_open(url: str) -> None:
    with ExitStack() as stack:
        connection = connect(url, stack)
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")
        wait_until(lambda: is_closed(connection))


def test_requests_that_are_not_http_do_not_fill_the_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        for request_line in (
            b"\x16\x03\x01 TLS\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: " + b"9" * 6000 + b"\r\n\r\n",
        ):
            for _ in range(5):
                connection = connect(url, stack)
                connection.sendall(request_line)
                assert read_all(connection).startswith(b"HTTP/1.1 400")
    assert len(caplog.records) <= 1


def exchange(url: str, request: str) -> bytes:
    with ExitStack() as stack:
        connection = connect(url, stack)
        connection.sendall(request.encode())
        return read_all(connection)


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\nHost: x\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\n\n",
        "GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n\tContent-Length: 5\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    ],
)
def test_a_head_that_proxies_read_differently_is_refused(url: str, head: str) -> None:
    answer = exchange(url, head)
    assert answer.count(b"HTTP/1.1 400 ") == 1 and answer.count(b"HTTP/1.1 200 ") == head.count("GET") - 1


@pytest.mark.parametrize(
    "lengths",
    ["Content-Length: 5\r\nTransfer-Encoding: chunked", "transfer-encoding: chunked\r\ncontent-length: 5"],
)
def test_a_connection_ends_after_a_request_with_two_lengths(url: str, lengths: str) -> None:
    next_request = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = exchange(url, f"POST / HTTP/1.1\r\nHost: x\r\n{lengths}\r\n\r\n0\r\n\r\n{next_request}")
    assert answer.count(b"HTTP/1.1 200 ") == 1 and b"connection: close" in answer.lower()


def test_a_body_of_many_tiny_chunks_is_refused_and_one_of_larger_or_fewer_chunks_is_not(url: str) -> None:
    """Born from 60,000 chunks of one byte, which held the event loop for half a second."""
    head = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    for count, size, status in ((60_000, 1, 400), (1000, 1, 200), (2000, 70, 200)):
        body = f"{size:x}\r\n{'x' * size}\r\n" * count + "0\r\n\r\n"
        answer = exchange(url, head + body)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert (b"64 bytes on average. Send larger chunks" in answer) == (status == 400)
