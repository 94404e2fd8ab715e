"""Bounds the body of each request while it arrives.

Four properties of a body are bounded: its size (413), its rate (408), its encoding (415), and its memory. The memory
has a bound for each tenant (429) and for all tenants together (503).

The rate is limited by a `MinRateTimeout`. Only the time in which the application waits for the client counts. A
client that stops sending is thus refused after 20 s. A body takes at most 20 s plus its size limit divided by the
minimum rate.

A server that closes a connection with unread bytes in its buffers sends a reset, which can discard the answer before
the client reads it. Therefore, after an early answer (401, 413, 422, ...), the rest of the body is read and dropped for
a moment before the connection is closed. nginx does the same with `lingering_close`.

The memory of a body is held until its request ends. This module knows the routes whose bodies may be large: uploads
(written to disk), generation and tokenizing. All other routes accept small JSON objects, which FastAPI parses in one go
on the event loop.
"""

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slora_api.core.errors import (
    ApiError,
    BadRequest,
    BodyEncoded,
    BodyTooLarge,
    RequestTooSlow,
    error_response,
)
from slora_api.core.host_board import HostBoard
from slora_api.http.http_protocol import MinRateTimeout
from slora_api.http.permit_pool import PermitPool
from slora_api.http.request_bounds import MAX_SMALL_BODY_BYTES

# Mobile connections are interrupted for several seconds when the phone changes cells.
_GRACE_S = 20.0
# All bodies together may take the memory of this many bodies of the maximum size.
_MAX_BODIES = 64
_LINGER_S = 5.0
# The maximum size of a form's multipart headers and small fields, besides its file.
_FORM_BYTES = 1 << 14
_LINGER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The size limit of bodies for each path, and the minimum rate for all paths.

    max_upload_bytes: limit for `upload_paths`. max_file_bytes: limit of the file in a form sent to `file_path`; the
    form may have further small fields. max_body_bytes: limit for `generation_paths`. All other paths have the limit
    MAX_SMALL_BODY_BYTES. find_max_model_len: returns the context of the model for errors; None while it is unknown.
    """

    max_body_bytes: int
    max_upload_bytes: int
    min_bytes_per_s: float
    grace_s: float = _GRACE_S
    max_file_bytes: int = 0
    upload_paths: re.Pattern[str] = re.compile(r"/v1/adapters|/admin/tenants/[^/]+/adapters")
    file_path: str = "/v1/files"
    find_max_model_len: Callable[[], int | None] = lambda: None
    generation_paths: frozenset[str] = frozenset(
        {
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses/input_tokens",
            "/v1/embeddings",
            "/v1/classify",
            "/classify",
            "/v1/score",
            "/v1/rerank",
            "/rerank",
            "/tokenize",
            "/detokenize",
        }
    )

    def is_upload(self, scope: Scope) -> bool:
        """Whether the body is an upload, which is written to the disk instead of the memory."""
        return self.upload_paths.fullmatch(scope["path"]) is not None

    def find(self, scope: Scope) -> tuple[int, str]:
        """Returns the maximum number of bytes for this request's path, and the setting that limits them."""
        if scope["path"] in self.generation_paths:
            return self.max_body_bytes, "max_body_bytes"
        if self.is_upload(scope):
            return self.max_upload_bytes, "max_upload_bytes"
        if scope["path"] == self.file_path:
            return self.max_file_bytes + _FORM_BYTES, "max_file_bytes"
        if self.max_body_bytes > MAX_SMALL_BODY_BYTES:
            return MAX_SMALL_BODY_BYTES, "the limit for all routes except uploads, generation and tokenizing"
        return self.max_body_bytes, "max_body_bytes"

    def too_large(self, scope: Scope) -> BodyTooLarge:
        """Returns the error for a body that exceeds the limit of this request's path."""
        limit_bytes, setting = self.find(scope)
        return BodyTooLarge(
            limit_bytes, setting, self.find_max_model_len() if setting == "max_body_bytes" else None
        )

    def memory(self, board: HostBoard | None = None) -> PermitPool:
        """Returns the memory for all bodies in all API processes, as a pool with one permit for each byte. The default
        is 256 MiB. One tenant may use at most half of this memory.
        """
        num_bytes = _MAX_BODIES * self.max_body_bytes
        return PermitPool(
            num_bytes,
            num_bytes // 2,
            "bytes of requests in memory",
            "32 times max_body_bytes",
            tally=board.tally("body bytes") if board else None,
        )

    def too_slow(self, num_bytes: int, waited_s: float) -> RequestTooSlow:
        """Returns the error for a slow body, of which only `num_bytes` arrived while the server waited `waited_s`
        seconds.
        """
        return RequestTooSlow(
            f"The body arrived too slowly: {num_bytes} bytes in {waited_s:.0f} s. After "
            f"{self.grace_s:g} s a body must average {self.min_bytes_per_s:g} bytes/s "
            "(min_body_bytes_per_s). Send it again over a faster connection, or ask the server's "
            "operator to lower the rate."
        )


class _BodyReader:
    """Receives the body of one request. refusal: the error that ended the body early, if any."""

    def __init__(self, receive: Receive, scope: Scope, limits: BodyLimits, memory: PermitPool) -> None:
        self._receive = receive
        self._scope = scope
        self._limits = limits
        self._memory = memory
        self._held = ExitStack()
        self._limit_bytes, _ = limits.find(scope)
        self._is_on_disk = limits.is_upload(scope) or scope["path"] == limits.file_path
        self._timeout = MinRateTimeout(limits.grace_s, limits.min_bytes_per_s)
        self._waited_s = 0.0
        self.num_bytes = 0
        self.complete = False
        self.refusal: ApiError | None = None

    async def receive(self) -> Message:
        """Returns the next part of the body. After the last part, waits for the client's disconnect and returns it.

        Raises BodyTooLarge, RequestTooSlow, TenantBusy, ServerBusy.
        """
        if self.complete:
            return await self._receive()
        try:
            return await self._receive_part()
        except ApiError as error:
            self.refusal = error
            raise

    async def _receive_part(self) -> Message:
        started_at, num_before = time.monotonic(), self.num_bytes
        try:
            async with asyncio.timeout(max(0.0, self._timeout.left_s)):
                message = await self._next()
        except TimeoutError:
            self._waited_s += time.monotonic() - started_at
            raise self._limits.too_slow(self.num_bytes, self._waited_s) from None
        waited_s, num_new = time.monotonic() - started_at, self.num_bytes - num_before
        self._waited_s += waited_s
        self._timeout.charge(waited_s, num_new)
        if self.num_bytes > self._limit_bytes:
            raise self._limits.too_large(self._scope)
        if num_new and not self._is_on_disk:
            self._held.enter_context(self._memory.hold(_tenant(self._scope), num_new))
        return message

    def close(self) -> None:
        """Releases the memory of the body."""
        self._held.close()

    async def drop_rest(self) -> None:
        """Reads and drops the rest of the body, up to a time limit and a size limit."""
        limit = self.num_bytes + _LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not self.complete and self.num_bytes < limit:
                    await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.complete = True
        else:
            self.num_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        return message


class BodyLimitMiddleware:
    """ASGI middleware that applies the limits to each body. It wraps all layers that may read a body. board: None if
    this process is the only one.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, board: HostBoard | None = None) -> None:
        self._app = app
        self._limits = limits
        self._memory = limits.memory(board)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _BodyReader(receive, scope, self._limits, self._memory)
        lingering = _lingering(send, body)
        if (refusal := _refuse_head(scope, self._limits)) is not None:
            await error_response(refusal)(scope, receive, lingering)
            return
        answered = False

        async def guarded(message: Message) -> None:
            """Passes the application's answer on, unless the body was refused before the answer began."""
            nonlocal answered
            if body.refusal is None or answered:
                answered = answered or message["type"] == "http.response.start"
                await lingering(message)

        try:
            await self._app(scope, body.receive, guarded)
        except ApiError as error:
            if error is not body.refusal:
                raise
        finally:
            body.close()
        if body.refusal is not None and not answered:
            await error_response(body.refusal)(scope, receive, lingering)


def _tenant(scope: Scope) -> str:
    """Returns the tenant of the request's API key; empty for the operator."""
    tenant: str | None = getattr(scope.get("state", {}).get("caller"), "tenant", None)
    return tenant or ""


def _refuse_head(scope: Scope, limits: BodyLimits) -> ApiError | None:
    """Returns an error if the URL or the headers show that the request cannot be answered. The HTTP parser has checked
    Content-Length.
    """
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        # PostgreSQL refuses a NUL in text, and SQLite ends a pattern there.
        return BadRequest("The URL contains a NUL character (%00), which no name has; remove it.")
    headers = Headers(scope=scope)
    num_bytes = int(headers.get("content-length", "0"))
    if num_bytes > limits.find(scope)[0]:
        return limits.too_large(scope)
    encoding = headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("", "identity") and (num_bytes or "transfer-encoding" in headers):
        return BodyEncoded(encoding)
    return None


def _lingering(send: Send, body: _BodyReader) -> Send:
    """Wraps `send`. If an answer ends before the request's body has arrived, the end of the answer is held back until
    `drop_rest` has dropped the rest of the body.
    """

    async def send_lingering(message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not last or body.complete:
            await send(message)
            return
        await send({**message, "more_body": True})
        await body.drop_rest()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_lingering
