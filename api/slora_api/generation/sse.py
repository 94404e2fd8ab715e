"""Streams of server-sent events, and the detection of clients that hang up or do not read.

The status line is sent before the first event, so a later error is sent as an event. uvicorn does not cancel a handler
when its client disconnects. Code that waits for tokens therefore also waits for the disconnect.

A client that does not read its stream is treated as disconnected. While the connection holds more than 64 KiB of the
stream, `send` blocks and no further event is made. If the client then reads nothing for 20 s, or less than 16 KiB/s on
average, the HTTP server resets the connection. The application sees the reset as a disconnect, cancels the engine
request and releases the permit.

A stream thus buffers at most 64 KiB and one write in this process, and 512 KiB in the kernel. The bounds of the request
limit the tokens that the engine computes in the meantime.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slora_adapters.errors import SloraError
from slora_api.errors import ClientGone, ErrorAnswer, Stopping, describe_error
from slora_api.tenants.running_requests import ENDED_BY

__all__ = ["EventStream", "unless_disconnected"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


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
    """Sends `events`. Each item is one write.

    It subclasses Response because FastAPI requires it, but uses only the header handling of Response.

    first: the events that were computed before the response starts. Computing them did not fail, so the status is 200.
    failure: returns the events that end a stream with an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        failure: Callable[[ErrorAnswer], Iterable[bytes]],
        headers: dict[str, str],
    ) -> None:
        # X-Accel-Buffering keeps nginx from buffering the answer.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._failure = failure

    async def _parts(self, request_id: str) -> AsyncGenerator[bytes, None]:
        """Yields the events. If computing them fails, the last event is the error. request_id: the id for the log."""
        yield self._first
        try:
            async for events in self._events:
                yield events
        except Exception as error:
            # The response has started, so an exception handler can no longer report the error to the client.
            if not isinstance(error, SloraError):
                logger.error("request %s failed while streaming", request_id, exc_info=error)
            for part in self._failure(describe_error(error)):
                yield part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._events), aclosing(self._parts(scope["state"]["request_id"])) as parts:
            await send(start)
            end: Iterable[bytes] = ()
            try:
                await unless_disconnected(receive, _send_parts(parts, send))
            except ClientGone:
                return
            except asyncio.CancelledError:
                # The key was revoked, or uvicorn cancels the remaining requests because the drain time is over. The
                # client gets an event that says so.
                end = self._failure(describe_error(scope["state"].get(ENDED_BY) or Stopping()))
            for part in end:
                await send(_body(part))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_parts(parts: AsyncGenerator[bytes, None], send: Send) -> None:
    async for part in parts:
        await send(_body(part))


def _body(content: bytes) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": True}
