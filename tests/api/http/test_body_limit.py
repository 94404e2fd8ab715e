import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from slora_api.http.body_limit import BodyLimitMiddleware, BodyLimits
from tests.api.live_server import live_server
from tests.api.platform import post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

LIMIT, UPLOAD_LIMIT = 1000, 5000
LIMITS = BodyLimits(LIMIT, UPLOAD_LIMIT, min_bytes_per_s=1000)
# Long enough for any busy machine if each byte gives time back, and soon over otherwise.
IMPATIENT = BodyLimits(LIMIT, UPLOAD_LIMIT, min_bytes_per_s=1000, grace_s=0.5)


async def count_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    """Returns the number of bytes in the body, or a 401 before reading any."""
    if scope["path"] == "/early":
        response: Response = JSONResponse({"early": True}, 401)
    else:
        response = JSONResponse({"bytes": len(await Request(scope, receive).body())})
    await response(scope, receive, send)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(BodyLimitMiddleware(count_bytes, LIMITS)) as address:
        yield address


@pytest.fixture(scope="module")
def impatient_url() -> Iterator[str]:
    with live_server(BodyLimitMiddleware(count_bytes, IMPATIENT)) as address:
        yield address


def chunks(size: int) -> Iterator[bytes]:
    """A body without a declared length."""
    for start in range(0, size, 100):
        yield b"x" * min(100, size - start)


@pytest.mark.parametrize("path", ["/any", "/v1/adapters"])
def test_a_body_of_exactly_the_limit_is_accepted_and_one_byte_more_is_not(url: str, path: str) -> None:
    limit = UPLOAD_LIMIT if path == "/v1/adapters" else LIMIT
    for size, status in ((limit, 200), (limit + 1, 413)):
        assert httpx.post(url + path, content=b"x" * size).status_code == status
        assert httpx.post(url + path, content=chunks(size)).status_code == status


def test_the_refusal_has_the_apis_form_and_names_the_limit(url: str) -> None:
    error = httpx.post(url + "/any", content=b"x" * 2000).json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == "body_too_large"
    assert "1000 bytes" in error["message"] and "max_body_bytes" in error["message"]


def test_413_comes_while_the_body_is_still_being_sent(url: str) -> None:
    address = url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as connection:
        connection.sendall(b"POST /any HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        # The rest of the body is never sent.
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(("path", "status"), [("/early", 401), ("/any", 413), ("/any?force=a%00b", 400)])
def test_an_early_response_reaches_a_client_that_is_still_sending(url: str, path: str, status: int) -> None:
    for _ in range(5):
        body = (b"x" * (1 << 20) for _ in range(20))
        assert httpx.post(url + path, content=body).status_code == status


def start_post(url: str, path: str) -> socket.socket:
    """Sends the head of a request whose body has LIMIT bytes."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def trickle(url: str, path: str, bytes_each: int) -> str:
    """Sends `bytes_each` bytes every 0.05 s until the server answers. Returns the answer."""
    with start_post(url, path) as connection:
        connection.settimeout(0.05)
        for _ in range(LIMIT // bytes_each):
            connection.sendall(b"x" * bytes_each)
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
            connection.settimeout(60)
            while not answer.endswith(b"}}"):
                answer += connection.recv(4096)
            return answer.decode()
    raise AssertionError("the whole body was taken without an answer")


@pytest.mark.parametrize("path", ["/any", "/v1/adapters"])
def test_a_body_that_comes_too_slowly_is_a_408_that_names_rate_and_remedy(
    impatient_url: str, path: str
) -> None:
    """Born from a bug: a client that sent a byte every 20 s held one of the four places for uploads for ever."""
    answer = trickle(impatient_url, path, 1)
    assert answer.startswith("HTTP/1.1 408") and '"code": "request_too_slow"' in answer
    assert "must average 1000 bytes/s (min_body_bytes_per_s). Send it again over a faster" in answer


def test_a_body_that_does_not_come_is_a_408(impatient_url: str) -> None:
    with start_post(impatient_url, "/any") as connection:
        connection.sendall(b"x")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("encoding", ["gzip", "identity, br", "GZIP"])
def test_a_body_with_a_content_encoding_is_a_415_that_names_it(url: str, encoding: str) -> None:
    """Born from a bug: the header was ignored, so compressed bytes were read as plain text."""
    for content in (b"x" * 10, chunks(10)):
        answer = httpx.post(url + "/any", content=content, headers={"Content-Encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "body_encoded")
        assert repr(encoding) in answer.json()["error"]["message"]
        assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_a_body_without_an_encoding_may_say_so(url: str, encoding: str) -> None:
    headers = {"Content-Encoding": encoding}
    assert httpx.post(url + "/any", content=b"x" * 10, headers=headers).json() == {"bytes": 10}
    # A request without a body has nothing to decode.
    assert httpx.get(url + "/any", headers={"Content-Encoding": "gzip"}).json() == {"bytes": 0}


def test_bodies_of_one_tenant_cannot_take_all_of_the_memory(tmp_path: Path) -> None:
    """Born from a bug: thousands of connections of one key could each hold 4 MiB of an unfinished body."""
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path, engine, max_body_bytes=LIMIT) as platform, ExitStack() as stack:
        greedy, honest = platform.key("greedy"), platform.key("honest")
        host, port = platform.url.removeprefix("http://").split(":")
        held = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(33)
        ]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {greedy}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {LIMIT}\r\n\r\n"
        for connection in held:
            connection.sendall(head.encode() + b" " * (LIMIT - 1))
        (refused,), _, _ = select.select(held, [], [], 60)
        answer = refused.recv(4096).decode()
        assert answer.startswith("HTTP/1.1 429") and "retry-after" in answer.lower()
        body = {"model": "base", "prompt": "x"}
        assert post(platform, honest, "/v1/completions", body).status_code == 200
        for connection in held:
            connection.close()
        assert post(platform, greedy, "/v1/completions", body).status_code == 200
