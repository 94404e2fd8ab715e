"""The registry of adapters: which names, versions and aliases each tenant has.

Each push under a name creates the next version: 1, 2, 3, and so on. A version never changes, and the digest identifies
its weights. Requests use a version number or an alias. An alias points at one version, or splits the requests among
several versions by percentage. Every name has the alias `latest`, and a bare name means `latest`. Each push moves
`latest` to the new version, unless `latest` was set not to follow pushes.

Every change is one transaction. The transaction applies an operation of `record.py` to the stored name, writes
the result with an entry of the audit log, and publishes the change to all processes (`changes`). The number of a
deleted version is not reused while the name exists. A name that was deleted and is pushed again starts with version 1.

An engine knows weights only by tenant and digest (`AdapterVersion`). When no version of the tenant uses the weights,
they are orphaned, and engines may drop them.

A pin belongs to an alias (to `latest` if a bare name is pinned). Every version that a pinned alias points at is kept in
the page pool of every engine, even before a request needs it. When the alias moves, the pin applies to its new
versions. The pin ends when the alias is deleted.

`BlobReferences` knows which blobs of the store are needed: those of versions, those of files of batches, and reserved
ones. A blob without a reference may be deleted, but only through `collect`. An upload reserves the digest before it
stores the blob, and a backup reserves every blob that it copies. `collect` keeps reserved blobs.

`StoredAdapters` adds adapters to registry and store, and deletes them, in an order that keeps both consistent after a
crash. An adapter is added in two steps. `store_blob` reserves the digest and stores the blob durably. `commit` creates
the version. Between the two steps, engines can load the adapter, but no request can name it. If the caller fails
between the steps, it calls `discard`. A crash leaves an unreferenced blob, which `sweep` deletes after the reservation
has expired. `withdraw` deletes the versions first, and then drops the blobs that no other version refers to.

Only a registry knows which versions refer to a blob. So each registry claims the store before it writes there. In a
store with claims of several registries, no blob is dropped, because a blob without references in one registry may have
references in another.

This module does not know whether a tenant exists.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from sqlalchemy import BindParameter, bindparam, delete, func, insert, select, union, union_all, update
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

import slora_adapters.registry.table as table
from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.change_feed import Change, Changes, publish, read_changes
from slora_adapters.database.database import CHANGES, Database, blob_lock
from slora_adapters.errors import BadAdapterName, BadAlias, StoreUnavailable, TryAgain
from slora_adapters.peft.adapter import AdapterExtras, CheckedAdapter
from slora_adapters.registry.cache import Answer, ExtrasOf, NameCache, Target
from slora_adapters.registry.record import (
    LATEST,
    NO_EXTRAS,
    AdapterDetails,
    AdapterRecord,
    AdapterReference,
    NamedAdapter,
    Publication,
    Removal,
    Rollout,
    StorageUsage,
    Targets,
    check_adapter_name,
    not_found,
    parse_reference,
)
from slora_adapters.registry.table import NameKey
from slora_adapters.store.store import Store, check_digest
from slora_adapters.store.tiered_store import TieredStore
from slora_adapters.version import AdapterVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")

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


PinCheck = Callable[[Rollout, Sequence[Rollout]], None]
StorageCheck = Callable[[StorageUsage], None]
# Maximum number of lookups of one request. A lookup is repeated if the version that it found was deleted before the
# version's extras were read.
_MAX_LOOKUPS = 3


class Registry:
    """The adapters of all tenants. All methods may be called from several threads and processes at once, block, and
    raise StoreUnavailable if the database does not answer. AdapterNotFound has the same message whether an adapter does
    not exist or belongs to another tenant.

    `get`, `serve` and `rollout` answer repeated lookups from a cache, even while the database does not answer. A change
    by this process drops the changed name from the cache at once. A change by another process drops it when `changes`
    reports the change, so `changes` must be polled continually.

    blobs: the references to blobs in the same database.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self.blobs = BlobReferences(database, clock)
        self._database = database
        self._clock = clock
        self._cache = NameCache(is_behind=database.is_behind)

    @property
    def registry(self) -> str:
        """The unique id of this registry, under which it claims a store. Every process that opens the database reads
        the same id.
        """
        ((registry,),) = self._database.read(select(schema.platform.c.id))
        return str(registry)

    # -- looking up -------------------------------------------------------------------------------------------------

    def get(self, tenant: str, reference: str, user: str | None = None) -> AdapterRecord:
        """Returns the version that a request uses. If the alias points at several versions, the same `user` always gets
        the same version. Without a user the version is chosen at random. Raises AdapterNotFound.
        """
        found = self._find(tenant, _parse(reference))
        return found if isinstance(found, AdapterRecord) else found.choose(user or uuid.uuid4().hex)

    def serve(
        self, tenant: str, reference: str, user: str | None = None
    ) -> tuple[AdapterRecord, AdapterExtras]:
        """Returns the version that a request uses, like `get`, and the texts of its extras. Raises AdapterNotFound."""
        user = user or uuid.uuid4().hex
        for _ in range(_MAX_LOOKUPS):
            found = self._find(tenant, _parse(reference))
            chosen = found if isinstance(found, AdapterRecord) else found.choose(user)
            # Read the extras of every version that the alias points at. The cache can then serve requests of all users
            # while the database is unavailable.
            texts = {record.number: self._find_extras(tenant, record) for record in _records(found)}
            extras = texts[chosen.number]
            if extras is not None:
                return chosen, extras
            self.drop_cached(tenant, reference)  # the version was deleted between the two lookups
        raise not_found(reference)

    def rollout(self, tenant: str, reference: str) -> Rollout:
        """Returns the rollout of an alias; a bare name means its alias `latest`. Raises AdapterNotFound if the alias
        does not exist or the reference is a version number.
        """
        wanted = _parse(reference)
        found = None if wanted.alias is None else self._find(tenant, wanted)
        if not isinstance(found, Rollout):
            raise not_found(reference)
        return found

    def is_lookup_local(self, tenant: str, reference: str) -> bool:
        """Returns whether `serve` and `rollout` answer within microseconds, so that an event loop may call them."""
        try:
            wanted = parse_reference(reference)
        except BadAdapterName:
            return True
        key, cache = (tenant, wanted.name), self._cache
        found = cache.get(key, wanted.target)
        return isinstance(found, AdapterRecord | Rollout) and all(
            not record.extras.digest or cache.get(key, ExtrasOf(record.number)) is not None
            for record in _records(found)
        )

    def drop_cached(self, tenant: str, reference: str) -> None:
        """Drops this name from the cache, so that the next lookup of the name queries the database."""
        self._cache.drop((tenant, _parse(reference).name))

    def _find(self, tenant: str, wanted: AdapterReference) -> AdapterRecord | Rollout:
        """Returns the record or rollout that a reference means, from the cache if possible. Raises AdapterNotFound."""
        key = (tenant, wanted.name)

        def ask() -> AdapterRecord | Rollout | None:
            if isinstance(wanted.target, int):
                rows = self._database.read(table.ONE_VERSION, {**_own(key), "number": wanted.target})
                return table.read_record(rows[0]) if rows else None
            return next(iter(self._rollouts(table.ONE_ROLLOUT, {**_own(key), "alias": wanted.target})), None)

        found = self._find_cached(key, wanted.target, ask)
        if not isinstance(found, AdapterRecord | Rollout):
            raise not_found(wanted.text)
        return found

    def _find_extras(self, tenant: str, record: AdapterRecord) -> AdapterExtras | None:
        """Returns the extras of a version; None if the version was deleted after its record was read."""
        if not record.extras.digest:
            return NO_EXTRAS
        key = (tenant, record.name)

        def ask() -> AdapterExtras | None:
            wanted = {**_own(key), "number": record.number, "digest": record.extras.digest}
            rows = self._database.read(table.EXTRAS, wanted)
            return AdapterExtras(*rows[0]) if rows else None

        found = self._find_cached(key, ExtrasOf(record.number), ask)
        return found if isinstance(found, AdapterExtras) else None

    def _find_cached(self, key: NameKey, target: Target, ask: Callable[[], Answer | None]) -> Answer | None:
        found = self._cache.get(key, target)
        return self._cache.look_up(key, target, ask) if found is None else found

    # -- listing ----------------------------------------------------------------------------------------------------

    def rollouts(
        self, tenant: str, *, limit: int | None = None, after: tuple[str, str] | None = None
    ) -> Sequence[Rollout]:
        """Returns the aliases of a tenant, sorted by name and alias in byte order.

        The result has at most `limit` aliases that sort after `after`, a pair (name, alias) that need not exist.
        """
        name, alias = after or ("", "")
        page = {"tenant": tenant, "after": name, "after_alias": alias, "most": _most(limit)}
        return self._rollouts(table.ALIASES, page)

    def aliases(self, tenant: str, name: str) -> Sequence[Rollout]:
        """Returns all aliases of one name, sorted; empty if the name does not exist."""
        return self._rollouts(table.OF_NAME, _own((tenant, name)))

    def list(self, tenant: str, *, limit: int | None = None, after: str | None = None) -> Sequence[Rollout]:
        """Returns the alias `latest` of each of a tenant's names, sorted by name in byte order.

        The result has at most `limit` names that sort after the name `after`, which need not exist.
        """
        return self._rollouts(table.NAMES, {"tenant": tenant, "after": after or "", "most": _most(limit)})

    def find_adapters(
        self, contains: str, *, limit: int | None = None, after: tuple[str, str] | None = None
    ) -> Sequence[Rollout]:
        """Returns the alias `latest` of the names of all tenants, sorted by the tenant's id and the name.

        contains: a part of the adapter's name or of its tenant's name, in upper or lower case. The result has at most
        `limit` names that sort after `after`: tenant and name, which need not exist.
        """
        tenant, name = after or ("", "")
        pattern = "%" + re.sub("[/%_]", r"/\g<0>", contains.lower()) + "%"
        page = {"pattern": pattern, "after_tenant": tenant, "after": name, "most": _most(limit)}
        return self._rollouts(table.FOUND_PAGE, page)

    def versions(
        self, tenant: str, name: str, *, limit: int | None = None, after: int | None = None
    ) -> Sequence[AdapterRecord]:
        """Returns at most `limit` versions of a name with numbers below `after`, newest first. Raises AdapterNotFound
        if the name does not exist.
        """
        own = _own((tenant, name))
        page = {**own, "before": table.BEHIND_ALL if after is None else after, "most": _most(limit)}
        found = [table.read_record(row) for row in self._database.read(table.VERSION_PAGE, page)]
        if not found and not self._database.read(table.NEWEST, own):
            raise not_found(name)
        return found

    def pinned(
        self, *, limit: int | None = None, after: tuple[str, str, str] | None = None
    ) -> Sequence[Rollout]:
        """Returns the pinned aliases of all tenants, sorted by tenant, name and alias.

        The result has at most `limit` aliases that sort after `after`: tenant, name and alias, which need not exist.
        """
        tenant, name, alias = after or ("", "", "")
        page = {"after_tenant": tenant, "after": name, "after_alias": alias, "most": _most(limit)}
        return self._rollouts(table.PINNED_PAGE, page)

    def storage_usage(self, tenant: str, digest: str) -> StorageUsage:
        """Returns the total size of what the tenant stores, and the stored size of the weights with this digest."""
        (row,) = self._database.read(table.STORAGE_USAGE, {"tenant": tenant, "digest": digest})
        return table.read_usage(row)

    def before_push(
        self, name: str, version: AdapterVersion, extras: AdapterExtras
    ) -> tuple[bool, StorageUsage]:
        """Returns whether a push of these weights and extras would create a version, and the tenant's usage without it.
        `put` decides again.
        """
        wanted = {**_own((version.tenant, name)), "digest": version.digest}
        (row,) = self._database.read(table.BEFORE_PUSH, wanted)
        newest, usage = table.read_before_push(row)
        return newest is None or not newest.holds(version, extras), usage

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        """Returns those of the given weights that at least one name of their tenant still uses. Engines may drop the
        other weights.
        """
        return {version for version, _ in table.read_of_versions(self._database.read, table.NAMED, versions)}

    def find_names(self, versions: Collection[AdapterVersion]) -> Mapping[AdapterVersion, str]:
        """Returns a reference `name@number` for each of the given weights that a name still uses. If several references
        fit, the newest one is returned.
        """
        rows = table.read_of_versions(self._database.read, table.NUMBERS_OF, versions)
        return {version: f"{name}@{number}" for version, (name, number) in rows}

    def find_references(
        self, versions: Collection[AdapterVersion]
    ) -> Mapping[AdapterVersion, Collection[str]]:
        """Returns everything that a request may write as its model for each of the given weights that a name still
        uses: `name@number`, `name@alias`, and `name` for the alias `latest`.
        """
        found: dict[AdapterVersion, set[str]] = {}
        rows = table.read_of_versions(self._database.read, table.REFERENCES_TO, versions)
        for version, (name, number, alias) in rows:
            references = found.setdefault(version, set())
            references.add(f"{name}@{number}")
            if alias is not None:
                references.add(f"{name}@{alias}")
            if alias == LATEST:
                references.add(name)
        return found

    def _rollouts(self, query: Executable, parameters: Mapping[str, object]) -> Sequence[Rollout]:
        return table.read_rollouts(self._database.read(query, parameters))

    # -- adding and deleting versions -------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        version: AdapterVersion,
        details: AdapterDetails,
        extras: AdapterExtras = NO_EXTRAS,
        *,
        reservation: str | None = None,
        check: StorageCheck = lambda usage: None,
    ) -> Publication:
        """Creates the next version of a name, from weights whose blob is already stored. Moves the aliases that follow
        pushes, and releases the reservation that protected the blob.

        check: called with the tenant's usage without the new version. If `check` raises, no version is created.
        Between `check` and the end of this call, no other process adds a version for this tenant.

        Pushing the newest version again with the same extras is a no-op, and `check` is not called. So a client that
        did not receive the response can safely retry. Raises BadAdapterName, and TryAgain if the reservation has
        expired.
        """
        check_adapter_name(name)
        now, key = self._clock(), (version.tenant, name)
        with self._changing(key, blob_lock(check_digest(version.digest))) as connection:
            if reservation is not None:
                redeem(connection, reservation, now)
            before = table.load_name(connection, key, ())
            after = before.copy()
            record, is_new = after.push(version, details, extras, now)
            if is_new:
                wanted = {"tenant": version.tenant, "digest": version.digest}
                check(table.read_usage(connection.execute(table.STORAGE_USAGE, wanted).one()))
            change = _keep(connection, "adapter.push", before, after)
        return Publication(record, is_new, after.rollouts(), change.moved_pin)

    def delete(self, tenant: str, reference: str, *, force: bool = False) -> Removal:
        """Deletes a version, or a name with all of its versions and aliases.

        Raises AdapterNotFound, BadAlias if the reference is an alias, and AdapterInUse while an alias points at the
        version. Deleting a whole name ignores its alias `latest`.

        With `force`, a version is deleted even if aliases point at it. In each of these aliases, the version's
        percentage is added to the largest remaining percentage. An alias without a remaining version is deleted, but
        `latest` moves to the newest version. Deleting the last version of a name deletes the name.
        """
        wanted = _parse(reference)
        if wanted.alias is not None and "@" in reference:
            raise BadAlias(
                f"{reference!r} is an alias, not a version; delete the alias, or the version that it "
                "points at"
            )
        now = self._clock()
        records, change = self._change(
            "adapter.delete",
            (tenant, wanted.name),
            lambda named: named.remove(wanted.number, now, force=force),
            needed=None if wanted.number is None else (wanted.number,),
            frees_room=True,
        )
        return Removal(records, change.orphaned, change.moved_pin)

    # -- aliases and pins -------------------------------------------------------------------------------------------

    def move(
        self,
        tenant: str,
        name: str,
        alias: str,
        targets: Targets,
        *,
        expected: Targets | None = None,
        follows_pushes: bool = False,
    ) -> Rollout:
        """Sets the versions of an alias and their percentages, atomically. Creates the alias if it does not exist.
        Moving an alias to the targets that it already has is a no-op.

        expected: the targets that the alias must have now; empty if the alias must not exist yet. Raises AliasConflict
        if the alias has other targets. Raises BadAlias, and AdapterNotFound if the name or a version does not exist.
        """
        now = self._clock()
        rollout, _ = self._change(
            "alias.move",
            (tenant, name),
            lambda named: named.move(alias, targets, expected, now, follows_pushes=follows_pushes),
            needed=tuple(targets),
        )
        return rollout

    def roll_back(self, tenant: str, name: str, alias: str) -> Rollout:
        """Restores the targets that an alias had before its last move. Further calls undo earlier moves, one per call,
        up to 20 moves (`MAX_HISTORY`).

        Raises AdapterNotFound, and AliasConflict if there is no earlier state.
        """
        now = self._clock()
        return self._change("alias.rollback", (tenant, name), lambda named: named.roll_back(alias, now))[0]

    def delete_alias(self, tenant: str, name: str, alias: str) -> Rollout:
        """Deletes an alias and returns its last state. Raises AdapterNotFound, and BadAlias for `latest`."""
        return self._change(
            "alias.delete", (tenant, name), lambda named: named.delete_alias(alias), frees_room=True
        )[0]

    def pin(self, tenant: str, reference: str, check: PinCheck) -> Rollout:
        """Pins an alias.

        `check` is called with the rollout of this alias and with all other pinned rollouts. If `check` raises, the
        alias is not pinned. An alias that is already pinned is returned without a check. No other process changes a pin
        during the call. Raises AdapterNotFound, and BadAlias if the reference is a version number.
        """
        name, alias = _parse_pinnable(reference)
        with self._changing((tenant, name)) as connection:
            before = table.load_name(connection, (tenant, name), ())
            after = before.copy()
            if not before.rollout(alias).pinned:
                check(before.rollout(alias), table.read_rollouts(connection.execute(table.PINNED)))
            pinned = after.set_pinned(alias, pinned=True)
            _keep(connection, "adapter.pin", before, after)
        return pinned

    def unpin(self, tenant: str, reference: str) -> Rollout:
        """Unpins an alias; a no-op if it is not pinned. Raises AdapterNotFound, and BadAlias for a version number."""
        name, alias = _parse_pinnable(reference)
        return self._change(
            "adapter.unpin",
            (tenant, name),
            lambda named: named.set_pinned(alias, pinned=False),
            frees_room=True,
        )[0]

    def _change(
        self,
        action: str,
        key: NameKey,
        edit: Callable[[NamedAdapter], T],
        *,
        needed: Collection[int] | None = (),
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        """Applies `edit` to a name and writes the result durably, in one transaction. Returns the result of `edit`. If
        `edit` raises, nothing changes.

        action: see `AuditEntry`. needed: see `load_name`. frees_room: try the change even on a full disk.
        """
        with self._changing(key, frees_room=frees_room) as connection:
            before = table.load_name(connection, key, needed)
            after = before.copy()
            return edit(after), _keep(connection, action, before, after)

    @contextmanager
    def _changing(self, key: NameKey, *locks: str, frees_room: bool = False) -> Iterator[Connection]:
        """A transaction that changes a name. After its commit, the name is dropped from the cache.

        A transaction that raised may still have been committed. In that case the feed (`changes`) drops the name.
        """
        with self._database.transaction(*locks, CHANGES, even_if_full=frees_room) as connection:
            yield connection
        self._cache.drop(key)

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None = None) -> Changes:
        """Returns the changes that all processes made after the cursor, oldest first. Pass None on the first call. See
        `change_feed.py`.
        """
        changes = read_changes(self._database, cursor)
        if changes.resync:
            self._cache.clear()
        for change in changes.changes:
            if not (change.name or change.key_id):  # the tenant may have been purged
                self._cache.drop_tenant(change.tenant)
            self._cache.drop((change.tenant, change.name))
        return changes


def _own(key: NameKey) -> dict[str, object]:
    return {"tenant": key[0], "name": key[1]}


def _most(limit: int | None) -> int:
    return table.NO_LIMIT if limit is None else limit


def _keep(connection: Connection, action: str, before: NamedAdapter, after: NamedAdapter) -> Change:
    """Writes the changes of a name, publishes them, and records them in the audit log. Does nothing if `after` equals
    `before`.
    """
    if after == before:
        return Change(after.tenant, after.name)
    table.save_name(connection, before, after)
    removed = dict.fromkeys(
        before.records[number].version for number in before.records.keys() - after.records.keys()
    )
    named = {version for version, _ in table.read_of_versions(connection.execute, table.NAMED, removed)}
    orphaned = tuple(version for version in removed if version not in named)
    change = Change(after.tenant, after.name, orphaned, before.pins() != after.pins())
    publish(connection, change)
    record_change(connection, action, after.tenant, after.name, after.changes_since(before))
    return change


def _records(found: AdapterRecord | Rollout) -> Collection[AdapterRecord]:
    """Returns the record itself, or all records of a rollout."""
    return (found,) if isinstance(found, AdapterRecord) else found.records.values()


def _parse(reference: str) -> AdapterReference:
    try:
        return parse_reference(reference)
    except BadAdapterName:
        raise not_found(reference) from None


def _parse_pinnable(reference: str) -> tuple[str, str]:
    """Returns the name and the alias. Raises AdapterNotFound, and BadAlias if the reference is a version number."""
    wanted = _parse(reference)
    if wanted.alias is None:
        raise BadAlias(
            f"{reference!r} is a version, but only names and aliases can be pinned: create an alias "
            "for the version and pin that"
        )
    return wanted.name, wanted.alias


# How long a shared store keeps a blob that no version refers to. Operators have a day to notice that a registry was
# restored from an old backup, or that a server uses the wrong database.
SHARED_GRACE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class PurgedBlobs:
    """The number and the total bytes of the deleted blobs of a tenant."""

    num_deleted: int
    num_bytes: int
    # Number of blobs that other tenants need, or that are kept because other registries have claimed the store.
    num_kept: int


class StoredAdapters:
    """The operations of an API process on adapters. All calls block. `store_blob` waits until the store has written the
    blob.

    grace_s: minimum time between the first `sweep` that finds a blob unreferenced and the `sweep` that drops the blob.

    The constructor raises StoreUnavailable if the store cannot be claimed.
    """

    def __init__(
        self,
        registry: Registry,
        store: Store,
        *,
        grace_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.store = store
        self._grace_s = grace_s
        self._clock = clock
        # For each unreferenced digest, the time at which a sweep first found it unreferenced.
        self._unneeded_since: dict[str, float] = {}
        store.claim(registry.registry)

    def store_blob(self, adapter: CheckedAdapter) -> str:
        """Stores the blob of an adapter that passed every check. Returns the reservation that protects the blob.

        The blob is durable on return. Pass the reservation to `commit` or `discard`. The duration does not reveal
        whether another tenant has stored the same weights before. Raises StoreUnavailable.
        """
        reservation = self.registry.blobs.reserve(adapter.digest)
        try:
            self.store.put(adapter.digest, adapter.members)
        except BaseException:
            # Do not call `collect` here: it would wait for an unreachable store with the database locked. The store or
            # the sweep cleans up after a failed `put`.
            self.registry.blobs.release(reservation)
            raise
        return reservation

    def commit(
        self,
        tenant: str,
        name: str,
        adapter: CheckedAdapter,
        reservation: str,
        check: StorageCheck = lambda usage: None,
    ) -> Publication:
        """Creates the next version of an adapter name from a stored blob, durably. See `Registry.put`, which also
        describes `check`.
        """
        details = AdapterDetails(
            adapter.rank,
            adapter.target_modules,
            adapter.tensor_bytes,
            adapter.certificate.pool_bytes,
            adapter.blob_bytes,
        )
        version = AdapterVersion(tenant, adapter.digest)
        return self.registry.put(name, version, details, adapter.extras, reservation=reservation, check=check)

    def discard(self, adapter: CheckedAdapter, reservation: str) -> None:
        """Releases the reservation, and drops the stored blob unless a version or another upload needs it."""
        self.registry.blobs.release(reservation)
        self.drop_unreferenced([adapter.digest])

    def withdraw(self, tenant: str, reference: str, *, force: bool = False) -> Removal:
        """Deletes a version or a name, and blobs that no other version needs. Raises what `Registry.delete` raises."""
        removal = self.registry.delete(tenant, reference, force=force)
        self.drop_unreferenced(version.digest for version in removal.orphaned)
        return removal

    def purge_blobs(self, tenant: str) -> PurgedBlobs:
        """Drops the blobs that only this tenant's versions and files refer to. These are kept, so the purge can be
        repeated after an interruption.
        """
        blobs = self.registry.blobs.sizes_of(tenant)
        deleted = [
            num_bytes
            for digest, num_bytes in blobs.items()
            if not self._other_claims() and self.registry.blobs.collect(digest, self._drop, leaving=tenant)
        ]
        return PurgedBlobs(len(deleted), sum(deleted), len(blobs) - len(deleted))

    @property
    def durable(self) -> Store:
        """The store without its warm tier, for blobs that no engine reads."""
        return self.store.durable if isinstance(self.store, TieredStore) else self.store

    def drop_unreferenced(self, digests: Iterable[str]) -> None:
        """Drops those of the blobs that no version, file or reservation needs. Logs StoreUnavailable instead of raising
        it, because the caller's operation is already complete. A later `sweep` then drops the blob.
        """
        for digest in digests:
            try:
                self.registry.blobs.collect(digest, self._drop)
            except StoreUnavailable:
                logger.exception("orphaned blob %s could not be deleted; the next sweep tries again", digest)

    def sweep(self) -> int:
        """Drops unreferenced blobs that crashes left behind, and returns their number. Safe to run during uploads."""
        if self._other_claims():
            return 0
        now, before = self._clock(), self._unneeded_since
        stored = set(self.store.digests())
        unneeded = stored - self.registry.blobs.find_referenced(stored)
        self._unneeded_since = {digest: before.get(digest, now) for digest in unneeded}
        due = [digest for digest, since in self._unneeded_since.items() if now - since >= self._grace_s]
        return sum(self.registry.blobs.collect(digest, self._drop) for digest in due)

    def _drop(self, digest: str) -> None:
        """Drops a blob, unless another registry has claimed the store in the meantime."""
        if not self._other_claims():
            self.store.delete(digest)

    def _other_claims(self) -> frozenset[str]:
        others = self.store.claims() - {self.registry.registry}
        if others:
            logger.warning(
                "no adapter is deleted in the store, because %d other registries (%s) have also used "
                "it; delete the names of registries that no longer exist from the store's `claims`",
                *(len(others), ", ".join(sorted(others))),
            )
        return others
