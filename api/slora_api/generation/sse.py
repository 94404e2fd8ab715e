"""Server-sent events as OpenAI's clients read them, and the watch for clients that hang up or do not read.

Each chunk is one `data: {json}`, and `data: [DONE]` is the end. After the first byte an error is an event too, because
the status line has been sent. uvicorn does not cancel a handler whose client has left, so everything that waits for
tokens also waits for the disconnect.

A client that does not take its stream counts as one that hung up. While the connection holds more than 64 KiB of the
stream, `send` blocks and no further chunk is rendered. The HTTP server resets the connection if the client then takes
nothing for 20 s, or less than 16 KiB/s on average. The reset is a disconnect here: the engine request is cancelled and
the stream's place is given back. So a stream buffers at most 64 KiB and one chunk in this process, 512 KiB in the
kernel, and the tokens that the engine computes meanwhile, which the bounds of the request limit.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slora_adapters.errors import SloraError
from slora_api.errors import ClientGone, Stopping, describe_error

__all__ = ["EventStream", "encode_event", "unless_disconnected"]

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_T = TypeVar("_T")


def encode_event(chunk: dict[str, Any]) -> bytes:
    """One event on one line. All ASCII, because clients exist that end a line at U+2028 or U+0085 too."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits `work`, and cancels it with ClientGone when the client hangs up first. The body must have been read."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Sends `chunks` as events. Subclasses Response because FastAPI takes nothing else; shares no behaviour with it.

    first: the chunks that are ready; waiting for them decided that the status is 200.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: list[dict[str, Any]],
        chunks: AsyncGenerator[dict[str, Any], None],
        headers: dict[str, str],
    ) -> None:
        # no-buffering keeps nginx from collecting the answer before it passes it on.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._chunks):
            await send(start)
            try:
                await unless_disconnected(receive, self._send_events(send))
                end = _DONE
            except ClientGone:
                return
            except asyncio.CancelledError:
                # uvicorn cancels what is left when the time to drain is over. The client gets an event that says so.
                end = encode_event(describe_error(Stopping()).body)
            except Exception as error:  # the top of this answer: nobody above could still tell the client
                if not isinstance(error, SloraError):
                    logger.error(
                        "request %s failed while streaming", scope["state"]["request_id"], exc_info=error
                    )
                end = encode_event(describe_error(error).body)
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        await send(_body(b"".join(encode_event(chunk) for chunk in self._first)))
        async for chunk in self._chunks:
            await send(_body(encode_event(chunk)))


def _body(content: bytes) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": True}
