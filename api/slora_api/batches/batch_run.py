"""Works on one batch under a lease: sends each line of the input to its route, and writes the answers.

The input is read once from its start, and lines that have an answer already are skipped. Only the lines in flight are
in memory. A line keeps its slot until its answer is durable.

The server may be unable to answer a line now. For example, the server is busy or restarting, or the tenant is suspended
or has used up its quota. Such a line is sent again later, until the batch expires. While the line waits, it holds no
slot, so that lines of other tenants proceed. The number of waiting lines is bounded for each API key, because they stay
in memory.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TypeVar

from starlette.types import ASGIApp

from slora_adapters.errors import StoreUnavailable
from slora_api.batches.batch_line import BatchLine, count_lines, read_lines, write_failure, write_response
from slora_api.batches.batches import (
    Batch,
    Batches,
    BatchProblem,
    BatchStatus,
    LeaseLost,
    LineAnswer,
)
from slora_api.batches.line_call import LineResponse, call_route
from slora_api.errors import KeyRevoked, TenantSuspended
from slora_api.fair_slots import FairSlots
from slora_api.rate_limited_log import get_rate_limited_logger
from slora_api.tenants.key_store import KeyStore
from slora_api.tenants.running_requests import RunningRequests
from slora_api.tenants.tenant_status import TenantStatus
from slora_api.threads import tenant_thread

__all__ = ["LEASE_S", "BatchRun"]

logger = get_rate_limited_logger(__name__)

LEASE_S = 30.0
_RENEW_S = 2.0
_MAX_RETRY_S = 60.0
_MIN_RETRY_S = 0.1
_BUSY = (429, 503, 507)
_EXPIRED = BatchProblem(
    "batch_expired", "This request could not be executed before the completion window expired."
)
_T = TypeVar("_T")


class BatchRun:
    """One batch while this process works on it.

    owner: the runner's id.
    slots: the slots for lines in flight in this process.
    delayed: for each API key, the number of lines that this process is retrying.
    max_delayed: while a key has this many delayed lines, no further line of its batches is read.
    count_line: called with `completed` or `failed` for each answer.
    """

    def __init__(
        self,
        batch: Batch,
        owner: str,
        batches: Batches,
        app: ASGIApp,
        key_store: KeyStore,
        running: RunningRequests,
        slots: FairSlots,
        delayed: Counter[str],
        max_delayed: int,
        count_line: Callable[[str], None],
    ) -> None:
        self._batch = batch
        self._owner = owner
        self._batches = batches
        self._app = app
        self._key_store = key_store
        self._running = running
        self._slots = slots
        self._delayed = delayed
        self._max_delayed = max_delayed
        self._count_line = count_line
        self._status = batch.status
        self._unwritten: list[LineAnswer] = []
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Works on the batch until it has ended, or until another runner has its lease. Cancelling this call releases
        the lease.
        """
        try:
            await self._run_leased()
        except asyncio.CancelledError:
            with suppress(StoreUnavailable):
                release = tenant_thread(
                    self._batch.tenant, self._batches.release, self._batch.batch_id, self._owner
                )
                await asyncio.shield(release)
            raise

    async def _run_leased(self) -> None:
        batch_id = self._batch.batch_id
        try:
            async with asyncio.TaskGroup() as group:
                lease = group.create_task(self._keep_lease())
                status, problems = await self._work()
                lease.cancel()
            await tenant_thread(
                self._batch.tenant, self._batches.finish, batch_id, self._owner, status, problems
            )
            logger.info("batch %s of tenant %s is %s", batch_id, self._batch.tenant, status)
        except* LeaseLost:
            logger.warning("batch %s was taken over by another runner, or was deleted", batch_id)
        except* StoreUnavailable as group_error:
            logger.warning("batch %s waits for the database: %s", batch_id, group_error.exceptions[0])

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            self._status = await tenant_thread(
                self._batch.tenant, self._batches.renew, self._batch.batch_id, self._owner, LEASE_S
            )

    async def _work(self) -> tuple[BatchStatus, list[BatchProblem]]:
        """Answers the lines. Returns the final status of the batch, and the problems that made it fail."""
        batch = self._batch
        if batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, []
        if batch.status is BatchStatus.VALIDATING:
            count, problems = await tenant_thread(
                batch.tenant, count_lines, self._batches.files.read(batch.input_file_id)
            )
            if problems:
                return BatchStatus.FAILED, problems
            self._status = await tenant_thread(
                self._batch.tenant, self._batches.begin, batch.batch_id, self._owner, count
            )
        answered = await tenant_thread(self._batch.tenant, self._batches.answered, batch)
        lines = read_lines(self._batches.files.read(batch.input_file_id), batch.endpoint, answered)
        async with asyncio.TaskGroup() as group:
            while not self._must_stop():
                line = await tenant_thread(self._batch.tenant, _next, lines)
                if line is None:
                    break
                admitted = asyncio.Event()
                group.create_task(self._answer_in_slots(line, admitted))
                await admitted.wait()
                while self._delayed[batch.key_id] >= self._max_delayed and not self._must_stop():
                    await asyncio.sleep(_MIN_RETRY_S)
        if self._status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, []
        if not self._is_expired():
            return BatchStatus.COMPLETED, []
        await self._expire_rest()
        return BatchStatus.EXPIRED, []

    async def _answer_in_slots(self, line: BatchLine, admitted: asyncio.Event) -> None:
        """Sends a line until it is answered, unless the batch is cancelled or expires first. admitted: set when the
        line gets its first slot. The next line may then be read.
        """
        try:
            wait_s = await self._answer_in_slot(line, admitted)
            if wait_s is not None:
                with self._counted_as_delayed():
                    while wait_s is not None:
                        await self._unless_stopped(asyncio.sleep(wait_s))
                        wait_s = await self._answer_in_slot(line, admitted)
        finally:
            admitted.set()

    async def _answer_in_slot(self, line: BatchLine, admitted: asyncio.Event) -> float | None:
        """Sends a line once, in a slot. Returns the seconds after which to send the line again; None if it is not sent
        again.
        """
        async with AsyncExitStack() as stack:
            await self._unless_stopped(stack.enter_async_context(self._slots.hold(self._batch.tenant)))
            admitted.set()
            attempt = await self._unless_stopped(self._answer(line))
            if isinstance(attempt, LineAnswer):
                await self._record(attempt)
                self._count_line("failed" if attempt.is_error else "completed")
                return None
            return attempt

    @contextmanager
    def _counted_as_delayed(self) -> Iterator[None]:
        self._delayed[self._batch.key_id] += 1
        try:
            yield
        finally:
            self._delayed[self._batch.key_id] -= 1

    async def _record(self, answer: LineAnswer) -> None:
        """Writes an answer. Answers that arrive during a write are written together in the next one."""
        self._unwritten.append(answer)
        async with self._writing:
            if answer not in self._unwritten:
                return
            some, self._unwritten = self._unwritten, []
            await tenant_thread(self._batch.tenant, self._batches.record, self._batch, self._owner, some)

    async def _unless_stopped(self, work: Awaitable[_T]) -> _T | None:
        """Returns the result of `work`; None if the batch is cancelled or expires first."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._must_stop():
                    return None
                await asyncio.wait([task], timeout=_RENEW_S)
            return task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _answer(self, line: BatchLine) -> LineAnswer | float:
        """Returns the answer to a line, or the seconds after which to send the line again."""
        line_id = f"{self._batch.batch_id}-{line.number}"
        if line.problem is not None:
            return LineAnswer(line.number, write_failure(line, line_id, line.problem), True)
        try:
            response = await self._call(line, line_id)
        except StoreUnavailable:
            return _RENEW_S
        except TenantSuspended:
            return _MAX_RETRY_S
        wait_s = response.headers.get("retry-after")
        if response.status in _BUSY and wait_s is not None:
            return min(_MAX_RETRY_S, max(_MIN_RETRY_S, float(wait_s)))
        content = write_response(line, line_id, response.status, line_id, bytes(response.body))
        return LineAnswer(line.number, content, response.status >= 400)

    async def _call(self, line: BatchLine, line_id: str) -> LineResponse:
        """Sends a line to its route and returns the response. Raises StoreUnavailable or TenantSuspended."""
        batch = self._batch
        key = await tenant_thread(self._batch.tenant, self._key_store.find_key, batch.key_id)
        if key is None:
            return LineResponse.of(KeyRevoked())
        if key.status is not TenantStatus.ACTIVE:
            raise TenantSuspended(key.tenant_name)
        return await call_route(self._app, self._running, batch.endpoint, line.body, key, line_id)

    async def _expire_rest(self) -> None:
        """Writes an error for each line without an answer, because the batch has expired."""
        batch = self._batch
        answered = await tenant_thread(self._batch.tenant, self._batches.answered, batch)
        lines = read_lines(self._batches.files.read(batch.input_file_id), batch.endpoint, answered)
        while some := await tenant_thread(self._batch.tenant, _next_some, lines):
            answers = [
                LineAnswer(
                    line.number,
                    write_failure(line, f"{batch.batch_id}-{line.number}", _EXPIRED),
                    True,
                )
                for line in some
            ]
            await tenant_thread(self._batch.tenant, self._batches.record, batch, self._owner, answers)
            for _ in answers:
                self._count_line("failed")

    def _is_expired(self) -> bool:
        return self._batches.clock() >= self._batch.expires_at

    def _must_stop(self) -> bool:
        return self._status is BatchStatus.CANCELLING or self._is_expired()


def _next(lines: Iterator[BatchLine]) -> BatchLine | None:
    return next(lines, None)


def _next_some(lines: Iterator[BatchLine]) -> list[BatchLine]:
    return [line for line, _ in zip(lines, range(100), strict=False)]
