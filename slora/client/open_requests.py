"""What a client of engines keeps of its requests in progress: outputs that wait for a reader, and tokens that arrived.

`OpenStreams` belongs to one engine, and has one queue per unfinished request. It routes the engine's outputs to the
coroutines that await them. A reader that is slower than the engine gets several waiting deltas in one list, so it
catches up at a lower cost. Both engine clients use it: RemoteEngine behind a socket, and LocalEngine in the same
process.

`OpenAnswer` belongs to a group of engines, and has everything that is needed to continue a request on another engine.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Self

from slora.core.errors import RequestRefused
from slora.core.request import (
    EmittedTokens,
    EngineRequest,
    RequestTiming,
    RequestUsage,
    StepOutput,
    TokenDelta,
)

# Maximum number of deltas that a reader gets at once. They make about 16 KiB of server-sent events.
_MAX_READY = 64
# The engine refuses deadlines that are not above 0. This deadline has passed when the engine looks at it.
_PASSED_S = 1e-6


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


@dataclass(slots=True, eq=False)
class Settlement:
    """Settles the usage of one request once, whichever engines compute it. It listens to the engines.

    sent ---- the engine reports the usage ----> settled
      |  ^
      |  +--------- sent again ----------+
      +---- engine lost, or it drains ---+---- given up ----> settled (the usage is unknown)
    """

    # Called once, with the usage of the whole answer; None if it is unknown.
    report: Callable[[RequestUsage | None, RequestTiming | None], None]
    # Called once, when the usage is settled and no more tokens are wanted.
    forget: Callable[[], None]
    owner: str | None = None  # The engine that has the request and will report its usage.
    has_begun: bool = False  # Whether the owner computes it. Before, the request waits in the owner's queue.
    num_losses: int = 0  # Engines that died after they had begun to compute it, since the last new token.
    is_closed: bool = False  # Whether no more tokens are wanted.
    is_settled: bool = False

    def begin_run(self, engine: str) -> None:
        self.owner, self.has_begun = engine, False

    def hear_begin(self, engine: str) -> None:
        if engine == self.owner:
            self.has_begun = True

    def hear_usage(
        self,
        engine: str,
        usage: RequestUsage | None,
        timing: RequestTiming | None,
        *,
        is_lost: bool,
        is_complete: bool,
    ) -> bool:
        """Hears the usage of one run. Returns False if the usage of another run is reported instead.

        usage: None if the engine was lost or has released the request. timing: None also if the engine never had the
            request, or refused it.
        is_lost: whether the engine died. is_complete: whether all tokens have arrived.
        """
        if engine != self.owner:
            return False
        self.owner = None
        if self.is_settled:
            return False
        self.num_losses += self.has_begun and is_lost
        if timing is not None:
            self._settle(usage, timing)
        elif self.is_closed or is_complete:
            self._settle(None, None)
        return True

    def close(self) -> None:
        """Called when no more tokens are wanted. An engine that still has the request reports its usage later."""
        self.is_closed = True
        if self.is_settled:
            self.forget()
        elif self.owner is None:
            self._settle(None, None)

    def _settle(self, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        self.is_settled = True
        if self.is_closed:
            self.forget()
        self.report(usage, timing)


@dataclass(slots=True, eq=False)
class OpenAnswer:
    """A request and the tokens of its answer that have arrived."""

    request: EngineRequest
    settlement: Settlement
    refusal: Exception | None = None  # Why it must not be sent again.
    num_runs: int = 0  # How often it was sent.
    choices: list[list[int] | None] = field(default_factory=list)  # The tokens of each; None after its end.
    num_tokens: int = 0
    num_cached: int = 0
    num_scored: int = 0  # Prompt log-probabilities that have arrived.
    num_to_skip: int = 0  # Those of them that a new run will repeat.
    arrived_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.choices = [[] for _ in range(self.request.sampling.num_choices)]

    @property
    def is_complete(self) -> bool:
        return all(tokens is None for tokens in self.choices)

    def begin_run(self, owner: str) -> EngineRequest:
        """Returns the request that computes the rest of the answer. owner: the engine to which it is sent.

        Without tokens, the request is repeated as a whole. So are beam searches and embeddings. `take` then drops what
        has arrived before.
        """
        request, sampling = self.request, self.request.sampling
        self.settlement.begin_run(owner)
        self.num_runs += 1
        if self.num_runs == 1:
            return request
        self.num_to_skip = self.num_scored
        if self.num_tokens == 0 or sampling.use_beam_search or request.pooling is not None:
            if request.deadline_s is None:
                return request
            left_s = request.deadline_s - (time.monotonic() - self.arrived_at)
            return replace(request, deadline_s=max(_PASSED_S, left_s))
        choices = tuple(None if tokens is None else tuple(tokens) for tokens in self.choices)
        emitted = EmittedTokens(choices, self.num_tokens, self.num_cached)
        return replace(request, emitted=emitted, deadline_s=None)

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Adds the deltas to the answer. Returns those that have not arrived before."""
        if self.num_runs > 1:
            deltas = [kept for delta in deltas if (kept := self._drop_repeated(delta)) is not None]
        for delta in deltas:
            self.num_scored += len(delta.prompt_logprobs)
            self.num_cached = self.num_cached or delta.num_cached
            tokens = self.choices[delta.index]
            if tokens is not None:
                tokens.extend(delta.token_ids)
                self.num_tokens += len(delta.token_ids)
                self.settlement.num_losses = 0
                if delta.finish_reason is not None:
                    self.choices[delta.index] = None
        return deltas

    def end_choice(self, index: int) -> None:
        if index < len(self.choices):
            self.choices[index] = None

    def _drop_repeated(self, delta: TokenDelta) -> TokenDelta | None:
        if self.choices[delta.index] is None:
            return None
        if delta.prompt_logprobs and self.num_to_skip:
            skipped = min(self.num_to_skip, len(delta.prompt_logprobs))
            self.num_to_skip -= skipped
            delta = replace(delta, prompt_logprobs=delta.prompt_logprobs[skipped:])
            if not (delta.prompt_logprobs or delta.token_ids):
                return None
        return delta
