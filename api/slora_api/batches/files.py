"""The files of tenants: inputs and answers of batches.

The database keeps only rows. The bytes are blobs in the durable store of the adapters, under random ids. So every host
can read a file, backups include it, and the purge of its tenant deletes it. A file is visible when all of its blobs are
stored.

    1. A transaction charges the bytes to the tenant, and reserves the id of the blob.
    2. The blob is stored.
    3. A transaction adds the rows that refer to the blob, and ends the reservation.

If step 2 or 3 fails, the charge is given back. A crash leaves a blob that no row refers to. `StoredAdapters.sweep`
drops it when the reservation has expired.

Every call blocks, so an event loop should make it on a thread.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Delete, Select, delete, exists, func, insert, or_, select, update
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import AdapterNotFound, StoreUnavailable, StoreUnfit, TryAgain
from slora_adapters.registry.registry import RESERVATION_S, StoredAdapters
from slora_adapters.store.store import Blob, Store
from slora_api.core.errors import BadRequest, InUse, NotFound, QuotaExceeded
from slora_api.core.settings import Settings
from slora_api.keys.key_record import TenantStatus

PURPOSES = ("batch", "batch_output")
# The only member of a blob.
_CONTENT = "content"
# The largest part of a file that is read at once.
_READ_BYTES = 1 << 18
# The number of rows that one statement reads, and that one transaction writes. Other writers wait only for
# milliseconds, and the disk reserve has room for the transaction.
_ROWS_READ, ROWS_WRITTEN = 2000, 500
# The number of blobs that a reader keeps open.
_MAX_OPEN = 16
# `compact` joins consecutive pieces with at most this many bytes into one blob.
COMPACTED_BYTES = 8 << 20
# A file that is incomplete after this time was left by a process that was killed.
_MAX_UPLOAD_S = 3600.0
_DELETED_AT_ONCE = 100
# The statuses of batches that still read their input file.
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")

_f, _p, _b = schema.files.c, schema.file_pieces.c, schema.batches.c
_r = schema.adapter_reservations.c
# Whether the tenant of a file exists, and its purge has not begun.
_HAS_OWNER = exists().where(
    schema.tenants.c.tenant_id == _f.tenant, schema.tenants.c.status != TenantStatus.PURGING
)


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


class FilePiece(NamedTuple):
    """Bytes [start, start + num_bytes) of a blob, which are a part of a file. number: see `schema.file_pieces`."""

    number: int
    blob: str
    start: int
    num_bytes: int


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
        self,
        database: Database,
        blobs: StoredAdapters,
        limits: FileLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._limits = limits
        self._clock = clock

    def create(self, tenant: str, filename: str, source: Path, expires_after_s: int | None) -> StoredFile:
        """Stores the file at `source`. Raises QuotaExceeded."""
        now, num_bytes = self._clock(), source.stat().st_size
        expires_at = None if expires_after_s is None else now + expires_after_s
        stored = StoredFile(new_id("file-", now), tenant, "batch", filename, num_bytes, now, expires_at)
        blob = new_blob()
        with self._database.transaction(files_lock(tenant)) as connection:
            self.charge(connection, stored, blob)
        try:
            self.put(blob, source)
            with self._database.transaction(CHANGES, is_cached=False) as connection:
                done = update(schema.files).where(_f.file_id == stored.file_id, _HAS_OWNER)
                if not connection.execute(done.values(is_complete=True)).rowcount:
                    raise NotFound.of_tenant(tenant)  # The tenant was purged meanwhile.
                self.add_pieces(connection, stored, [FilePiece(0, blob, 0, num_bytes)])
                record_change(connection, "file.create", tenant, stored.file_id, {"bytes": num_bytes})
        except BaseException:
            self.give_back(stored, blob)
            with suppress(StoreUnavailable):  # `delete_expired` tries again.
                self._delete_rows([stored.file_id])
            raise
        return stored

    # -- writing ----------------------------------------------------------------------------------------------------

    def charge(self, connection: Connection, stored: StoredFile, blob: str) -> None:
        """Charges `stored.num_bytes` further bytes of a file to its tenant, and reserves the blob for them. Creates the
        file if it does not exist. The transaction of `connection` must hold `files_lock`. Raises QuotaExceeded.
        """
        query = select(func.count(), func.sum(_f.num_bytes)).where(_f.tenant == stored.tenant)
        count, used = connection.execute(query).one()
        # Answer files do not count here, because their tenant did not choose to create them.
        self._check_limits(count if stored.purpose == "batch" else 0, int(used or 0), stored.num_bytes)
        grown = update(schema.files).where(_f.file_id == stored.file_id)
        if not connection.execute(grown.values(num_bytes=_f.num_bytes + stored.num_bytes)).rowcount:
            row = {name: getattr(stored, name) for name in StoredFile.__slots__}
            connection.execute(insert(schema.files), {**row, "is_complete": False})
        self._reserve(connection, stored.file_id, blob)

    def put(self, blob: str, content: Path | bytes) -> None:
        self._blobs.durable.put(blob, {_CONTENT: content})

    def add_pieces(self, connection: Connection, stored: StoredFile, pieces: Sequence[FilePiece]) -> None:
        """Adds pieces of one blob to a file, and ends the reservation of the blob. Charged bytes in no piece are given
        back. Raises TryAgain if the reservation has expired.
        """
        self._release(connection, stored.file_id, pieces[0].blob)
        rows = [{"file_id": stored.file_id, "tenant": stored.tenant, **one._asdict()} for one in pieces]
        connection.execute(insert(schema.file_pieces), rows)
        unused = stored.num_bytes - sum(one.num_bytes for one in pieces)
        if unused:
            grown = update(schema.files).where(_f.file_id == stored.file_id)
            connection.execute(grown.values(num_bytes=_f.num_bytes - unused))

    def give_back(self, stored: StoredFile, blob: str) -> None:
        """Undoes `charge` and `put` after a failure. If the database does not answer, the charge ends with the batch or
        the upload.
        """
        with suppress(StoreUnavailable), self._database.transaction(even_if_full=True) as connection:
            if connection.execute(_reservation(stored.file_id, blob)).rowcount:
                charged = update(schema.files).where(_f.file_id == stored.file_id)
                connection.execute(charged.values(num_bytes=_f.num_bytes - stored.num_bytes))
        self._blobs.drop_unreferenced([blob])

    def recount(self, connection: Connection, file_id: str) -> None:
        """Sets the size of an answer file to the bytes that it has, because a runner may have died with a charge."""
        written = select(func.coalesce(func.sum(_p.num_bytes), 0)).where(_p.file_id == file_id)
        row = update(schema.files).where(_f.file_id == file_id)
        connection.execute(row.values(num_bytes=written.scalar_subquery()))
        own = _r.reservation.startswith(f"{file_id}.", autoescape=True)
        connection.execute(delete(schema.adapter_reservations).where(own))

    def compact(self, file_id: str, after: int) -> int | None:
        """Joins small blobs of an answer file whose pieces have numbers above `after`. Returns the number of the last
        piece that was examined; None at the end of the file.

        The pieces stay, in other places. So the numbers of the answered lines are known at all times.
        """
        pieces: list[FilePiece] = []
        num_bytes = 0
        for piece in self._find_pieces(file_id, after):
            num_bytes += piece.num_bytes
            if pieces and num_bytes > COMPACTED_BYTES:
                break
            pieces.append(piece)
        if not pieces:
            return None
        old = {piece.blob for piece in pieces}
        if len(old) > 1:
            self._move(file_id, pieces)
            self._blobs.drop_unreferenced(old)
        return pieces[-1].number

    def _move(self, file_id: str, pieces: Sequence[FilePiece]) -> None:
        """Copies the pieces into a blob of their own."""
        blob, start = new_blob(), 0
        with self._database.transaction() as connection:
            self._reserve(connection, file_id, blob)
        try:
            with closing(_OpenBlobs(self._blobs.durable)) as opened:
                self.put(blob, b"".join(_read_pieces(pieces, opened)))
            for first in range(0, len(pieces), ROWS_WRITTEN):
                with self._database.transaction() as connection:
                    for piece in pieces[first : first + ROWS_WRITTEN]:
                        row = update(schema.file_pieces).where(
                            _p.file_id == file_id, _p.number == piece.number
                        )
                        connection.execute(row.values(blob=blob, start=start))
                        start += piece.num_bytes
                    if first + ROWS_WRITTEN >= len(pieces):
                        self._release(connection, file_id, blob)
        except BaseException:
            with suppress(StoreUnavailable), self._database.transaction(even_if_full=True) as connection:
                connection.execute(_reservation(file_id, blob))
            self._blobs.drop_unreferenced([blob])
            raise

    def _reserve(self, connection: Connection, file_id: str, blob: str) -> None:
        row = {
            "reservation": f"{file_id}.{blob}",
            "digest": blob,
            "expires_at": self._clock() + RESERVATION_S,
        }
        connection.execute(insert(schema.adapter_reservations), row)

    def _release(self, connection: Connection, file_id: str, blob: str) -> None:
        if not connection.execute(_reservation(file_id, blob)).rowcount:
            raise TryAgain(
                f"writing to the file {file_id} took too long, so its reservation expired; try again"
            )

    # -- reading ----------------------------------------------------------------------------------------------------

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
        """Yields the content of a file in parts of at most 512 KiB. If the file is deleted meanwhile, the content ends
        early, or StoreUnavailable is raised.
        """
        after = -1
        with closing(_OpenBlobs(self._blobs.durable)) as opened:
            while pieces := self._find_pieces(file_id, after):
                yield from _read_pieces(pieces, opened)
                after = pieces[-1].number

    def _find_pieces(self, file_id: str, after: int) -> Sequence[FilePiece]:
        query = (
            select(_p.number, _p.blob, _p.start, _p.num_bytes)
            .where(_p.file_id == file_id, _p.number > after)
            .order_by(_p.number)
            .limit(_ROWS_READ)
        )
        return [FilePiece(*row) for row in self._database.read(query)]

    def delete_expired(self) -> bool:
        """Deletes some expired and abandoned files. Returns whether more such files may be left."""
        now = self._clock()
        busy = select(_b.input_file_id).where(_b.status.in_(UNFINISHED))
        late = select(_f.file_id).where(_f.expires_at < now, _f.file_id.not_in(busy))
        # Answer files are incomplete while their batch runs.
        abandoned = select(_f.file_id).where(
            ~_f.is_complete, _f.purpose == "batch", _f.created_at < now - _MAX_UPLOAD_S
        )
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
            some = select(_p.number, _p.blob).where(_p.file_id == file_id).order_by(_p.number)
            blobs: set[str] = set()
            while True:
                with self._database.transaction(even_if_full=True) as connection:
                    rows = connection.execute(some.limit(ROWS_WRITTEN)).all()
                    if not rows:
                        connection.execute(delete(schema.files).where(_f.file_id == file_id))
                        break
                    gone = delete(schema.file_pieces).where(
                        _p.file_id == file_id, _p.number <= rows[-1].number
                    )
                    connection.execute(gone)
                    blobs.update(row.blob for row in rows)
            self._blobs.drop_unreferenced(blobs)

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


def new_blob() -> str:
    return secrets.token_hex(32)


def _reservation(file_id: str, blob: str) -> Delete:
    return delete(schema.adapter_reservations).where(_r.reservation == f"{file_id}.{blob}")


class _OpenBlobs:
    """The blobs that a reader used last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._opened: dict[str, Blob] = {}

    def find(self, name: str) -> Blob:
        blob = self._opened.pop(name, None)
        if blob is None:
            try:
                blob = self._store.open(name)
            except AdapterNotFound:
                raise StoreUnfit(
                    f"the store lacks the blob {name} of a file, or the file was deleted"
                ) from None
        self._opened[name] = blob
        if len(self._opened) > _MAX_OPEN:
            self._opened.pop(next(iter(self._opened))).close()
        return blob

    def close(self) -> None:
        for blob in self._opened.values():
            blob.close()


def _read_pieces(pieces: Iterable[FilePiece], opened: _OpenBlobs) -> Iterator[bytes]:
    parts: list[bytearray] = []
    num_bytes = 0
    for blob, start, end in _join(pieces):
        for at in range(start, end, _READ_BYTES):
            parts.append(bytearray(min(_READ_BYTES, end - at)))
            opened.find(blob).read_into(_CONTENT, at, memoryview(parts[-1]))
            num_bytes += len(parts[-1])
            if num_bytes >= _READ_BYTES:
                yield b"".join(parts)
                parts, num_bytes = [], 0
    yield b"".join(parts)


def _join(pieces: Iterable[FilePiece]) -> Iterator[tuple[str, int, int]]:
    """Yields blob, start and end of each run of pieces that follow one another in a blob."""
    blob, start, end = "", 0, 0
    for piece in pieces:
        if (piece.blob, piece.start) != (blob, end):
            if blob:
                yield blob, start, end
            blob, start = piece.blob, piece.start
        end = piece.start + piece.num_bytes
    if blob:
        yield blob, start, end


def file_limits(settings: Settings) -> FileLimits:
    return FileLimits(settings.max_files_per_tenant, settings.max_file_bytes_per_tenant)
