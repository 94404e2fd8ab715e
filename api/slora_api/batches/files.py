"""The files of tenants in the database: inputs and answers of batches.

The bytes are also in the database, split into parts. So every process on every host can read a file, backups include
it, and the purge of its tenant deletes it. A file is visible when all of its parts are written.

Every call blocks, so an event loop should make it on a thread.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Select, delete, func, insert, or_, select, update
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_api.errors import BadRequest, InUse, NotFound, QuotaExceeded

__all__ = ["PURPOSES", "FileLimits", "Files", "StoredFile", "files_lock", "new_id"]

PURPOSES = ("batch", "batch_output")
_PART_BYTES = 32 << 10
# The number of parts written in one transaction. It is small, so that other writers wait only for milliseconds.
_PARTS_AT_ONCE = 16
# A file that is incomplete after this time was left by a process that was killed.
_MAX_UPLOAD_S = 3600.0
_DELETED_AT_ONCE = 100
# The statuses of batches that still read their input file.
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")

_f, _p, _b = schema.files.c, schema.file_parts.c, schema.batches.c


@dataclass(frozen=True, slots=True)
class FileLimits:
    """The maximum number and total bytes of one tenant's files, including answer files."""

    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    file_id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: float
    expires_at: float | None


def new_id(prefix: str, now: float) -> str:
    """Returns an id that cannot be guessed. Ids sort by creation time."""
    return f"{prefix}{round(now * 1000):012x}{secrets.token_hex(10)}"


def files_lock(tenant: str) -> str:
    """Returns the name of a tenant's lock. Transactions that add or delete a file of the tenant, or add a batch that
    reads a file, hold the lock.
    """
    return f"files {tenant}"


class Files:
    """The files of all tenants. Methods raise StoreUnavailable, and DiskFull if they write. clock: Unix time."""

    def __init__(
        self, database: Database, limits: FileLimits, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._limits = limits
        self._clock = clock

    def create(self, tenant: str, filename: str, source: Path, expires_after_s: int | None) -> StoredFile:
        """Stores the file at `source`. Raises QuotaExceeded."""
        now, num_bytes = self._clock(), source.stat().st_size
        expires_at = None if expires_after_s is None else now + expires_after_s
        stored = StoredFile(new_id("file-", now), tenant, "batch", filename, num_bytes, now, expires_at)
        with self._database.transaction(files_lock(tenant)) as connection:
            count, used = connection.execute(
                select(func.count(), func.sum(_f.num_bytes)).where(_f.tenant == tenant)
            ).one()
            self._check_limits(count, int(used or 0), num_bytes)
            row = {name: getattr(stored, name) for name in StoredFile.__slots__}
            connection.execute(insert(schema.files), {**row, "is_complete": False})
        try:
            for rows in _read_parts(stored, source):
                with self._database.transaction() as connection:
                    connection.execute(insert(schema.file_parts), rows)
            with self._database.transaction(CHANGES, is_cached=False) as connection:
                done = update(schema.files).where(_f.file_id == stored.file_id).values(is_complete=True)
                if not connection.execute(done).rowcount:
                    raise NotFound.of_tenant(tenant)  # The tenant was purged meanwhile.
                record_change(connection, "file.create", tenant, stored.file_id, {"bytes": num_bytes})
        except BaseException:
            self._delete_rows([stored.file_id])
            raise
        return stored

    def find(self, tenant: str, file_id: str) -> StoredFile:
        """Returns a file of the tenant. Raises NotFound."""
        rows = self._database.read(_visible().where(_f.tenant == tenant, _f.file_id == file_id))
        if not rows:
            raise _not_found(file_id)
        return StoredFile(*rows[0])

    def check_kept(self, connection: Connection, file_id: str) -> None:
        """Raises NotFound if the file is deleted, or has expired and may be deleted at any time. The transaction of
        `connection` must hold `files_lock`.
        """
        query = _visible().where(_f.file_id == file_id)
        row = connection.execute(query.where(or_(_f.expires_at.is_(None), _f.expires_at >= self._clock())))
        if row.one_or_none() is None:
            raise _not_found(file_id)

    def list(
        self, tenant: str, purpose: str | None, limit: int, after: str | None, *, newest_first: bool = True
    ) -> Sequence[StoredFile]:
        query = _visible().where(_f.tenant == tenant).limit(limit)
        if purpose is not None:
            query = query.where(_f.purpose == purpose)
        if after is not None:
            query = query.where(_f.file_id < after if newest_first else _f.file_id > after)
        query = query.order_by(_f.file_id.desc() if newest_first else _f.file_id)
        return [StoredFile(*row) for row in self._database.read(query)]

    def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises NotFound, or InUse while a batch reads the file."""
        self.find(tenant, file_id)
        locks = (files_lock(tenant), CHANGES)
        with self._database.transaction(*locks, even_if_full=True, is_cached=False) as connection:
            users = select(_b.batch_id).where(
                _b.tenant == tenant, _b.input_file_id == file_id, _b.status.in_(UNFINISHED)
            )
            batch_id = connection.execute(users.limit(1)).scalar_one_or_none()
            if batch_id is not None:
                raise FileInUse(file_id, batch_id)
            hidden = update(schema.files).where(_f.file_id == file_id)
            connection.execute(hidden.values(is_complete=False, expires_at=0.0))
            record_change(connection, "file.delete", tenant, file_id)
        self._delete_rows([file_id])

    def read(self, file_id: str) -> Iterator[bytes]:
        """Yields the content of a file, a few parts at a time. The iteration ends early if the file is deleted
        meanwhile.
        """
        query = (
            select(_p.number, _p.content)
            .where(_p.file_id == file_id)
            .order_by(_p.number)
            .limit(_PARTS_AT_ONCE)
        )
        rows = self._database.read(query)
        while rows:
            yield b"".join(bytes(row.content) for row in rows)
            rows = self._database.read(query.where(_p.number > rows[-1].number))

    def delete_expired(self) -> bool:
        """Deletes some expired and abandoned files. Returns whether more such files may be left."""
        now = self._clock()
        busy = select(_b.input_file_id).where(_b.status.in_(UNFINISHED))
        late = select(_f.file_id).where(_f.expires_at < now, _f.file_id.not_in(busy))
        abandoned = select(_f.file_id).where(~_f.is_complete, _f.created_at < now - _MAX_UPLOAD_S)
        found = [
            row.file_id
            for query in (late, abandoned)
            for row in self._database.read(query.limit(_DELETED_AT_ONCE))
        ]
        if found:
            self._delete_rows(found)
        return bool(found)

    def _delete_rows(self, file_ids: Sequence[str]) -> None:
        for file_id in file_ids:
            some = select(_p.number).where(_p.file_id == file_id).order_by(_p.number).limit(_DELETED_AT_ONCE)
            while True:
                with self._database.transaction(even_if_full=True) as connection:
                    numbers = connection.execute(some).scalars().all()
                    if not numbers:
                        connection.execute(delete(schema.files).where(_f.file_id == file_id))
                        break
                    gone = delete(schema.file_parts).where(_p.file_id == file_id, _p.number <= numbers[-1])
                    connection.execute(gone)

    def _check_limits(self, num_files: int, used_bytes: int, num_bytes: int) -> None:
        if num_files >= self._limits.num_files:
            raise QuotaExceeded(
                f"Your tenant has {num_files} files, and the limit is {self._limits.num_files} "
                "(max_files_per_tenant); delete one first."
            )
        if used_bytes + num_bytes > self._limits.num_bytes:
            raise QuotaExceeded(
                f"Your tenant's files have {used_bytes} bytes. With the {num_bytes} bytes of this file they would "
                f"exceed the limit of {self._limits.num_bytes} (max_file_bytes_per_tenant); delete some first."
            )


class FileInUse(InUse):
    """A file cannot be deleted while a batch reads it."""

    def __init__(self, file_id: str, batch_id: str) -> None:
        Exception.__init__(
            self,
            f"The file `{file_id}` is the input of the batch `{batch_id}`, which is not finished. Cancel the batch "
            f"(POST /v1/batches/{batch_id}/cancel), or wait until it ends.",
        )


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"There is no file `{file_id[:128]}`.")


def check_purpose(purpose: str, accepted: tuple[str, ...] = ("batch",)) -> None:
    if purpose not in accepted:
        names = " and ".join(f"`{name}`" for name in accepted)
        raise BadRequest(f"`purpose` is {purpose[:64]!r}; this server accepts {names}.", "purpose")


def _visible() -> Select[Any]:
    return select(*(_f[name] for name in StoredFile.__slots__)).where(_f.is_complete)


def _read_parts(stored: StoredFile, source: Path) -> Iterator[list[dict[str, Any]]]:
    number = 0
    with source.open("rb") as file:
        while content := file.read(_PART_BYTES * _PARTS_AT_ONCE):
            pieces = [content[at : at + _PART_BYTES] for at in range(0, len(content), _PART_BYTES)]
            yield [
                {"file_id": stored.file_id, "number": number + at, "tenant": stored.tenant, "content": piece}
                for at, piece in enumerate(pieces)
            ]
            number += len(pieces)
