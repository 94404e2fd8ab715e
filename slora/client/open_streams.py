"""Routes the engine's outputs to the coroutines that await them, with one queue per unfinished request.

A reader that is slower than the engine gets several waiting deltas in one list, so it catches up at a lower cost.

Both engine clients use this class: RemoteEngine behind a socket, and LocalEngine in the same process.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from slora.core.errors import RequestRefused
from slora.core.request import EngineRequest, StepOutput, TokenDelta

# Maximum number of deltas that a reader gets at once. They make about 16 KiB of server-sent events.
_MAX_READY = 64


class OpenStreams:
    """Open requests and their queues. `put` and `fail` must be called on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    async def read(
        self,
        request: EngineRequest,
        send: Callable[[EngineRequest], Awaitable[None]],
        abort: Callable[[str], None],
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """Sends a request and yields lists of the deltas that have arrived since the last list.

        Raises the error that ends the request. If the iterator is closed, cancelled or fails before the
        request ends, `abort` is called with the request's id.
        """
        if request.request_id in self._streams:
            raise RequestRefused(f"request id {request.request_id!r} is already running", "request_id")
        stream = _Stream(request.open_choices)
        self._streams[request.request_id] = stream
        try:
            await send(request)
            while stream.unfinished:
                if not stream.outputs:
                    stream.arrived.clear()
                    await stream.arrived.wait()
                if deltas := stream.take():
                    yield deltas
                if stream.outputs:  # Catching up takes many lists. Other requests run in between.
                    await asyncio.sleep(0)
        finally:
            del self._streams[request.request_id]
            if stream.unfinished:
                abort(request.request_id)

    def end_choice(self, request_id: str, index: int) -> None:
        """Drops later deltas of this choice. The other choices continue."""
        if request_id in self._streams:
            self._streams[request_id].unfinished.discard(index)

    def put(self, output: StepOutput) -> None:
        stream = self._streams.get(output.request_id)
        # A request that was aborted while its tokens were in transit has no stream.
        if stream is not None:
            stream.put(output)

    def fail(self, error: Exception) -> None:
        """Ends all unfinished requests with this error."""
        for request_id, stream in self._streams.items():
            stream.put(StepOutput(request_id, error=error))


@dataclass(frozen=True, slots=True)
class _Stream:
    """One open request. unfinished: indices of the choices that may still get deltas. arrived: set when there are
    outputs.
    """

    unfinished: set[int]
    outputs: deque[StepOutput] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self.arrived.set()

    def take(self) -> list[TokenDelta]:
        """Returns the deltas that have arrived, without deltas of ended choices.

        Raises the error that ended the request after all earlier deltas have been taken.
        """
        deltas: list[TokenDelta] = []
        while self.outputs and len(deltas) < _MAX_READY:
            if (error := self.outputs[0].error) is not None:
                if deltas:
                    break
                self.unfinished.clear()
                raise error
            delta = self.outputs.popleft().delta
            assert delta is not None, "an output has a delta or an error"
            if delta.index in self.unfinished:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self.unfinished.remove(delta.index)
        return deltas
