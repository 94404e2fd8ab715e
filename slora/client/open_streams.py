"""Routes the engine's outputs to the coroutines that await them, with one queue per unfinished request.

A reader that is slower than the engine gets several waiting deltas in one list, so it catches up at a lower cost.

Both engine clients use this class: RemoteEngine behind a socket, and LocalEngine in the same process.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

from slora.core.errors import RequestRefused
from slora.core.request import EngineRequest, StepOutput, TokenDelta

# Maximum number of deltas that a reader gets at once. They make about 16 KiB of server-sent events.
_MAX_READY = 64


class OpenStreams:
    """Open requests and their queues. `put` and `fail` must be called on the event loop."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenStream] = {}

    def open(
        self,
        request: EngineRequest,
        send: Callable[[EngineRequest], Awaitable[None]],
        abort: Callable[[str], None],
    ) -> "OpenStream":
        """Returns the stream of a request, which is sent when the first list is awaited."""
        return OpenStream(self._by_id, request, send, abort)

    def end_choice(self, request_id: str, index: int) -> None:
        """Drops later deltas of this choice. The other choices continue."""
        if request_id in self._by_id:
            self._by_id[request_id].end_choice(index)

    def put(self, output: StepOutput) -> None:
        stream = self._by_id.get(output.request_id)
        # A request that was aborted while its tokens were in transit has no stream.
        if stream is not None:
            stream.put(output)

    def fail(self, error: Exception) -> None:
        """Ends all unfinished requests with this error."""
        for request_id, stream in self._by_id.items():
            stream.put(StepOutput(request_id, error=error))


class OpenStream:
    """Iterates over lists of the deltas that have arrived since the last list. Raises the error that ends the request.

    Close it with `aclosing`. If it is closed, cancelled or fails before the request ends, `abort` is called with the
    request's id.
    """

    def __init__(
        self,
        others: "dict[str, OpenStream]",
        request: EngineRequest,
        send: Callable[[EngineRequest], Awaitable[None]],
        abort: Callable[[str], None],
    ) -> None:
        self._open = others
        self._request = request
        self._send = send
        self._abort = abort
        self._is_sent = False
        # Indices of the choices that may still get deltas.
        self._unfinished = request.open_choices
        self._outputs: deque[StepOutput] = deque()
        self._arrived: asyncio.Future[None] | None = None  # What the reader waits for.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        try:
            if not self._is_sent:
                await self._begin()
            elif self._outputs:  # Catching up takes many lists. Other requests run in between.
                await asyncio.sleep(0)
            while self._unfinished:
                if not self._outputs:
                    self._arrived = asyncio.get_running_loop().create_future()
                    await self._arrived
                if deltas := self._take():
                    return deltas
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        request_id = self._request.request_id
        if self._open.get(request_id) is self:
            del self._open[request_id]
            if self._unfinished:
                self._abort(request_id)
        self._unfinished, self._is_sent = set(), True

    def end_choice(self, index: int) -> None:
        self._unfinished.discard(index)

    def put(self, output: StepOutput) -> None:
        self._outputs.append(output)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def _begin(self) -> None:
        request_id, self._is_sent = self._request.request_id, True
        if request_id in self._open:
            raise RequestRefused(f"request id {request_id!r} is already running", "request_id")
        self._open[request_id] = self
        await self._send(self._request)

    def _take(self) -> list[TokenDelta]:
        """Returns the deltas that have arrived, without deltas of ended choices.

        Raises the error that ended the request after all earlier deltas have been taken.
        """
        deltas: list[TokenDelta] = []
        while self._outputs and len(deltas) < _MAX_READY:
            if (error := self._outputs[0].error) is not None:
                if deltas:
                    break
                self._unfinished.clear()
                raise error
            delta = self._outputs.popleft().delta
            assert delta is not None, "an output has a delta or an error"
            if delta.index in self._unfinished:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._unfinished.remove(delta.index)
        return deltas
