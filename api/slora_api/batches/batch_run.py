"""Works on one batch under a lease: sends each line of the input to its route, and writes the answers.

The input is read twice from its start: once to count the lines, and once to answer them. Lines that have an answer
already are skipped. Reading and writing are done in short steps on the threads of the tenant, and the tenant has a
budget of CPU time for them. Only the lines of one step and the lines in flight are in memory. A line keeps its slot
until its answer is durable.

The server may be unable to answer a line now. For example, the server is busy or restarting, or the tenant is suspended
or has used up its quota. Such a line is sent again later, until the batch expires. While the line waits, it holds no
slot, so that lines of other tenants proceed. Waiting lines stay in memory, so their number is bounded for each API key,
and their bytes for each tenant.

Sends a line of a batch through the routes of this process, as if a client had sent its body.

So a line gets the same checks, quotas and answers as a request over HTTP. The state of the request carries the API key
of the batch and the id of the line. The engine and the usage ledger use this id.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.types import ASGIApp, Message

from slora_adapters.errors import StoreUnavailable
from slora_api.batches.batch_line import (
    MAX_LINES,
    BatchLine,
    TooManyLines,
    read_lines,
    split_lines,
    take_lines,
    write_failure,
    write_response,
)
from slora_api.batches.batches import (
    Batch,
    Batches,
    BatchProblem,
    BatchStatus,
    LeaseLost,
    LineAnswer,
)
from slora_api.core.cpu_budget import CpuBudget
from slora_api.core.errors import ApiError, KeyRevoked, QuotaExceeded, TenantSuspended, describe_error
from slora_api.core.fair_slots import FairSlots
from slora_api.core.rate_limited_log import get_rate_limited_logger
from slora_api.core.request_context import BACKGROUND_ID
from slora_api.core.threads import tenant_thread
from slora_api.keys.key_record import KeyRecord, TenantStatus
from slora_api.keys.key_store import KeyStore
from slora_api.keys.running_requests import RunningRequests

logger = get_rate_limited_logger(__name__)

LEASE_S = 30.0
RENEW_S = 2.0
MAX_RETRY_S = 60.0
_MIN_RETRY_S = 0.1
_BUSY = (429, 503, 507)
_EXPIRED = BatchProblem(
    "batch_expired", "This request could not be executed before the completion window expired."
)
# Each write of answers adds a blob to the store. After this many writes, the blobs are joined.
_WRITES_BETWEEN_COMPACTIONS = 256
# The event loop's time for a line that its route refuses. Such a line costs no tokens, so quotas do not bound it. Each
# line is charged when it is sent, and gets the time back if it is not refused.
_REFUSAL_CPU_S = 0.002
_MAX_DELAYED_BYTES = 8 << 20
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True)
class LineResponse:
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @staticmethod
    def of(error: Exception) -> "LineResponse":
        answer = describe_error(error)
        return LineResponse(answer.status, answer.headers, bytearray(json.dumps(answer.body).encode()))


async def call_route(
    app: ASGIApp, running: RunningRequests, path: str, body: bytes, key: KeyRecord, line_id: str
) -> LineResponse:
    """Computes one line and returns the response. Cancelling the call aborts the request in the engine. Raises
    TenantSuspended if the tenant is suspended before or during the call.
    """
    response = LineResponse()
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "state": {"caller": key, "request_id": line_id, BACKGROUND_ID: line_id},
    }
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # This client never hangs up.
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            pairs = message.get("headers", [])
            response.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        else:
            response.body += message.get("body", b"")

    try:
        with running.track(key.key_id, scope["state"]):
            await app(scope, receive, send)
    except TenantSuspended:
        raise
    except ApiError as error:  # The key was revoked.
        return LineResponse.of(error)
    except Exception as error:  # A bug fails this line only, and is logged.
        logger.error("line %s failed", line_id, exc_info=error)
        return LineResponse.of(error)
    return response


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What the batches in progress in one process share."""

    owner: str  # the runner's id
    batches: Batches
    app: ASGIApp  # the routes, without the layers that authenticate clients
    key_store: KeyStore
    running: RunningRequests
    slots: FairSlots  # for the lines in flight
    delayed: "DelayedLines"
    budget: CpuBudget  # the CPU time of each tenant for its batches
    count_line: Callable[[str], None]  # called with `completed` or `failed` for each answer


class BatchRun:
    """One batch while this process works on it. turn: held by one step of the tenant's batches at a time."""

    def __init__(self, batch: Batch, shared: BatchWork, turn: asyncio.Lock) -> None:
        self._batch = batch
        self._shared = shared
        self._turn = turn
        self._status = batch.status
        # The reason why no further answer can be stored.
        self._full: BatchProblem | None = None
        self._num_writes = 0
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
                    self._batch.tenant, self._shared.batches.release, self._batch.batch_id, self._shared.owner
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
                self._batch.tenant,
                self._shared.batches.finish,
                batch_id,
                self._shared.owner,
                status,
                problems,
            )
            logger.info("batch %s of tenant %s is %s", batch_id, self._batch.tenant, status)
        except* LeaseLost:
            logger.warning("batch %s was taken over by another runner, or was deleted", batch_id)
        except* StoreUnavailable as group_error:
            error: BaseException = group_error
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            logger.warning("batch %s waits for the database or the store: %s", batch_id, error)

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._status = await self._call(
                self._shared.batches.renew, self._batch.batch_id, self._shared.owner, LEASE_S
            )

    async def _work(self) -> tuple[BatchStatus, list[BatchProblem]]:
        """Answers the lines. Returns the final status of the batch, and the problems that made it fail."""
        batch = self._batch
        if batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, []
        if batch.status is BatchStatus.VALIDATING:
            count, problem = await self._count_lines()
            if problem is not None:
                return BatchStatus.FAILED, [problem]
            self._status = await self._call(
                self._shared.batches.begin, batch.batch_id, self._shared.owner, count
            )
        answered = await self._call(self._shared.batches.answered, batch)
        lines = read_lines(self._shared.batches.files.read(batch.input_file_id), batch.endpoint, answered)
        async with asyncio.TaskGroup() as group:
            while (
                not self._must_stop() and (some := await self._step(partial(take_lines, lines))) is not None
            ):
                await self._record([self._fail(line, line.problem) for line in some if line.problem])
                for line in some:
                    await self._wait_for_budget()
                    if line.problem is None and not self._must_stop():
                        admitted = asyncio.Event()
                        group.create_task(self._answer_in_slots(line, admitted))
                        await admitted.wait()
                        while (
                            self._shared.delayed.is_full(batch.tenant, batch.key_id) and not self._must_stop()
                        ):
                            await asyncio.sleep(_MIN_RETRY_S)
        if self._status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, []
        if self._is_expired():
            await self._expire_rest()
            return BatchStatus.EXPIRED, [self._full] if self._full else []
        return (BatchStatus.FAILED, [self._full]) if self._full else (BatchStatus.COMPLETED, [])

    async def _count_lines(self) -> tuple[int, BatchProblem | None]:
        """Returns the number of lines, and the problem that makes the whole batch fail. Stops when the batch must."""
        lines = split_lines(self._shared.batches.files.read(self._batch.input_file_id))
        count = 0
        try:
            while (
                some := await self._step(partial(take_lines, lines))
            ) is not None and not self._must_stop():
                count += len(some)
                if count > MAX_LINES:
                    raise TooManyLines(f"{MAX_LINES} lines")
        except TooManyLines as error:
            return count, BatchProblem("too_many_lines", str(error))
        if not count and not self._must_stop():
            return 0, BatchProblem("empty_file", "The file has no lines.")
        return count, None

    async def _call(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await tenant_thread(self._batch.tenant, call, *args, **kwargs)

    async def _step(self, call: Callable[[], _T]) -> _T:
        """Makes a call as soon as the tenant has CPU time left, and charges the tenant for it. The steps of all batches
        of a tenant take turns. Otherwise, all of them would start as soon as there is CPU time.
        """

        def timed() -> tuple[_T, float]:
            begun_s = time.thread_time()
            return call(), time.thread_time() - begun_s

        async with self._turn:
            await self._wait_for_budget()
            result, cpu_s = await self._call(timed)
            self._shared.budget.charge(self._batch.tenant, cpu_s)
        return result

    async def _wait_for_budget(self) -> None:
        """Waits until the tenant has CPU time left, or the batch must stop."""
        while (wait_s := self._shared.budget.wait_s(self._batch.tenant)) > 0 and not self._must_stop():
            await asyncio.sleep(min(wait_s, RENEW_S))

    async def _answer_in_slots(self, line: BatchLine, admitted: asyncio.Event) -> None:
        """Sends a line until it is answered, unless the batch is cancelled or expires first. admitted: set when the
        line gets its first slot. The next line may then be read.
        """
        try:
            wait_s = await self._answer_in_slot(line, admitted)
            if wait_s is not None:
                with self._shared.delayed.hold(self._batch.tenant, self._batch.key_id, len(line.body)):
                    while wait_s is not None:
                        await self._unless_stopped(asyncio.sleep(wait_s))
                        await self._wait_for_budget()
                        wait_s = await self._answer_in_slot(line, admitted)
        finally:
            admitted.set()

    async def _answer_in_slot(self, line: BatchLine, admitted: asyncio.Event) -> float | None:
        """Sends a line once, in a slot. Returns the seconds after which to send the line again; None if it is not sent
        again.
        """
        async with AsyncExitStack() as stack:
            await self._unless_stopped(stack.enter_async_context(self._shared.slots.hold(self._batch.tenant)))
            admitted.set()
            attempt = await self._unless_stopped(self._answer(line))
            if isinstance(attempt, LineAnswer):
                await self._record([attempt])
                return None
            return attempt

    async def _record(self, answers: Sequence[LineAnswer]) -> None:
        """Writes answers. Answers that arrive during a write are written together in the next one."""
        self._unwritten += answers
        async with self._writing:
            some, self._unwritten = self._unwritten, []
            if not some or self._full is not None:
                return
            try:
                await self._step(partial(self._shared.batches.record, self._batch, self._shared.owner, some))
            except QuotaExceeded as error:
                remedy = "Delete files, and submit the lines without an answer again."
                self._full = BatchProblem("file_bytes_exceeded", f"{error} {remedy}")
                return
            self._num_writes += 1
            if self._num_writes % _WRITES_BETWEEN_COMPACTIONS == 0:
                await self._compact()
        for one in some:
            self._shared.count_line("failed" if one.is_error else "completed")

    async def _compact(self) -> None:
        """Joins the blobs of small writes. They may stay, for example if the disk is full."""
        try:
            for file_id in (self._batch.output_file_id, self._batch.error_file_id):
                last: int | None = -1
                while last is not None:
                    last = await self._step(partial(self._shared.batches.files.compact, file_id, last))
        except StoreUnavailable as error:
            logger.warning("the answers of batch %s stay in small blobs: %s", self._batch.batch_id, error)

    async def _unless_stopped(self, work: Awaitable[_T]) -> _T | None:
        """Returns the result of `work`; None if the batch is cancelled or expires first."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._must_stop():
                    return None
                await asyncio.wait([task], timeout=RENEW_S)
            return task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _answer(self, line: BatchLine) -> LineAnswer | float:
        """Returns the answer to a line, or the seconds after which to send the line again."""
        line_id = f"{self._batch.batch_id}-{line.number}"
        self._shared.budget.charge(self._batch.tenant, _REFUSAL_CPU_S)
        try:
            response = await self._send(line, line_id)
        except StoreUnavailable:
            return RENEW_S
        except TenantSuspended:
            return MAX_RETRY_S
        if response.status < 400:
            self._shared.budget.charge(self._batch.tenant, -_REFUSAL_CPU_S)
        wait_s = response.headers.get("retry-after")
        if response.status in _BUSY and wait_s is not None:
            return min(MAX_RETRY_S, max(_MIN_RETRY_S, float(wait_s)))
        content = write_response(line, line_id, response.status, line_id, bytes(response.body))
        return LineAnswer(line.number, content, response.status >= 400)

    async def _send(self, line: BatchLine, line_id: str) -> LineResponse:
        """Sends a line to its route and returns the response. Raises StoreUnavailable or TenantSuspended."""
        batch = self._batch
        key = await self._call(self._shared.key_store.find_key, batch.key_id)
        if key is None:
            return LineResponse.of(KeyRevoked())
        if key.status is not TenantStatus.ACTIVE:
            raise TenantSuspended(key.tenant_name)
        return await call_route(
            self._shared.app, self._shared.running, batch.endpoint, line.body, key, line_id
        )

    async def _expire_rest(self) -> None:
        """Writes an error for each line without an answer, because the batch has expired."""
        batch = self._batch
        answered = await self._call(self._shared.batches.answered, batch)
        lines = read_lines(self._shared.batches.files.read(batch.input_file_id), batch.endpoint, answered)
        while self._full is None and (some := await self._step(partial(take_lines, lines))) is not None:
            await self._record([self._fail(line, _EXPIRED) for line in some])

    def _fail(self, line: BatchLine, problem: BatchProblem) -> LineAnswer:
        line_id = f"{self._batch.batch_id}-{line.number}"
        return LineAnswer(line.number, write_failure(line, line_id, problem), is_error=True)

    def _is_expired(self) -> bool:
        return self._shared.batches.clock() >= self._batch.expires_at

    def _must_stop(self) -> bool:
        return self._status is BatchStatus.CANCELLING or self._full is not None or self._is_expired()


class DelayedLines:
    """The lines that wait to be sent again. max_lines: while a key has this many of them, no further line of its
    batches is read.
    """

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._num_lines: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()

    def is_full(self, tenant: str, key_id: str) -> bool:
        return self._num_lines[key_id] >= self._max_lines or self._num_bytes[tenant] >= _MAX_DELAYED_BYTES

    @contextmanager
    def hold(self, tenant: str, key_id: str, num_bytes: int) -> Iterator[None]:
        self._num_lines[key_id] += 1
        self._num_bytes[tenant] += num_bytes
        try:
            yield
        finally:
            self._num_lines[key_id] -= 1
            self._num_bytes[tenant] -= num_bytes
            self._num_lines, self._num_bytes = +self._num_lines, +self._num_bytes
