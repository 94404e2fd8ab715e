"""Works on one batch under a lease: has each line of the input answered, and writes the answers.

The input is read once from its start, and lines that have an answer already are skipped. Only the lines in flight are
in memory. A line keeps its slot until its answer is durable.

A line that the server cannot answer now, because it is busy, restarts or the tenant's quota is used up for the moment,
is sent again later, until the batch expires.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

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
from slora_api.errors import KeyRevoked
from slora_api.fair_slots import FairSlots
from slora_api.tenants.key_store import KeyStore
from slora_api.tenants.running_requests import RunningRequests
from slora_api.tenants.tenant_status import TenantStatus

__all__ = ["LEASE_S", "BatchRun"]

logger = logging.getLogger(__name__)

LEASE_S = 30.0
_RENEW_S = 2.0
_MAX_RETRY_S = 60.0
_BUSY = (429, 503, 507)
_EXPIRED = BatchProblem(
    "batch_expired", "This request could not be executed before the completion window expired."
)


class BatchRun:
    """owner: the runner's id. slots: lines in flight in this process. count_line: called with `completed` or `failed`
    for each answer.
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
        count_line: Callable[[str], None],
    ) -> None:
        self._batch = batch
        self._owner = owner
        self._batches = batches
        self._app = app
        self._key_store = key_store
        self._running = running
        self._slots = slots
        self._count_line = count_line
        self._status = batch.status
        self._unwritten: list[LineAnswer] = []
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Returns when the batch has ended, or when another runner has it. Cancelling it releases the lease."""
        try:
            await self._run_leased()
        except asyncio.CancelledError:
            with suppress(StoreUnavailable):
                release = asyncio.to_thread(self._batches.release, self._batch.batch_id, self._owner)
                await asyncio.shield(release)
            raise

    async def _run_leased(self) -> None:
        batch_id = self._batch.batch_id
        try:
            async with asyncio.TaskGroup() as group:
                lease = group.create_task(self._keep_lease())
                status, problems = await self._work()
                lease.cancel()
            await asyncio.to_thread(self._batches.finish, batch_id, self._owner, status, problems)
            logger.info("batch %s of tenant %s is %s", batch_id, self._batch.tenant, status)
        except* LeaseLost:
            logger.warning("batch %s goes on elsewhere, or was deleted", batch_id)
        except* StoreUnavailable as group_error:
            logger.warning("batch %s waits for the database: %s", batch_id, group_error.exceptions[0])

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            self._status = await asyncio.to_thread(
                self._batches.renew, self._batch.batch_id, self._owner, LEASE_S
            )

    async def _work(self) -> tuple[BatchStatus, list[BatchProblem]]:
        """Returns the final status of the batch."""
        batch = self._batch
        if batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, []
        if batch.status is BatchStatus.VALIDATING:
            count, problems = await asyncio.to_thread(
                count_lines, self._batches.files.read(batch.input_file_id)
            )
            if problems:
                return BatchStatus.FAILED, problems
            self._status = await asyncio.to_thread(self._batches.begin, batch.batch_id, self._owner, count)
        answered = await asyncio.to_thread(self._batches.answered, batch)
        lines = read_lines(self._batches.files.read(batch.input_file_id), batch.endpoint, answered)
        async with asyncio.TaskGroup() as group:
            while not self._must_stop():
                line = await asyncio.to_thread(_next, lines)
                if line is None:
                    break
                admitted = asyncio.get_running_loop().create_future()
                task = group.create_task(self._answer_in_slot(line, admitted))
                while not (admitted.done() or self._must_stop()):
                    await asyncio.wait([admitted], timeout=_RENEW_S)
                if not admitted.done():
                    task.cancel()
        if self._status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, []
        if not self._is_expired():
            return BatchStatus.COMPLETED, []
        await self._expire_rest()
        return BatchStatus.EXPIRED, []

    async def _answer_in_slot(self, line: BatchLine, admitted: "asyncio.Future[None]") -> None:
        """admitted: set when the line has its slot, and the next line may be read."""
        async with self._slots.hold(self._batch.tenant):
            admitted.set_result(None)
            if (answer := await self._unless_stopped(line)) is not None:
                await self._record(answer)
                self._count_line("failed" if answer.is_error else "completed")

    async def _record(self, answer: LineAnswer) -> None:
        """Writes an answer. Answers that end while another one is written are written together."""
        self._unwritten.append(answer)
        async with self._writing:
            if answer not in self._unwritten:
                return
            some, self._unwritten = self._unwritten, []
            await asyncio.to_thread(self._batches.record, self._batch, self._owner, some)

    async def _unless_stopped(self, line: BatchLine) -> LineAnswer | None:
        """The answer; None if the batch is cancelled or expires first."""
        work = asyncio.ensure_future(self._answer(line))
        try:
            while not work.done():
                if self._must_stop():
                    return None
                await asyncio.wait([work], timeout=_RENEW_S)
            return work.result()
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _answer(self, line: BatchLine) -> LineAnswer:
        line_id = f"{self._batch.batch_id}-{line.number}"
        if line.problem is not None:
            return LineAnswer(line.number, write_failure(line, line_id, line.problem), True)
        while True:
            response, wait_s = await self._call(line, line_id)
            if wait_s is None:
                body = bytes(response.body)
                content = write_response(line, line_id, response.status, line_id, body)
                return LineAnswer(line.number, content, response.status >= 400)
            await asyncio.sleep(wait_s)

    async def _call(self, line: BatchLine, line_id: str) -> tuple[LineResponse, float | None]:
        """Returns the response, and the seconds after which the line is sent again; None if the response is final."""
        batch = self._batch
        try:
            key = await asyncio.to_thread(self._key_store.find_key, batch.key_id)
        except StoreUnavailable:
            return LineResponse(), _RENEW_S
        if key is None:
            return LineResponse.of(KeyRevoked()), None
        if key.status is not TenantStatus.ACTIVE:
            return LineResponse(), _MAX_RETRY_S
        response = await call_route(self._app, self._running, batch.endpoint, line.body, key, line_id)
        wait_s = response.headers.get("retry-after")
        if response.status not in _BUSY or wait_s is None:
            return response, None
        return response, min(_MAX_RETRY_S, max(0.1, float(wait_s)))

    async def _expire_rest(self) -> None:
        """Writes that the window has ended to the error file, for each line without an answer."""
        batch = self._batch
        answered = await asyncio.to_thread(self._batches.answered, batch)
        lines = read_lines(self._batches.files.read(batch.input_file_id), batch.endpoint, answered)
        while some := await asyncio.to_thread(_next_some, lines):
            answers = [
                LineAnswer(
                    line.number,
                    write_failure(line, f"{batch.batch_id}-{line.number}", _EXPIRED),
                    True,
                )
                for line in some
            ]
            await asyncio.to_thread(self._batches.record, batch, self._owner, answers)
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
