"""Streams of server-sent events, and the detection of clients that hang up or do not read.

The head is held until the first events are there, an error comes, or 5 s have passed. So a request that is refused has
the status of its error, and a proxy sees a byte in time. A later error is sent as an event. While nothing else is sent,
a comment goes out every 10 s. uvicorn does not cancel a handler when its client disconnects. Code that waits for tokens
therefore also waits for the disconnect.

A client that does not read its stream is treated as disconnected. While the connection holds more than 64 KiB of the
stream, `send` blocks and no further event is made. If the client then reads nothing for 20 s, or less than 16 KiB/s on
average, the HTTP server resets the connection. The application sees the reset as a disconnect, cancels the engine
request and releases the permit.

A stream thus buffers at most 64 KiB and one write in this process, and 512 KiB in the kernel. The bounds of the request
limit the tokens that the engine computes in the meantime.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from slora_adapters.errors import SloraError
from slora_api.core.errors import ClientGone, ErrorAnswer, Stopping, describe_error
from slora_api.core.request_context import ENDED_BY

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Events = AsyncGenerator[bytes, None]

HOLD_S = 5.0
KEEP_ALIVE_S = 10.0
# A comment, which clients skip.
KEEP_ALIVE = b": keep-alive\n\n"
_EVENT_END = b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of `work`. If the client hangs up first, cancels the work and raises ClientGone. Call this
    only after the request body was read.

    As with `asyncio.timeout`, the work runs in the task of the caller. A second task, which starts when the work first
    waits, watches for the disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels, is_gone = task.cancelling(), False

    async def watch() -> None:
        nonlocal is_gone
        await _disconnect(receive)
        is_gone = True
        task.cancel()

    watching: asyncio.Task[None] | None = None

    def start() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    starting = asyncio.get_running_loop().call_soon(start)
    try:
        return await work
    except asyncio.CancelledError:
        # A cancellation from elsewhere takes precedence over the disconnect.
        if is_gone and task.cancelling() == num_cancels + 1:
            raise ClientGone("the client closed the connection") from None
        raise
    finally:
        starting.cancel()
        if watching is not None:
            watching.cancel()
        if is_gone:
            task.uncancel()


class EventStream(Response):
    """Sends `events`. Each item is one write. The first one is awaited before the head is sent, for at most `HOLD_S`.

    It subclasses Response because FastAPI requires it, but uses only the header handling of Response.

    failure: returns the events that end a stream with an error.
    keep_alive: the event or the comment that is sent while there is nothing else to send.
    retry: called with an error that comes before the head was sent. Returns the stream to send instead, or raises the
        error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: _Events,
        failure: Callable[[ErrorAnswer], Iterable[bytes]],
        headers: dict[str, str],
        keep_alive: bytes = KEEP_ALIVE,
        retry: "Callable[[Exception], Awaitable[EventStream]] | None" = None,
    ) -> None:
        # X-Accel-Buffering keeps nginx from buffering the answer.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._failure = failure
        self._keep_alive = keep_alive
        self._retry = retry
        self._is_open = False  # Whether the head was sent.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the error of the first event if it comes before the head was sent."""
        try:
            async with aclosing(self._events):
                await self._send_all(scope["state"], receive, send)
        except Exception as error:
            if self._is_open or self._retry is None:
                raise
            again = await self._retry(error)
            again._retry = None
            await again(scope, receive, send)

    async def _send_all(self, state: Mapping[str, Any], receive: Receive, send: Send) -> None:
        end: Iterable[bytes] = ()
        try:
            await unless_disconnected(receive, self._send_events(send, state["request_id"]))
        except ClientGone:
            if not self._is_open:
                raise
            return
        except asyncio.CancelledError:
            if not self._is_open:
                raise
            # The key was revoked, or uvicorn cancels the remaining requests because the drain time is over. The
            # client gets an event that says so.
            end = self._failure(describe_error(state.get(ENDED_BY) or Stopping()))
        for part in end:
            await self._send_part(send, part)
        await self._send_part(send, b"", more_body=False)

    async def _send_events(self, send: Send, request_id: str) -> None:
        """Sends the events. If computing them fails, the last event is the error. Between two events, sends
        `keep_alive` whenever nothing else was sent for a while.
        """
        loop = asyncio.get_running_loop()
        now, sending, is_between = loop.time, asyncio.Lock(), True
        sent_at = now()

        def due_at() -> float:
            return sent_at + (KEEP_ALIVE_S if self._is_open else HOLD_S)

        async def keep_alive() -> None:
            nonlocal sent_at
            while True:
                await asyncio.sleep(due_at() - now())
                async with sending:
                    if now() < due_at():
                        continue
                    if is_between:
                        await self._send_part(send, self._keep_alive)
                    sent_at = now()

        keeping: asyncio.Task[None] | None = None

        def start() -> None:
            nonlocal keeping
            keeping = asyncio.create_task(keep_alive())

        # Most streams end before this, so they need no task.
        starting = loop.call_later(min(HOLD_S, KEEP_ALIVE_S), start)
        try:
            while parts := await self._take(request_id):
                for part in parts:
                    async with sending:
                        await self._send_part(send, part)
                        sent_at, is_between = now(), part.endswith(_EVENT_END)
        finally:
            starting.cancel()
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    async def _take(self, request_id: str) -> Sequence[bytes]:
        """Returns the next events, or those that tell of an error; none after the last ones."""
        try:
            found = await anext(self._events, b"")
        except Exception as error:
            if not self._is_open:
                raise
            # The response has started, so an exception handler can no longer report the error to the client.
            if not isinstance(error, SloraError):
                logger.error("request %s failed while streaming", request_id, exc_info=error)
            return list(self._failure(describe_error(error)))
        return [found] if found else ()

    async def _send_part(self, send: Send, part: bytes, *, more_body: bool = True) -> None:
        if not self._is_open:  # The head leaves with the first part of the body.
            self._is_open = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": part, "more_body": more_body})
