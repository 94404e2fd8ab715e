"""Random requests to a real server. `tests/api/fuzz/watched_server.py` lists the properties that must hold."""

import socket
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from tests.api.fuzz.requests import HttpRequest, http_requests, routes
from tests.api.fuzz.watched_server import WatchedServer, explain_answer
from tests.api.served import ADMIN_KEY

_QUICK, _SOAK = 80, 10_000
_SOAK_WARM_UP = 2_000
_WARM_UP = 20
_UNHEALTHY = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)


def test_every_route_is_fuzzed() -> None:
    assert len(routes()) > 25
    assert {"POST", "GET", "PUT", "PATCH", "DELETE"} == {method for method, _ in routes()}


def test_no_request_breaks_the_server(watched: WatchedServer, soak: bool) -> None:
    with watched.client() as tenant, watched.client(ADMIN_KEY) as operator:

        def send(request: HttpRequest) -> None:
            client = operator if request.is_operator else tenant
            headers = list(request.headers.items())
            answer = watched.send(
                request,
                lambda: client.request(request.method, request.path, content=request.body, headers=headers),
            )
            wrong = explain_answer(answer.status_code, answer.content, answer.headers.get("content-type", ""))
            assert wrong is None, f"{request}: {wrong}"

        def fuzz(num_cases: int) -> None:
            profile = settings(max_examples=num_cases, suppress_health_check=_UNHEALTHY, deadline=None)
            profile(given(http_requests())(send))()

        # The first requests of each kind import modules and allocate memory that stays: 24 MB in the first 2,000
        # requests, and 0.3 MB in each 2,000 after these.
        fuzz(_SOAK_WARM_UP if soak else _WARM_UP)
        watched.begin()
        fuzz(_SOAK if soak else _QUICK)
        watched.check()


@dataclass(frozen=True)
class RawRequest:
    content: bytes

    def __repr__(self) -> str:
        return f"RawRequest({self.content[:300]!r}, {len(self.content)} bytes)"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(repr(self))


_raw_requests = st.builds(
    lambda line, headers, body: RawRequest(
        line + b"\r\n" + b"".join(one + b"\r\n" for one in headers) + b"\r\n" + body
    ),
    st.sampled_from(
        [
            b"GET /healthz HTTP/1.1",
            b"GET /healthz HTTP/1.0",
            b"GET /healthz HTTP/9.9",
            b"POST /v1/completions HTTP/1.1",
            b"GET " + b"/a" * 40_000 + b" HTTP/1.1",
            b"GET /%00%ff%zz HTTP/1.1",
            b"PRI * HTTP/2.0",
            b"\x16\x03\x01\x02\x00\x01",
            b"",
            b"CONNECT a:1 HTTP/1.1",
        ]
    ),
    st.lists(
        st.sampled_from(
            [
                b"Host: a",
                b"Content-Length: 5",
                b"Content-Length: -1",
                b"Content-Length: 99999999999999999999",
                b"Content-Length: 1, 1",
                b"Transfer-Encoding: chunked",
                b"Transfer-Encoding: gzip, chunked",
                b"Expect: 100-continue",
                b"Connection: upgrade\r\nUpgrade: websocket",
                b"Authorization: Bearer \xff\x00",
                b": no name",
                b"folded: a\r\n b",
                b"x: " + b"y" * 70_000,
                b"\r\n".join(b"x%d: y" % at for at in range(2_000)),
            ]
        ),
        max_size=4,
    ),
    st.sampled_from(
        [b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", b"\x00" * 100]
    ),
)


def test_no_bytes_break_the_server(watched: WatchedServer, soak: bool) -> None:
    """Bytes that are not HTTP, or are almost HTTP, are refused or dropped. The server still answers other clients."""
    address = urlsplit(watched.served.url)
    assert address.hostname is not None and address.port is not None
    place = (address.hostname, address.port)

    def exchange(content: bytes) -> bytes:
        answer = b""
        with socket.create_connection(place, timeout=60) as connection, suppress(ConnectionError):
            connection.sendall(content)
            # The end of the body may never arrive, so the client closes its side. The server may be faster.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
        return answer

    def send(raw: RawRequest) -> None:
        answer = watched.send(raw, lambda: exchange(raw.content))
        assert not answer.startswith(b"HTTP/1.1 5"), (raw, answer[:300])

    profile = settings(
        max_examples=_SOAK // 10 if soak else 12, suppress_health_check=_UNHEALTHY, deadline=None
    )
    watched.begin()
    profile(given(_raw_requests)(send))()
    watched.check()
    with watched.client() as client:
        assert client.get("/healthz").status_code == 200
