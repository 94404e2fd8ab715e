"""Writes the usage of each engine request to the usage journal of this process.

The engine reports the usage of every request after the request ends, even if the client has disconnected. The recorder
therefore keeps each request until its report arrives, independently of the coroutine that streams the answer. If the
engine dies first, the recorder counts the tokens that have arrived.

A request for which nothing was computed has no record.

While the journal writes one batch of records, the recorder collects the next one. So the event loop and the journal's
thread wake each other once per disk sync rather than once per request.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slora.client.client import EngineClient
from slora.core.request import EngineRequest, RequestTiming, RequestUsage
from slora.core.usage_journal import UsageJournal, UsageRecord
from slora_api.core.request_context import current_span

if TYPE_CHECKING:
    from slora_api.core.otel_tracing import OtelSpan

Observer = Callable[[EngineRequest, RequestUsage, RequestTiming], None]

# The maximum number of records that the event loop hands to the journal at once. Handing over this many takes a few
# milliseconds.
_MAX_BATCH = 128


class ArrivedAnswer(Protocol):
    """The part of an answer that has arrived. num_cached: prompt tokens found in the prefix cache. num_generated:
    tokens of the answer so far. prompt_only: whether the answer is empty. The token that the engine samples for it is
    not billed.
    """

    @property
    def request(self) -> EngineRequest: ...

    @property
    def prompt_only(self) -> bool: ...

    @property
    def num_cached(self) -> int: ...

    @property
    def num_generated(self) -> int: ...


@dataclass(slots=True)
class UnrecordedRequest:
    """A request whose usage may not be known yet.

    on_report: called with the usage.
    ended: set when the usage is durable or cannot be recorded.
    failure: why the usage cannot be recorded.
    timing: when the request passed the stages of the engine; None until the usage is known. It stays None if the
        request was refused or the engine died.
    span: the span of the HTTP request, if it is traced.
    """

    answer: ArrivedAnswer
    on_report: Callable[[RequestUsage], None]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None
    timing: RequestTiming | None = None
    span: "OtelSpan | None" = None


class _Waiting(NamedTuple):
    opened: UnrecordedRequest
    record: UsageRecord


class UsageRecorder:
    """Records the usage that `client` reports. Runs on one event loop.

    clock: Unix time. observe: called with each opened request when the request has ended in the engine.
    """

    def __init__(
        self,
        client: EngineClient,
        journal: UsageJournal,
        clock: Callable[[], float] = time.time,
        *,
        observe: Observer = lambda request, usage, timing: None,
    ) -> None:
        self._observe = observe
        self._client = client
        self.journal = journal
        self._clock = clock
        self._open: dict[str, UnrecordedRequest] = {}
        # The next batch for the journal.
        self._batch: list[_Waiting] = []
        # The number of records in the next batch and in the batch that the journal is writing.
        self._num_waiting = 0
        client.listen_for_usage(self._receive)

    @property
    def num_open(self) -> int:
        """Number of requests whose usage is not durable yet."""
        return len(self._open) + self._num_waiting

    def check(self) -> None:
        """Raises UsageJournalFull if new requests cannot be recorded at present."""
        self.journal.check()

    def open(
        self, answer: ArrivedAnswer, on_report: Callable[[RequestUsage], None] = lambda usage: None
    ) -> UnrecordedRequest:
        """Registers a request. Call this immediately before the request is sent to the engine, and pass the result to
        `wait`.

        on_report: called once with the usage of the request, possibly after its stream was closed.
        """
        opened = self._open[answer.request.request_id] = UnrecordedRequest(
            answer, on_report, span=current_span()
        )
        return opened

    async def wait(self, opened: Sequence[UnrecordedRequest]) -> None:
        """Returns when the records of these requests are durable. Raises UsageJournalFull."""
        for one in opened:
            await one.ended.wait()
            if one.failure is not None:
                raise one.failure

    def close(self) -> None:
        """Hands over the records that still wait for the journal. Call it before the journal is closed."""
        for _, record in self._batch:
            self.journal.append(record)
        self._batch = []

    def _receive(self, request_id: str, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        """Receives the usage of an ended request. usage: None if the engine died before it reported the usage."""
        opened = self._open.pop(request_id, None)
        found = usage if usage is not None or opened is None else _seen(opened.answer)
        if found is not None and opened is not None and opened.answer.prompt_only:
            found = replace(found, generated_tokens=0)
        # Requests that this recorder did not open are canaries of uploads, which are not billed.
        if opened is None:
            self._client.acknowledge_usage(request_id)
            return
        assert found is not None
        if found == RequestUsage():
            self._client.acknowledge_usage(request_id)
            opened.ended.set()
        else:
            self._record(opened, found, is_complete=usage is not None)
        opened.timing = timing
        if timing is not None:
            self._observe(opened.answer.request, found, timing)
            if opened.span is not None:
                opened.span.add_engine_request(opened.answer.request, found, timing)
        opened.on_report(found)

    def _record(self, opened: UnrecordedRequest, usage: RequestUsage, *, is_complete: bool) -> None:
        request = opened.answer.request
        record = UsageRecord(
            request.request_id,
            request.tenant,
            request.account,
            request.adapter_digests,
            self._clock(),
            usage,
            is_complete,
            request.is_background,
        )
        self._batch.append(_Waiting(opened, record))
        self._num_waiting += 1
        if self._num_waiting == 1:
            # Write later, so that one batch has all requests of a step. The engine reports these requests together.
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        batch, self._batch = self._batch[:_MAX_BATCH], self._batch[_MAX_BATCH:]
        if not batch:  # `close` has already handed over the batch.
            return
        loop = asyncio.get_running_loop()
        written = [self.journal.append(record) for _, record in batch]

        def end_batch(_last: "Future[None]") -> None:
            # This runs on the thread of the journal. The loop may be closed when the process ends.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end_batch, batch, written)

        # The journal writes records in order, so the last one ends the batch.
        written[-1].add_done_callback(end_batch)

    def _end_batch(self, batch: "Sequence[_Waiting]", written: "list[Future[None]]") -> None:
        for (opened, record), done in zip(batch, written, strict=True):
            opened.failure = done.exception()
            if opened.failure is None:
                self._client.acknowledge_usage(record.request_id)
            opened.ended.set()
        self._num_waiting -= len(batch)
        written.clear()  # The last of them holds this list, through its callback.
        if self._batch:
            asyncio.get_running_loop().call_soon(self._write)


def _seen(answer: ArrivedAnswer) -> RequestUsage:
    """Returns the usage that is known from the tokens that have arrived. When the first token arrives, the engine has
    computed the whole prompt.
    """
    if not answer.num_generated:
        return RequestUsage()
    return RequestUsage(len(answer.request.prompt_token_ids), answer.num_cached, answer.num_generated)
