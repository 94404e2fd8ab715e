"""Counts a request's body while it arrives and answers 413 as soon as it is over its limit.

A server that closes a connection with unread bytes in its buffers sends a reset, which can wipe out the answer before
the client reads it. So after any answer given early (401, 413, 422, ...) what still arrives is read and dropped for
a moment before the connection is closed, as nginx does with `lingering_close`.

Knows no route but the one for uploads, which has a limit of its own.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slora_api.errors import BodyTooLarge, error_response

__all__ = ["BodyLimit", "BodyLimits"]

_LINGER_S = 5.0
_LINGER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """max_upload_bytes holds for POST to `upload_path`, max_body_bytes for everything else."""

    max_body_bytes: int
    max_upload_bytes: int
    upload_path: str = "/v1/adapters"

    def refusal(self, scope: Scope) -> BodyTooLarge:
        """The error for this request's limit."""
        if scope["path"] == self.upload_path:
            return BodyTooLarge(self.max_upload_bytes, "max_upload_bytes")
        return BodyTooLarge(self.max_body_bytes, "max_body_bytes")


class _Body:
    """One request's body on its way in."""

    __slots__ = ("_receive", "complete", "num_bytes", "refusal", "refused")

    def __init__(self, receive: Receive, refusal: BodyTooLarge) -> None:
        self._receive = receive
        self.refusal = refusal
        self.num_bytes = 0
        self.complete = False
        self.refused = False

    async def receive(self) -> Message:
        """The next part. Raises BodyTooLarge once the limit is passed."""
        message = await self._next()
        if self.num_bytes > self.refusal.limit_bytes:
            self.refused = True
            raise self.refusal
        return message

    async def drop_rest(self) -> None:
        """Reads and drops what still comes, within bounds of time and size."""
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


class BodyLimit:
    """ASGI middleware around everything that may read a body."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._limits.refusal(scope))
        lingering = _lingering(send, body)
        if _declared_bytes(scope) > body.refusal.limit_bytes:
            await error_response(body.refusal)(scope, receive, lingering)
            return
        answered = False

        async def guarded(message: Message) -> None:
            """Passes the app's answer on, unless the body was refused before it began: then 413 is the answer."""
            nonlocal answered
            if not body.refused or answered:
                answered = answered or message["type"] == "http.response.start"
                await lingering(message)

        with suppress(BodyTooLarge):
            await self._app(scope, body.receive, guarded)
        if body.refused and not answered:
            await error_response(body.refusal)(scope, receive, lingering)


def _declared_bytes(scope: Scope) -> int:
    """Content-Length, or 0 where there is none; the HTTP parser has refused what is no number."""
    return int(Headers(scope=scope).get("content-length", "0"))


def _lingering(send: Send, body: _Body) -> Send:
    """Holds the end of an answer back until the body has come in, was dropped, or took too long."""

    async def send_lingering(message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not last or body.complete:
            await send(message)
            return
        await send({**message, "more_body": True})
        await body.drop_rest()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_lingering
