import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from slora_api.server.body_limit import BodyLimit, BodyLimits
from tests.api.live_server import live_server

LIMIT, UPLOAD_LIMIT = 1000, 5000


async def count_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes in the body, or with 401 before it reads any."""
    if scope["path"] == "/early":
        response: Response = JSONResponse({"early": True}, 401)
    else:
        response = JSONResponse({"bytes": len(await Request(scope, receive).body())})
    await response(scope, receive, send)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(BodyLimit(count_bytes, BodyLimits(LIMIT, UPLOAD_LIMIT))) as address:
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
    with socket.create_connection((address[0], int(address[1])), timeout=20) as connection:
        connection.sendall(b"POST /any HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        # The body is not complete, and never will be.
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(("path", "status"), [("/early", 401), ("/any", 413)])
def test_an_early_answer_reaches_a_client_that_sends_megabytes_first(
    url: str, path: str, status: int
) -> None:
    for _ in range(5):
        body = (b"x" * (1 << 20) for _ in range(20))
        assert httpx.post(url + path, content=body).status_code == status
