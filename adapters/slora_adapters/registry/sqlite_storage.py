"""The registry's storage in the shared SQLite database: for one host, with any number of processes.

A change holds the database's write lock, so no other change runs at the same time. Every process sees the change in its
next lookup. The lock is also held while a blob is dropped. The feed is a table that readers poll.
"""

import json
import uuid
from collections.abc import Callable, Collection, Sequence
from sqlite3 import Connection
from typing import TypeVar

from slora_adapters.database.database import Database
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterRecord, Rollout, StorageUsage
from slora_adapters.registry.named_adapter import NamedAdapter
from slora_adapters.registry.registry_rows import (
    ALIASES,
    BEHIND_ALL,
    EXTRAS,
    NAMES,
    NEWEST,
    NO_LIMIT,
    OF_NAME,
    ONE_ROLLOUT,
    ONE_VERSION,
    PINNED,
    STORAGE_USAGE,
    VERSION_PAGE,
    load_name,
    read_record,
    read_rollouts,
    save_name,
)
from slora_adapters.registry.registry_schema import FUNCTIONS, MIGRATIONS
from slora_adapters.registry.registry_storage import (
    KEPT_CHANGES,
    RESERVATION_S,
    Change,
    Changes,
    NameKey,
    reservation_lost,
)
from slora_adapters.version import AdapterVersion

__all__ = ["SqliteStorage"]

T = TypeVar("T")
# Entries of the feed in one answer.
_MAX_CHANGES = 1000


class SqliteStorage:
    """Implements `registry_storage.RegistryStorage` with SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.migrate("registry", MIGRATIONS, FUNCTIONS)

    @property
    def registry(self) -> str:
        ((registry,),) = self._database.read("SELECT registry FROM adapter_registry")
        return str(registry)

    def find_version(self, key: NameKey, number: int) -> AdapterRecord | None:
        rows = self._database.read(ONE_VERSION, (*key, number))
        return read_record(rows[0]) if rows else None

    def find_rollout(self, key: NameKey, alias: str) -> Rollout | None:
        rollouts = read_rollouts(self._database.read(ONE_ROLLOUT, (*key, alias)))
        return rollouts[0] if rollouts else None

    def newest(self, key: NameKey) -> AdapterRecord | None:
        rows = self._database.read(NEWEST, key)
        return read_record(rows[0]) if rows else None

    def aliases(self, key: NameKey) -> Sequence[Rollout]:
        return read_rollouts(self._database.read(OF_NAME, key))

    def rollouts(self, tenant: str, limit: int | None, after: tuple[str, str] | None) -> Sequence[Rollout]:
        name, alias = after or ("", "")
        rows = self._database.read(ALIASES, (tenant, name, alias, NO_LIMIT if limit is None else limit))
        return read_rollouts(rows)

    def names(self, tenant: str, limit: int | None, after: str | None) -> Sequence[Rollout]:
        rows = self._database.read(NAMES, (tenant, after or "", NO_LIMIT if limit is None else limit))
        return read_rollouts(rows)

    def versions(self, key: NameKey, limit: int | None, after: int | None) -> Sequence[AdapterRecord]:
        before = BEHIND_ALL if after is None else after
        rows = self._database.read(VERSION_PAGE, (*key, before, NO_LIMIT if limit is None else limit))
        return [read_record(row) for row in rows]

    def find_extras(self, key: NameKey, record: AdapterRecord) -> AdapterExtras | None:
        rows = self._database.read(EXTRAS, (*key, record.number, record.extras.digest))
        return AdapterExtras(*rows[0]) if rows else None

    def storage_usage(self, tenant: str, digest: str) -> StorageUsage:
        return StorageUsage(*self._database.read(STORAGE_USAGE, (tenant, digest))[0])

    def pinned(self) -> Sequence[Rollout]:
        return read_rollouts(self._database.read(PINNED))

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        query = "SELECT 1 FROM adapter_versions WHERE digest = ? AND tenant = ? LIMIT 1"
        return {one for one in versions if self._database.read(query, (one.digest, one.tenant))}

    def is_referenced(self, digest: str, now: float) -> bool:
        return bool(self._database.read(_REFERENCED, (digest, now)))

    def change(
        self,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        *,
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        with self._database.transaction(even_if_full=frees_room) as connection:
            before = load_name(connection, key, wanted)
            after = before.copy()
            result = edit(after)
            return result, _keep(connection, before, after)

    def push(
        self,
        key: NameKey,
        digest: str,
        edit: Callable[[NamedAdapter, StorageUsage], T],
        reservation: str | None = None,
        now: float = 0.0,
    ) -> tuple[T, Change]:
        with self._database.transaction() as connection:
            if reservation is not None:
                _release(connection, reservation, now)
            before = load_name(connection, key, ())
            after = before.copy()
            result = edit(
                after, StorageUsage(*connection.execute(STORAGE_USAGE, (key[0], digest)).fetchone())
            )
            return result, _keep(connection, before, after)

    def change_pins(
        self, key: NameKey, edit: Callable[[NamedAdapter, Sequence[Rollout]], T]
    ) -> tuple[T, Change]:
        with self._database.transaction() as connection:
            before = load_name(connection, key, ())
            after = before.copy()
            result = edit(after, read_rollouts(connection.execute(PINNED)))
            return result, _keep(connection, before, after)

    def reserve(self, digest: str, now: float) -> str:
        reservation = uuid.uuid4().hex
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO adapter_reservations VALUES (?, ?, ?)",
                (reservation, digest, now + RESERVATION_S),
            )
        return reservation

    def release(self, reservation: str) -> None:
        with self._database.transaction(even_if_full=True) as connection:
            connection.execute("DELETE FROM adapter_reservations WHERE reservation = ?", (reservation,))

    def collect(self, digest: str, drop: Callable[[str], None], now: float) -> bool:
        with self._database.transaction(even_if_full=True) as connection:
            connection.execute("DELETE FROM adapter_reservations WHERE expires_at <= ?", (now,))
            if connection.execute(_REFERENCED, (digest, now)).fetchone() is not None:
                return False
            drop(digest)
            return True

    def changes(self, cursor: str | None) -> Changes:
        if cursor is not None:
            change_id, _, nonce = cursor.partition("/")
            rows = self._database.read(_CHANGES, (int(change_id), _MAX_CHANGES + 1))
            if rows and f"{rows[0][0]}/{rows[0][1]}" == cursor:
                changes = tuple(
                    Change(
                        tenant,
                        name,
                        tuple(AdapterVersion(tenant, digest) for digest in json.loads(orphaned)),
                        bool(moved_pin),
                    )
                    for _, _, tenant, name, orphaned, moved_pin in rows[1:]
                )
                return Changes(f"{rows[-1][0]}/{rows[-1][1]}", changes, is_all=len(changes) < _MAX_CHANGES)
        ((change_id, nonce),) = self._database.read(_LAST_CHANGE)
        return Changes(f"{change_id}/{nonce}", resync=True)

    def close(self) -> None:
        """Does nothing. The caller that opened the database closes it."""


_REFERENCED = (
    "SELECT 1 FROM adapter_versions WHERE digest = ?1 "
    "UNION ALL SELECT 1 FROM adapter_reservations WHERE digest = ?1 AND expires_at > ?2 LIMIT 1"
)
# The table always has a row: a migration inserts the first one, and the last one is never deleted.
_LAST_CHANGE = "SELECT change_id, nonce FROM adapter_changes ORDER BY change_id DESC LIMIT 1"
_CHANGES = (
    "SELECT change_id, nonce, tenant, name, orphaned, moved_pin FROM adapter_changes WHERE change_id >= ? "
    "ORDER BY change_id LIMIT ?"
)


def _release(connection: Connection, reservation: str, now: float) -> None:
    """Releases a reservation. Raises `reservation_lost` if it has expired or does not exist."""
    query = "DELETE FROM adapter_reservations WHERE reservation = ? RETURNING expires_at"
    row = connection.execute(query, (reservation,)).fetchone()
    if row is None or row[0] <= now:
        raise reservation_lost()


def _keep(connection: Connection, before: NamedAdapter, after: NamedAdapter) -> Change:
    """Writes the changes of a name. If there are any, also adds an entry to the feed."""
    if after == before:
        return Change(after.tenant, after.name)
    save_name(connection, before, after)
    removed = [before.records[number].version for number in before.records.keys() - after.records.keys()]
    query = "SELECT 1 FROM adapter_versions WHERE digest = ? AND tenant = ? LIMIT 1"
    orphaned = tuple(
        version
        for version in dict.fromkeys(removed)
        if connection.execute(query, (version.digest, version.tenant)).fetchone() is None
    )
    change = Change(after.tenant, after.name, orphaned, before.pins() != after.pins())
    row = connection.execute(
        "INSERT INTO adapter_changes (nonce, tenant, name, orphaned, moved_pin) VALUES (?, ?, ?, ?, ?) "
        "RETURNING change_id",
        (
            *(uuid.uuid4().hex, change.tenant, change.name),
            *(json.dumps([version.digest for version in orphaned]), change.moved_pin),
        ),
    ).fetchone()
    connection.execute("DELETE FROM adapter_changes WHERE change_id <= ?", (row[0] - KEPT_CHANGES,))
    return change
