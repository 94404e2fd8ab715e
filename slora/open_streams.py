"""Outputs of the engine find whoever awaits them: one queue for each unfinished request of this event loop.

What both clients of an engine share, whether it is a process behind a socket or a thread beside the loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from slora.errors import RequestRefused
from slora.request import EngineRequest, StepOutput, TokenDelta

__all__ = ["OpenStreams"]


class OpenStreams:
    """`put` and `fail` are called on the event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[StepOutput]] = {}

    async def read(
        self,
        request: EngineRequest,
        send: Callable[[EngineRequest], Awaitable[None]],
        abort: Callable[[str], None],
    ) -> AsyncGenerator[TokenDelta, None]:
        """Sends the request and yields its deltas until it is over. Raises its error.

        `abort` is called with its id if this iterator is closed, cancelled or fails sooner.
        """
        if request.request_id in self._queues:
            raise RequestRefused(f"request id {request.request_id!r} is already running", "request_id")
        queue: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._queues[request.request_id] = queue
        finished = False
        try:
            await send(request)
            while not finished:
                output = await queue.get()
                if output.error is not None:
                    finished = True
                    raise output.error
                assert output.delta is not None, "an output has a delta or an error"
                finished = output.delta.finish_reason is not None
                yield output.delta
        finally:
            del self._queues[request.request_id]
            if not finished:
                abort(request.request_id)

    def put(self, output: StepOutput) -> None:
        queue = self._queues.get(output.request_id)
        if queue is not None:  # gone when it was aborted while tokens were on their way
            queue.put_nowait(output)

    def fail(self, error: Exception) -> None:
        """Everybody who waits hears so now."""
        for request_id, queue in self._queues.items():
            queue.put_nowait(StepOutput(request_id, error=error))
