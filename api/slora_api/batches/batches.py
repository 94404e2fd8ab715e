"""The batches of tenants, in the database, with the leases of the runners that work on them.

    validating --> in_progress --> finalizing --> completed
        |               |
        |               +--> expired
        +--> failed     |
        +---------------+--> cancelling --> cancelled

A runner claims a batch for some seconds and renews its lease. If the runner dies, another runner claims the batch when
the lease has ended. A write by a runner that no longer has the lease is refused. The clocks of hosts that share a
database must agree to within a few seconds.

An answer file has one piece for each answered line. The answers that are written together share a blob. The
transaction that adds the pieces also updates the counts of the batch. So each line is answered once, even if it was
computed several times. Answers are charged to the tenant before they are written. A batch whose answers would exceed
the tenant's limit fails, and keeps the answers so far.

Every call blocks, so an event loop should make it on a thread.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Select, Update, and_, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_api.batches.files import UNFINISHED, FilePiece, Files, StoredFile, files_lock, new_blob, new_id
from slora_api.core.errors import BadRequest, BatchConflict, NotFound, QuotaExceeded

WINDOW_S = 86_400.0
_b, _f, _p = schema.batches.c, schema.files.c, schema.file_pieces.c


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class LeaseLost(Exception):
    """Another runner has the batch now, or the batch no longer exists."""


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """A reason why a batch or one of its lines failed. line: the line number in the input file, from 1; None for the
    whole file.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a tenant. times: state -> the Unix time at which the batch entered it. is_final: whether the answer
    files are complete.
    """

    batch_id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    status: BatchStatus
    metadata: Mapping[str, str] | None
    errors: Sequence[BatchProblem]
    times: Mapping[str, float]
    created_at: float
    expires_at: float
    num_lines: int
    num_completed: int
    num_failed: int

    @property
    def is_final(self) -> bool:
        return self.status not in UNFINISHED


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line. content: one line of JSON with its newline."""

    number: int
    content: bytes
    is_error: bool


class Batches:
    """The batches of all tenants. max_unfinished: the maximum number of unfinished batches of one tenant. clock: Unix
    time.
    """

    def __init__(
        self, database: Database, files: Files, max_unfinished: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.files = files
        self.clock = clock
        self._database = database
        self._max_unfinished = max_unfinished

    def create(
        self,
        tenant: str,
        key_id: str,
        endpoint: str,
        input_file_id: str,
        metadata: Mapping[str, str] | None,
    ) -> Batch:
        """Creates a batch and returns it. Raises NotFound, BadRequest or QuotaExceeded."""
        stored = self.files.find(tenant, input_file_id)
        if stored.purpose != "batch":
            raise BadRequest(
                f"The file `{input_file_id}` has the purpose `{stored.purpose}`; the input of a batch needs `batch`.",
                "input_file_id",
            )
        now = self.clock()
        batch_id = new_id("batch_", now)
        row = {
            "batch_id": batch_id,
            "tenant": tenant,
            "key_id": key_id,
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "output_file_id": new_id("file-", now),
            "error_file_id": new_id("file-", now),
            "status": BatchStatus.VALIDATING.value,
            "metadata": json.dumps(metadata),
            "errors": "[]",
            "times": "{}",
            "created_at": now,
            "expires_at": now + WINDOW_S,
            "num_lines": 0,
            "num_completed": 0,
            "num_failed": 0,
            "lease_owner": "",
            "lease_until": 0.0,
        }
        with self._database.transaction(files_lock(tenant), CHANGES, is_cached=False) as connection:
            self.files.check_kept(connection, input_file_id)
            unfinished = select(func.count()).where(_b.tenant == tenant, _b.status.in_(UNFINISHED))
            count = connection.execute(unfinished).scalar_one()
            if count >= self._max_unfinished:
                raise QuotaExceeded(
                    f"Your tenant has {count} batches that are not finished, and the limit is "
                    f"{self._max_unfinished} (max_batches_per_tenant); wait until one ends, or cancel one."
                )
            connection.execute(insert(schema.batches), row)
            details = {"endpoint": endpoint, "input_file_id": input_file_id}
            record_change(connection, "batch.create", tenant, batch_id, details)
        return self.find(tenant, batch_id)

    def find(self, tenant: str, batch_id: str) -> Batch:
        """Returns a batch of the tenant. Raises NotFound."""
        rows = self._database.read(_select().where(_b.tenant == tenant, _b.batch_id == batch_id))
        if not rows:
            raise NotFound(f"There is no batch `{batch_id[:128]}`.")
        return _read(rows[0])

    def list(self, tenant: str, limit: int, after: str | None) -> list[Batch]:
        """Returns up to `limit` batches of the tenant, newest first."""
        query = _select().where(_b.tenant == tenant).order_by(_b.batch_id.desc()).limit(limit)
        if after is not None:
            query = query.where(_b.batch_id < after)
        return [_read(row) for row in self._database.read(query)]

    def count_by_status(self) -> dict[str, int]:
        """Returns the number of unfinished batches of all tenants, by status."""
        query = select(_b.status, func.count()).where(_b.status.in_(UNFINISHED)).group_by(_b.status)
        return {status: count for status, count in self._database.read(query)}

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Stops the batch after its lines in progress. Raises NotFound, or BatchConflict if the batch has ended."""
        self.find(tenant, batch_id)
        locks = (_lock(batch_id), CHANGES)
        with self._database.transaction(*locks, even_if_full=True, is_cached=False) as connection:
            found = _find(connection, batch_id)
            if found.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                _change(connection, found, BatchStatus.CANCELLING, self.clock())
                record_change(connection, "batch.cancel", tenant, batch_id)
            elif found.status is not BatchStatus.CANCELLING:
                raise BatchEnded(found)
        return self.find(tenant, batch_id)

    # -- runners ----------------------------------------------------------------------------------------------------

    def claim(
        self, owner: str, lease_s: float, busy_tenants: Collection[str], *, others_only: bool = False
    ) -> Batch | None:
        """Leases the oldest batch that no runner works on, and returns it; None if there is none. Cancelled batches go
        first, because they only have to end, also on a full disk. Then come batches of tenants without a batch in
        progress in this process.

        busy_tenants: tenants with a batch in progress in this process. others_only: lease no batch of these tenants.
        """
        now = self.clock()
        is_free = and_(_b.status.in_(UNFINISHED), _b.lease_until < now)
        is_running = _b.status != BatchStatus.CANCELLING
        order = (is_running, _b.tenant.in_(busy_tenants), _b.batch_id)
        query = select(_b.batch_id, is_running.label("is_running")).where(is_free).order_by(*order).limit(1)
        if others_only:
            query = query.where(_b.tenant.not_in(busy_tenants))
        if not (rows := self._database.read(query)):
            return None
        leased = update(schema.batches).where(_b.batch_id == rows[0].batch_id, is_free)
        with self._database.transaction(even_if_full=not rows[0].is_running) as connection:
            values = {"lease_owner": owner, "lease_until": now + lease_s}
            if not connection.execute(leased.values(**values)).rowcount:
                return None  # Another runner leased the batch first.
            found = _find(connection, rows[0].batch_id)
            for file_id in (found.output_file_id, found.error_file_id):
                self.files.recount(connection, file_id)
            return found

    def renew(self, batch_id: str, owner: str, lease_s: float) -> BatchStatus:
        """Extends a lease and returns the status of the batch. Raises LeaseLost."""
        with self._leased(batch_id, owner, even_if_full=True) as (connection, found):
            leased = update(schema.batches).where(_b.batch_id == batch_id)
            connection.execute(leased.values(lease_until=self.clock() + lease_s))
            return found.status

    def release(self, batch_id: str, owner: str) -> None:
        """Ends a lease early, so that another runner can continue at once."""
        mine = update(schema.batches).where(_b.batch_id == batch_id, _b.lease_owner == owner)
        with self._database.transaction(even_if_full=True) as connection:
            connection.execute(mine.values(lease_owner="", lease_until=0.0))

    def begin(self, batch_id: str, owner: str, num_lines: int) -> BatchStatus:
        """Records that the input is valid. Returns the new status, which is CANCELLING if the tenant has already
        cancelled the batch. Raises LeaseLost.
        """
        with self._leased(batch_id, owner) as (connection, found):
            row = update(schema.batches).where(_b.batch_id == batch_id)
            connection.execute(row.values(num_lines=num_lines))
            if found.status is not BatchStatus.VALIDATING:
                return found.status
            _change(connection, found, BatchStatus.IN_PROGRESS, self.clock())
            return BatchStatus.IN_PROGRESS

    def answered(self, batch: Batch) -> set[int]:
        """Returns the numbers of the lines that have an answer."""
        query = select(_p.number).where(_p.file_id.in_((batch.output_file_id, batch.error_file_id)))
        return {row.number for row in self._database.read(query)}

    def record(self, batch: Batch, owner: str, answers: Sequence[LineAnswer]) -> None:
        """Writes the answers of lines that have no answer yet. Raises LeaseLost, or QuotaExceeded if the tenant's files
        would be too large.
        """
        for file_id, is_error in ((batch.output_file_id, False), (batch.error_file_id, True)):
            if some := [one for one in answers if one.is_error is is_error]:
                self._write(batch, owner, file_id, sorted(some, key=lambda one: one.number))

    def _write(self, batch: Batch, owner: str, file_id: str, answers: Sequence[LineAnswer]) -> None:
        """Writes answers into one of the two files of a batch."""
        content, blob = b"".join(one.content for one in answers), new_blob()
        lock = files_lock(batch.tenant)
        with self._leased(batch.batch_id, owner, lock) as (connection, _):
            kind = "error" if file_id == batch.error_file_id else "output"
            filename = f"{batch.batch_id}_{kind}.jsonl"
            stored = StoredFile(
                file_id, batch.tenant, "batch_output", filename, len(content), self.clock(), None
            )
            self.files.charge(connection, stored, blob)
        try:
            self.files.put(blob, content)
            with self._leased(batch.batch_id, owner) as (connection, _):
                both = (batch.output_file_id, batch.error_file_id)
                numbers = [one.number for one in answers]
                query = select(_p.number).where(_p.file_id.in_(both), _p.number.in_(numbers))
                present = set(connection.execute(query).scalars())
                pieces, start = [], 0
                for one in answers:
                    if one.number not in present:
                        pieces.append(FilePiece(one.number, blob, start, len(one.content)))
                    start += len(one.content)
                if pieces:
                    self.files.add_pieces(connection, stored, pieces)
                    counted = _b.num_failed if kind == "error" else _b.num_completed
                    row = update(schema.batches).where(_b.batch_id == batch.batch_id)
                    connection.execute(row.values({counted: counted + len(pieces)}))
        except BaseException:
            self.files.give_back(stored, blob)
            raise
        if not pieces:
            self.files.give_back(stored, blob)

    def finish(
        self, batch_id: str, owner: str, status: BatchStatus, errors: Sequence[BatchProblem] = ()
    ) -> None:
        """Ends a batch and makes its answer files visible. Raises LeaseLost."""
        now = self.clock()
        with self._leased(batch_id, owner, even_if_full=True) as (connection, found):
            if status is BatchStatus.COMPLETED:
                found = _change(connection, found, BatchStatus.FINALIZING, now)
            _change(connection, found, status, now)
            kept = {
                "output_file_id": self._publish(connection, found.output_file_id, now),
                "error_file_id": self._publish(connection, found.error_file_id, now),
                "errors": json.dumps([{name: getattr(one, name) for name in _PROBLEM} for one in errors]),
                "lease_owner": "",
                "lease_until": 0.0,
            }
            connection.execute(update(schema.batches).where(_b.batch_id == batch_id).values(**kept))

    def _publish(self, connection: Connection, file_id: str, now: float) -> str:
        """Makes an answer file visible. Returns the id of the file; empty if the file has no lines."""
        self.files.recount(connection, file_id)
        connection.execute(delete(schema.files).where(_f.file_id == file_id, _f.num_bytes == 0))
        row = update(schema.files).where(_f.file_id == file_id)
        done = connection.execute(row.values(created_at=now, is_complete=True)).rowcount
        return file_id if done else ""

    @contextmanager
    def _leased(
        self, batch_id: str, owner: str, *locks: str, even_if_full: bool = False
    ) -> Iterator[tuple[Connection, Batch]]:
        with self._database.transaction(_lock(batch_id), *locks, even_if_full=even_if_full) as connection:
            mine = _select().where(
                _b.batch_id == batch_id, _b.lease_owner == owner, _b.lease_until > self.clock()
            )
            row = connection.execute(mine).one_or_none()
            if row is None:
                raise LeaseLost(batch_id)
            yield connection, _read(row)


class BatchEnded(BatchConflict):
    """A batch that has ended cannot be cancelled."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(f"The batch `{batch.batch_id}` is {batch.status}, so it cannot be cancelled.")


_COLUMNS = tuple(_b[name] for name in Batch.__slots__)
_PROBLEM = tuple(BatchProblem.__slots__)


def _lock(batch_id: str) -> str:
    return f"batch {batch_id}"


def _select() -> Select[Any]:
    return select(*_COLUMNS)


def _find(connection: Connection, batch_id: str) -> Batch:
    return _read(connection.execute(_select().where(_b.batch_id == batch_id)).one())


def _change(connection: Connection, batch: Batch, status: BatchStatus, now: float) -> Batch:
    times = {**batch.times, f"{status}_at": now}
    row: Update = update(schema.batches).where(_b.batch_id == batch.batch_id)
    connection.execute(row.values(status=status.value, times=json.dumps(times)))
    return _find(connection, batch.batch_id)


def _read(row: Any) -> Batch:
    values = dict(zip(Batch.__slots__, row, strict=True))
    values["status"] = BatchStatus(values["status"])
    values["metadata"] = json.loads(values["metadata"])
    values["errors"] = [BatchProblem(**one) for one in json.loads(values["errors"])]
    values["times"] = json.loads(values["times"])
    return Batch(**values)
