"""Which adapter a name of a tenant stands for, and who still needs which blob.

A name points at one version (tenant, digest); `put` moves it, at once for every process that shares the database. A
version whose last name is gone is orphaned: engines may forget it. A blob that no version of any tenant refers to may
be deleted, but only through `collect`, which holds the write lock meanwhile: an upload of the same weights that goes
on at the same time has reserved the digest first, and keeps its blob.

A name may be pinned: what it stands for is to be in the pool of every engine before anybody asks. The pin stays with
the name when that moves, and goes with it.

Knows no store and no weights: `catalog.py` puts both together. Whether a tenant exists is not its business either.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from sqlite3 import Connection

from slora_adapters.adapter import AdapterExtras
from slora_adapters.blob_name import check_digest
from slora_adapters.database import Database
from slora_adapters.errors import AdapterNotFound, BadAdapterName, StoreUnavailable
from slora_adapters.version import AdapterVersion

# How long an upload may take between storing its blob and naming it. A crashed one frees its blob afterwards.
RESERVATION_S = 3600.0

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)

_MIGRATIONS = (
    """
    CREATE TABLE adapters (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        digest TEXT NOT NULL,
        rank INTEGER NOT NULL,
        target_modules TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        chat_template TEXT,
        generation_config TEXT,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (tenant, name)
    ) STRICT;
    CREATE INDEX adapters_by_digest ON adapters (digest, tenant);
    CREATE TABLE adapter_reservations (
        reservation TEXT PRIMARY KEY,
        digest TEXT NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
    CREATE INDEX adapter_reservations_by_digest ON adapter_reservations (digest);
    """,
    """
    ALTER TABLE adapters ADD COLUMN packed_bytes INTEGER;
    ALTER TABLE adapters ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX adapters_pinned ON adapters (tenant, name) WHERE pinned;
    """,
)

_COLUMNS = (
    "tenant, name, digest, rank, target_modules, num_bytes, "
    "chat_template, generation_config, created_at, updated_at, packed_bytes, pinned"
)


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """What is known of the weights that a name stands for.

    num_bytes: of their tensors. packed_bytes: as they are served; None if published by a release that did not keep it.
    """

    rank: int
    target_modules: tuple[str, ...]
    num_bytes: int
    extras: AdapterExtras
    packed_bytes: int | None = None

    @property
    def pool_bytes(self) -> int:
        """What they take in a pool, as far as that is known."""
        return self.num_bytes if self.packed_bytes is None else self.packed_bytes


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """A name of a tenant. created_at: when the name was first put; updated_at: when it was last moved (Unix time).

    pinned: it is to be in the pool before anybody asks.
    """

    name: str
    version: AdapterVersion
    details: AdapterDetails
    created_at: float
    updated_at: float
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """What a put or delete left behind.

    record: the record as it is now (put) or was (delete).
    orphaned: the version that the name stood for before, if no name of the tenant stands for it any more.
    blob_unreferenced: whether, besides, no tenant refers to its blob now, so that `collect` would drop it.
    """

    record: AdapterRecord
    orphaned: AdapterVersion | None
    blob_unreferenced: bool


def check_adapter_name(name: str) -> str:
    """The name, if it can be one. Raises BadAdapterName."""
    if not _NAME.fullmatch(name):
        raise BadAdapterName(
            f"{name[:140]!r} cannot be the name of an adapter: 1 to 128 of a-z, 0-9, '.', '_', '-', the first a "
            "letter or digit"
        )
    return name


class Registry:
    """Names of adapters in the shared database. Methods raise StoreUnavailable when it does not answer."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        database.migrate("registry", _MIGRATIONS)

    def get(self, tenant: str, name: str) -> AdapterRecord:
        """Raises AdapterNotFound, in the same words for a name that only another tenant has."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM adapters WHERE tenant = ? AND name = ?", (tenant, name)
        )
        if not rows:
            raise _not_found(name)
        return _record(*rows[0])

    def list(self, tenant: str) -> list[AdapterRecord]:
        """All names of a tenant, sorted."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM adapters WHERE tenant = ? ORDER BY name", (tenant,)
        )
        return [_record(*row) for row in rows]

    def put(
        self, name: str, version: AdapterVersion, details: AdapterDetails, reservation: str | None = None
    ) -> Change:
        """Points a name at a version whose blob is stored, and gives back the reservation that protected the blob.

        Raises BadAdapterName, and StoreUnavailable if the reservation has run out.
        """
        check_adapter_name(name)
        check_digest(version.digest)
        tenant, extras, now = version.tenant, details.extras, self._clock()
        with self._database.transaction() as connection:
            if reservation is not None and not _give_back(connection, reservation, now):
                raise StoreUnavailable("the upload took too long, so its space was given up; upload again")
            old = _find(connection, tenant, name)
            created_at, pinned = (old.created_at, old.pinned) if old else (now, False)
            modules = json.dumps(details.target_modules)
            connection.execute(
                f"REPLACE INTO adapters ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(tenant, name, version.digest, details.rank, modules, details.num_bytes),
                    *(extras.chat_template, extras.generation_config, created_at, now),
                    *(details.packed_bytes, pinned),
                ),
            )
            record = AdapterRecord(name, version, details, created_at, now, pinned)
            return self._change(connection, record, old.version if old else None)

    def delete(self, tenant: str, name: str) -> Change:
        """Takes a name away. Raises AdapterNotFound."""
        with self._database.transaction() as connection:
            old = _find(connection, tenant, name)
            if old is None:
                raise _not_found(name)
            connection.execute("DELETE FROM adapters WHERE tenant = ? AND name = ?", (tenant, name))
            return self._change(connection, old, old.version)

    def pin(
        self, tenant: str, name: str, check: Callable[[AdapterRecord, Sequence[AdapterRecord]], None]
    ) -> AdapterRecord:
        """`check` is told what is to be pinned, and what is pinned besides; raising, it keeps the name unpinned. A name
        that is pinned stays so, unchecked. Raises AdapterNotFound.
        """
        with self._database.transaction() as connection:
            record = _find(connection, tenant, name)
            if record is None:
                raise _not_found(name)
            if not record.pinned:
                check(record, [_record(*row) for row in connection.execute(_PINNED)])
            return _set_pinned(connection, record, pinned=True)

    def unpin(self, tenant: str, name: str) -> AdapterRecord:
        """A name that is not pinned stays so. Raises AdapterNotFound."""
        with self._database.transaction() as connection:
            record = _find(connection, tenant, name)
            if record is None:
                raise _not_found(name)
            return _set_pinned(connection, record, pinned=False)

    def pinned(self) -> Sequence[AdapterRecord]:
        """All names that are pinned, by tenant and name."""
        return [_record(*row) for row in self._database.read(_PINNED)]

    @contextmanager
    def reservation(self, digest: str) -> Iterator[str]:
        """Keeps `collect` away from a blob that is being stored but has no name yet; yields the id for `put`."""
        check_digest(digest)
        reservation = uuid.uuid4().hex
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO adapter_reservations VALUES (?, ?, ?)",
                (reservation, digest, self._clock() + RESERVATION_S),
            )
        try:
            yield reservation
        finally:
            with self._database.transaction() as connection:
                _give_back(connection, reservation, self._clock())

    def collect(self, digest: str, drop: Callable[[str], None]) -> bool:
        """Calls `drop(digest)` if nobody refers to the blob or has reserved it. Returns whether it did.

        The write lock is held meanwhile, so nobody can begin to refer to it: `drop` must be quick.
        """
        with self._database.transaction() as connection:
            if self._referenced(connection, digest):
                return False
            drop(digest)
            return True

    def _change(self, connection: Connection, record: AdapterRecord, old: AdapterVersion | None) -> Change:
        if old is None:
            return Change(record, None, False)
        query = "SELECT 1 FROM adapters WHERE digest = ? AND tenant = ? LIMIT 1"
        if connection.execute(query, (old.digest, old.tenant)).fetchone():
            return Change(record, None, False)
        return Change(record, old, not self._referenced(connection, old.digest))

    def _referenced(self, connection: Connection, digest: str) -> bool:
        connection.execute("DELETE FROM adapter_reservations WHERE expires_at <= ?", (self._clock(),))
        query = (
            "SELECT 1 FROM adapters WHERE digest = ?1 "
            "UNION ALL SELECT 1 FROM adapter_reservations WHERE digest = ?1 LIMIT 1"
        )
        return connection.execute(query, (digest,)).fetchone() is not None


_PINNED = f"SELECT {_COLUMNS} FROM adapters WHERE pinned ORDER BY tenant, name"


def _set_pinned(connection: Connection, record: AdapterRecord, *, pinned: bool) -> AdapterRecord:
    connection.execute(
        "UPDATE adapters SET pinned = ? WHERE tenant = ? AND name = ?",
        (pinned, record.version.tenant, record.name),
    )
    return replace(record, pinned=pinned)


def _find(connection: Connection, tenant: str, name: str) -> AdapterRecord | None:
    query = f"SELECT {_COLUMNS} FROM adapters WHERE tenant = ? AND name = ?"
    row = connection.execute(query, (tenant, name)).fetchone()
    return _record(*row) if row else None


def _give_back(connection: Connection, reservation: str, now: float) -> bool:
    """Whether the reservation still held."""
    query = "DELETE FROM adapter_reservations WHERE reservation = ? RETURNING expires_at"
    row = connection.execute(query, (reservation,)).fetchone()
    return row is not None and bool(row[0] > now)


def _record(
    tenant: str,
    name: str,
    digest: str,
    rank: int,
    target_modules: str,
    num_bytes: int,
    chat_template: str | None,
    generation_config: str | None,
    created_at: float,
    updated_at: float,
    packed_bytes: int | None,
    pinned: int,
) -> AdapterRecord:
    extras = AdapterExtras(chat_template, generation_config)
    details = AdapterDetails(rank, tuple(json.loads(target_modules)), num_bytes, extras, packed_bytes)
    return AdapterRecord(name, AdapterVersion(tenant, digest), details, created_at, updated_at, bool(pinned))


def _not_found(name: str) -> AdapterNotFound:
    return AdapterNotFound(f"there is no adapter {name[:128]!r}")
