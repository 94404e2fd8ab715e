"""Which blobs the database refers to: by versions, by files of batches, and by reservations.

A blob without a reference may be deleted, but only through `collect`. An upload reserves the digest before it stores
the blob, and a backup reserves every blob that it copies. `collect` keeps reserved blobs.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from sqlalchemy import BindParameter, bindparam, delete, func, insert, select, union, union_all, update
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database, blob_lock
from slora_adapters.errors import StoreUnavailable, TryAgain
from slora_adapters.store.store import check_digest

# How long an upload may take between storing its blob and creating its version. After that time, the blob of a crashed
# upload may be dropped.
RESERVATION_S = 3600.0

_v, _r, _p = schema.adapter_versions.c, schema.adapter_reservations.c, schema.file_pieces.c
# At most this many blobs are asked for at once: SQLite accepts 32,766 parameters.
_BLOBS_AT_ONCE = 1000
_digests: BindParameter[Sequence[str]] = bindparam("digests", expanding=True)
_REFERENCED_OF = union(
    select(_v.digest).where(_v.digest.in_(_digests)),
    select(_p.blob).where(_p.blob.in_(_digests)),
    select(_r.digest).where(_r.digest.in_(_digests), _r.expires_at > bindparam("now")),
)
_REFERENCED = union_all(
    select(_v.digest).where(_v.digest == bindparam("digest"), _v.tenant != bindparam("leaving")),
    select(_p.blob).where(_p.blob == bindparam("digest"), _p.tenant != bindparam("leaving")),
    select(_r.digest).where(_r.digest == bindparam("digest"), _r.expires_at > bindparam("now")),
).limit(1)


class BlobReferences:
    """The references to the blobs of one store. Every method raises StoreUnavailable if the database does not answer,
    but for `release`.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def find_referenced(self, digests: Iterable[str]) -> set[str]:
        """Returns those of the blobs that a version or a file of any tenant, or a reservation, needs."""
        found: set[str] = set()
        rest = iter(digests)
        while piece := list(islice(rest, _BLOBS_AT_ONCE)):
            rows = self._database.read(_REFERENCED_OF, {"digests": piece, "now": self._clock()})
            found.update(digest for (digest,) in rows)
        return found

    def sizes_of(self, tenant: str) -> Mapping[str, int]:
        """Returns the size of each blob that versions and files of the tenant refer to, by digest."""
        size = func.max(func.coalesce(_v.blob_bytes, _v.num_bytes))
        weights = select(_v.digest, size).where(_v.tenant == tenant).group_by(_v.digest)
        content = select(_p.blob, func.sum(_p.num_bytes)).where(_p.tenant == tenant).group_by(_p.blob)
        rows = [*self._database.read(weights), *self._database.read(content)]
        return {digest: int(num_bytes) for digest, num_bytes in rows}

    def find_file(self, blob: str) -> str | None:
        """Returns the id of a file that refers to the blob."""
        rows = self._database.read(select(_p.file_id).where(_p.blob == blob).limit(1))
        return rows[0].file_id if rows else None

    def reserve(self, digest: str) -> str:
        """Protects a blob from `collect` while no version refers to it yet. Returns the reservation, which
        `Registry.put` or `release` ends. It expires after RESERVATION_S.
        """
        reservation = uuid.uuid4().hex
        row = {
            "reservation": reservation,
            "digest": check_digest(digest),
            "expires_at": self._clock() + RESERVATION_S,
        }
        with self._database.transaction(blob_lock(digest)) as connection:
            connection.execute(insert(schema.adapter_reservations), row)
        return reservation

    def release(self, reservation: str) -> None:
        """Ends a reservation; a no-op if it has already ended. If the database does not answer, the reservation expires
        later.
        """
        with suppress(StoreUnavailable), self._database.transaction(even_if_full=True) as connection:
            connection.execute(delete(schema.adapter_reservations).where(_r.reservation == reservation))

    def collect(self, digest: str, drop: Callable[[str], None], *, leaving: str = "") -> bool:
        """Calls `drop(digest)` if no version or file refers to the blob and no upload has reserved it. No new reference
        can be created while `drop` runs. Returns whether `drop` was called.

        leaving: a tenant whose versions and files do not count.
        """
        now = self._clock()
        with self._database.transaction(blob_lock(digest), even_if_full=True) as connection:
            expired = delete(schema.adapter_reservations).where(_r.digest == digest, _r.expires_at <= now)
            connection.execute(expired)
            wanted = {"digest": digest, "now": now, "leaving": leaving}
            if connection.execute(_REFERENCED, wanted).first() is not None:
                return False
            drop(digest)
            return True

    def hold_all(self, holder: str, begin_snapshot: Callable[[], None]) -> Sequence[str]:
        """Reserves all blobs that versions and files refer to, and begins a snapshot that has exactly these versions
        and files. Returns the digests. `release_held` ends the reservations.

        holder: the prefix of the names of the reservations. Blobs of a tenant that is being purged are not reserved.
        """
        purging = select(schema.tenants.c.tenant_id).where(schema.tenants.c.status == "purging")
        query = union(
            select(_v.digest).where(_v.tenant.not_in(purging)),
            select(_p.blob).where(_p.tenant.not_in(purging)),
        ).order_by("digest")
        expires_at = self._clock() + RESERVATION_S
        with self._database.transaction(CHANGES) as connection:
            if connection.dialect.name == "postgresql":
                # The lock waits until running calls of `collect` have ended. Later calls see the reservations.
                connection.exec_driver_sql("LOCK TABLE adapter_reservations IN SHARE ROW EXCLUSIVE MODE")
            digests = list(connection.execute(query).scalars())
            rows = [
                {"reservation": f"{holder}-{number}", "digest": digest, "expires_at": expires_at}
                for number, digest in enumerate(digests)
            ]
            if rows:
                connection.execute(insert(schema.adapter_reservations), rows)
            record_change(connection, "backup.create", "", holder, {"num_blobs": len(digests)})
            begin_snapshot()
        return digests

    def renew_held(self, holder: str) -> None:
        """Keeps the reservations of `hold_all` for another RESERVATION_S."""
        own = update(schema.adapter_reservations).where(_r.reservation.startswith(holder, autoescape=True))
        with self._database.transaction() as connection:
            connection.execute(own.values(expires_at=self._clock() + RESERVATION_S))

    def release_held(self, holder: str) -> None:
        with self._database.transaction(even_if_full=True) as connection:
            own = _r.reservation.startswith(holder, autoescape=True)
            connection.execute(delete(schema.adapter_reservations).where(own))


def redeem(connection: Connection, reservation: str, now: float) -> None:
    """Ends a reservation in the transaction that creates its version. Raises TryAgain if it has expired or does not
    exist: the blob may have been dropped.
    """
    released = delete(schema.adapter_reservations).where(_r.reservation == reservation)
    row = connection.execute(released.returning(_r.expires_at)).fetchone()
    if row is None or row[0] <= now:
        raise TryAgain("the upload took too long, so its reservation expired; upload again")
