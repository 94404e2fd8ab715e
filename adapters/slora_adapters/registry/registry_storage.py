"""The registry's tables: lookups, updates of named adapters, and references to blobs.

An update of a named adapter is one transaction. The transaction applies an operation of `named_adapter.py` to the
stored name. It writes the result with an entry of the audit log, and publishes the change to all processes; see
`change_feed.py`.
"""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from sqlalchemy import and_, bindparam, delete, func, insert, select, tuple_, union, union_all, update
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.change_feed import Change, Changes, publish, read_changes
from slora_adapters.database.database import CHANGES, Database, blob_lock
from slora_adapters.errors import TryAgain
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterRecord, Rollout, StorageUsage
from slora_adapters.registry.named_adapter import NamedAdapter
from slora_adapters.registry.reference import LATEST
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
    PINNED_PAGE,
    STORAGE_USAGE,
    VERSION_PAGE,
    NameKey,
    load_name,
    read_record,
    read_rollouts,
    save_name,
)
from slora_adapters.version import AdapterVersion

__all__ = ["ALL_VERSIONS", "RESERVATION_S", "NameKey", "RegistryStorage"]

T = TypeVar("T")
# As the value of `wanted`, this means all versions of a name.
ALL_VERSIONS = None
# How long an upload may take between storing its blob and creating its version. After that time, the blob of a crashed
# upload may be dropped.
RESERVATION_S = 3600.0

_v, _r, _p = schema.adapter_versions.c, schema.adapter_reservations.c, schema.file_pieces.c
_REFERENCED = union_all(
    select(_v.digest).where(_v.digest == bindparam("digest"), _v.tenant != bindparam("leaving")),
    select(_p.blob).where(_p.blob == bindparam("digest"), _p.tenant != bindparam("leaving")),
    select(_r.digest).where(_r.digest == bindparam("digest"), _r.expires_at > bindparam("now")),
).limit(1)
_NAMES = (
    select(_v.tenant, _v.digest, _v.name, _v.number)
    .where(tuple_(_v.tenant, _v.digest).in_(bindparam("versions", expanding=True)))
    .order_by(_v.created_at, _v.name, _v.number)
)
_t = schema.adapter_alias_targets.c
_REFERENCES = (
    select(_v.tenant, _v.digest, _v.name, _v.number, _t.alias)
    .select_from(
        schema.adapter_versions.outerjoin(
            schema.adapter_alias_targets,
            and_(_t.tenant == _v.tenant, _t.name == _v.name, _t.number == _v.number, _t.percent > 0),
        )
    )
    .where(tuple_(_v.tenant, _v.digest).in_(bindparam("versions", expanding=True)))
)
# Maximum number of versions in one query. SQLite accepts at most 32,766 parameters.
_NAMES_AT_ONCE = 1000
_NAMED = select(_v.digest).where(_v.digest == bindparam("digest"), _v.tenant == bindparam("tenant")).limit(1)


class RegistryStorage:
    """The registry's data in a database. All methods may be called from several threads and processes at once. All
    methods block, and raise StoreUnavailable if the database does not answer. Each method sees a consistent snapshot of
    a name. `now` is Unix time.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def registry(self) -> str:
        """The unique id of this registry. Every process that opens this registry reads the same id."""
        ((registry,),) = self._database.read(select(schema.platform.c.id))
        return str(registry)

    # -- looking up -------------------------------------------------------------------------------------------------

    def find_version(self, key: NameKey, number: int) -> AdapterRecord | None:
        rows = self._database.read(ONE_VERSION, {**_own(key), "number": number})
        return read_record(rows[0]) if rows else None

    def find_rollout(self, key: NameKey, alias: str) -> Rollout | None:
        rollouts = read_rollouts(self._database.read(ONE_ROLLOUT, {**_own(key), "alias": alias}))
        return rollouts[0] if rollouts else None

    def newest(self, key: NameKey) -> AdapterRecord | None:
        rows = self._database.read(NEWEST, _own(key))
        return read_record(rows[0]) if rows else None

    def aliases(self, key: NameKey) -> Sequence[Rollout]:
        """Returns all aliases of a name, sorted."""
        return read_rollouts(self._database.read(OF_NAME, _own(key)))

    def rollouts(self, tenant: str, limit: int | None, after: tuple[str, str] | None) -> Sequence[Rollout]:
        """Returns the tenant's aliases after the pair `after`, sorted by (name, alias)."""
        name, alias = after or ("", "")
        page = {"tenant": tenant, "after": name, "after_alias": alias, "most": _most(limit)}
        return read_rollouts(self._database.read(ALIASES, page))

    def names(self, tenant: str, limit: int | None, after: str | None) -> Sequence[Rollout]:
        """Returns the alias `latest` of each of the tenant's names after `after`, sorted by name."""
        page = {"tenant": tenant, "after": after or "", "most": _most(limit)}
        return read_rollouts(self._database.read(NAMES, page))

    def versions(self, key: NameKey, limit: int | None, after: int | None) -> Sequence[AdapterRecord]:
        """Returns the versions with a number below `after`, newest first."""
        page = {**_own(key), "before": BEHIND_ALL if after is None else after, "most": _most(limit)}
        return [read_record(row) for row in self._database.read(VERSION_PAGE, page)]

    def find_extras(self, key: NameKey, record: AdapterRecord) -> AdapterExtras | None:
        """Returns the texts of a version that has extras; None if the version was deleted since the record was read."""
        wanted = {**_own(key), "number": record.number, "digest": record.extras.digest}
        rows = self._database.read(EXTRAS, wanted)
        return AdapterExtras(*rows[0]) if rows else None

    def storage_usage(self, tenant: str, digest: str) -> StorageUsage:
        """Returns the total size of what the tenant stores, and the stored size of the weights with this digest."""
        (row,) = self._database.read(STORAGE_USAGE, {"tenant": tenant, "digest": digest})
        return _usage(row)

    def pinned(self, limit: int | None, after: tuple[str, str, str] | None) -> Sequence[Rollout]:
        """Returns the pinned aliases of all tenants after `after`, sorted by (tenant, name, alias)."""
        tenant, name, alias = after or ("", "", "")
        page = {"after_tenant": tenant, "after": name, "after_alias": alias, "most": _most(limit)}
        return read_rollouts(self._database.read(PINNED_PAGE, page))

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        """Returns those of the given weights that at least one name of their tenant uses."""
        return {one for one in versions if self._database.read(_NAMED, _version(one))}

    def find_names(self, versions: Collection[AdapterVersion]) -> Mapping[AdapterVersion, str]:
        """See `Registry.find_names`."""
        keys = sorted((one.tenant, one.digest) for one in versions)
        found = {}
        for at in range(0, len(keys), _NAMES_AT_ONCE):
            rows = self._database.read(_NAMES, {"versions": keys[at : at + _NAMES_AT_ONCE]})
            found.update(
                {AdapterVersion(tenant, digest): f"{name}@{number}" for tenant, digest, name, number in rows}
            )
        return found

    def find_references(
        self, versions: Collection[AdapterVersion]
    ) -> Mapping[AdapterVersion, Collection[str]]:
        """See `Registry.find_references`."""
        keys = sorted((one.tenant, one.digest) for one in versions)
        found: dict[AdapterVersion, set[str]] = {}
        for at in range(0, len(keys), _NAMES_AT_ONCE):
            rows = self._database.read(_REFERENCES, {"versions": keys[at : at + _NAMES_AT_ONCE]})
            for tenant, digest, name, number, alias in rows:
                references = found.setdefault(AdapterVersion(tenant, digest), set())
                references.add(f"{name}@{number}")
                if alias is not None:
                    references.add(f"{name}@{alias}")
                if alias == LATEST:
                    references.add(name)
        return found

    def blobs_of(self, tenant: str) -> Mapping[str, int]:
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

    def is_referenced(self, digest: str, now: float) -> bool:
        """Returns whether a version or a file of any tenant, or a reservation, needs the blob."""
        return bool(self._database.read(_REFERENCED, {"digest": digest, "now": now, "leaving": ""}))

    # -- changing ---------------------------------------------------------------------------------------------------

    def change(
        self,
        action: str,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        *,
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        """Applies `edit` to a name and writes the result durably, in one transaction. Returns the result of `edit`.

        If `edit` raises, the error is propagated and nothing changes.

        action: see `AuditEntry`. wanted: the version numbers whose records `edit` needs, or ALL_VERSIONS. frees_room:
        try the change even on a full disk.
        """
        with self._database.transaction(CHANGES, even_if_full=frees_room) as connection:
            before = load_name(connection, key, wanted)
            after = before.copy()
            result = edit(after)
            return result, _keep(connection, action, before, after)

    def push(
        self,
        key: NameKey,
        digest: str,
        edit: Callable[[NamedAdapter, StorageUsage], T],
        reservation: str | None = None,
        now: float = 0.0,
    ) -> tuple[T, Change]:
        """Like `change`, for an edit that adds a version and depends on the tenant's usage. No other process adds to
        the usage during the call.

        digest: digest of the new version's weights. reservation: released in the same transaction; TryAgain is raised
        if it has expired.
        """
        with self._database.transaction(blob_lock(digest), CHANGES) as connection:
            if reservation is not None:
                _release(connection, reservation, now)
            before = load_name(connection, key, ())
            after = before.copy()
            usage = connection.execute(STORAGE_USAGE, {"tenant": key[0], "digest": digest}).one()
            result = edit(after, _usage(usage))
            return result, _keep(connection, "adapter.push", before, after)

    def change_pins(
        self, key: NameKey, edit: Callable[[NamedAdapter, Sequence[Rollout]], T]
    ) -> tuple[T, Change]:
        """Like `change`, for an edit that depends on all pins. No other process changes a pin during the call."""
        with self._database.transaction(CHANGES) as connection:
            before = load_name(connection, key, ())
            after = before.copy()
            result = edit(after, read_rollouts(connection.execute(PINNED)))
            return result, _keep(connection, "adapter.pin", before, after)

    # -- blobs ------------------------------------------------------------------------------------------------------

    def reserve(self, digest: str, now: float) -> str:
        """Protects the digest from `collect`, until `release` is called or RESERVATION_S have passed."""
        reservation = uuid.uuid4().hex
        row = {"reservation": reservation, "digest": digest, "expires_at": now + RESERVATION_S}
        with self._database.transaction(blob_lock(digest)) as connection:
            connection.execute(insert(schema.adapter_reservations), row)
        return reservation

    def release(self, reservation: str) -> None:
        """Releases a reservation; a no-op if it does not exist."""
        with self._database.transaction(even_if_full=True) as connection:
            connection.execute(delete(schema.adapter_reservations).where(_r.reservation == reservation))

    def hold_blobs(self, holder: str, now: float, begin_snapshot: Callable[[], None]) -> Sequence[str]:
        """Reserves all blobs that versions and files refer to, and begins a snapshot that has exactly these versions
        and files. Returns the digests. `release_held` ends the reservations.

        holder: the prefix of the names of the reservations. Blobs of a tenant that is being purged are not reserved.
        """
        purging = select(schema.tenants.c.name).where(schema.tenants.c.status == "purging")
        query = union(
            select(_v.digest).where(_v.tenant.not_in(purging)),
            select(_p.blob).where(_p.tenant.not_in(purging)),
        ).order_by("digest")
        with self._database.transaction(CHANGES) as connection:
            if connection.dialect.name == "postgresql":
                # The lock waits until running calls of `collect` have ended. Later calls see the reservations.
                connection.exec_driver_sql("LOCK TABLE adapter_reservations IN SHARE ROW EXCLUSIVE MODE")
            digests = list(connection.execute(query).scalars())
            rows = [
                {"reservation": f"{holder}-{number}", "digest": digest, "expires_at": now + RESERVATION_S}
                for number, digest in enumerate(digests)
            ]
            if rows:
                connection.execute(insert(schema.adapter_reservations), rows)
            record_change(connection, "backup.create", "", holder, {"num_blobs": len(digests)})
            begin_snapshot()
        return digests

    def renew_held(self, holder: str, now: float) -> None:
        """Keeps the reservations of `hold_blobs` for another RESERVATION_S."""
        own = update(schema.adapter_reservations).where(_r.reservation.startswith(holder, autoescape=True))
        with self._database.transaction() as connection:
            connection.execute(own.values(expires_at=now + RESERVATION_S))

    def release_held(self, holder: str) -> None:
        with self._database.transaction(even_if_full=True) as connection:
            own = _r.reservation.startswith(holder, autoescape=True)
            connection.execute(delete(schema.adapter_reservations).where(own))

    def collect(self, digest: str, drop: Callable[[str], None], now: float, leaving: str = "") -> bool:
        """Calls `drop(digest)` if no version or file of a tenant other than `leaving` refers to the blob and no upload
        has reserved it. No new reference can be created while `drop` runs. Returns whether `drop` was called.
        """
        with self._database.transaction(blob_lock(digest), even_if_full=True) as connection:
            expired = delete(schema.adapter_reservations).where(_r.digest == digest, _r.expires_at <= now)
            connection.execute(expired)
            wanted = {"digest": digest, "now": now, "leaving": leaving}
            if connection.execute(_REFERENCED, wanted).first() is not None:
                return False
            drop(digest)
            return True

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None) -> Changes:
        """See `read_changes`."""
        return read_changes(self._database, cursor)


def _own(key: NameKey) -> dict[str, object]:
    return {"tenant": key[0], "name": key[1]}


def _version(version: AdapterVersion) -> dict[str, object]:
    return {"tenant": version.tenant, "digest": version.digest}


def _most(limit: int | None) -> int:
    return NO_LIMIT if limit is None else limit


def _usage(row: Sequence[int | None]) -> StorageUsage:
    num_versions, num_bytes, weights_bytes = row
    # PostgreSQL's sums are decimals.
    return StorageUsage(
        int(num_versions or 0), int(num_bytes or 0), None if weights_bytes is None else int(weights_bytes)
    )


def _release(connection: Connection, reservation: str, now: float) -> None:
    """Releases a reservation. Raises TryAgain if it has expired or does not exist: the blob may have been dropped."""
    released = delete(schema.adapter_reservations).where(_r.reservation == reservation)
    row = connection.execute(released.returning(_r.expires_at)).fetchone()
    if row is None or row[0] <= now:
        raise TryAgain("the upload took too long, so its reservation expired; upload again")


def _keep(connection: Connection, action: str, before: NamedAdapter, after: NamedAdapter) -> Change:
    """Writes the changes of a name, publishes them, and records them in the audit log. Does nothing if `after` equals
    `before`.
    """
    if after == before:
        return Change(after.tenant, after.name)
    save_name(connection, before, after)
    removed = [before.records[number].version for number in before.records.keys() - after.records.keys()]
    orphaned = tuple(
        version
        for version in dict.fromkeys(removed)
        if connection.execute(_NAMED, _version(version)).first() is None
    )
    change = Change(after.tenant, after.name, orphaned, before.pins() != after.pins())
    publish(connection, change)
    record_change(connection, action, after.tenant, after.name, after.changes_since(before))
    return change
