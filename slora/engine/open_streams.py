"""Routes the engine's outputs to the coroutines that await them, with one queue per unfinished request.

Both engine clients use this class: RemoteEngine behind a socket, and LocalEngine in the same process.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from slora.errors import RequestRefused
from slora.request import EngineRequest, StepOutput, TokenDelta

__all__ = ["OpenStreams"]


class OpenStreams:
    """Open requests and their queues. `put` and `fail` must be called on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    async def read(
        self,
        request: EngineRequest,
        send: Callable[[EngineRequest], Awaitable[None]],
        abort: Callable[[str], None],
    ) -> AsyncGenerator[TokenDelta, None]:
        """Sends the request and yields its deltas until it is finished. Raises the error that ends the request.

        If the iterator is closed, cancelled or fails before that, `abort` is called with the request's id.
        """
        if request.request_id in self._streams:
            raise RequestRefused(f"request id {request.request_id!r} is already running", "request_id")
        stream = _Stream(set(range(request.sampling.num_choices)))
        self._streams[request.request_id] = stream
        try:
            await send(request)
            while stream.unfinished:
                delta = stream.take(await stream.queue.get())
                if delta is not None:
                    yield delta
        finally:
            del self._streams[request.request_id]
            if stream.unfinished:
                abort(request.request_id)

    def end_choice(self, request_id: str, index: int) -> None:
        """Stops yielding deltas of this choice; the other choices continue."""
        if request_id in self._streams:
            self._streams[request_id].unfinished.discard(index)

    def put(self, output: StepOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:  # None: the request was aborted while tokens were under way.
            stream.queue.put_nowait(output)

    def fail(self, error: Exception) -> None:
        """Ends all unfinished requests with this error."""
        for request_id, stream in self._streams.items():
            stream.queue.put_nowait(StepOutput(request_id, error=error))


@dataclass(frozen=True, slots=True)
class _Stream:
    """unfinished: indices of the choices that may still get deltas."""

    unfinished: set[int]
    queue: asyncio.Queue[StepOutput] = field(default_factory=asyncio.Queue)

    def take(self, output: StepOutput) -> TokenDelta | None:
        """Returns the output's delta, or None if its choice has ended. Raises the error that ended the request."""
        if output.error is not None:
            self.unfinished.clear()
            raise output.error
        assert output.delta is not None, "an output has a delta or an error"
        delta = output.delta
        if delta.index not in self.unfinished:
            return None
        if delta.finish_reason is not None:
            self.unfinished.remove(delta.index)
        return delta
