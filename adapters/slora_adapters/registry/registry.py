"""The registry of adapters: which names, versions and aliases each tenant has, and which blobs those versions need.

Each push under a name creates the next version: 1, 2, 3, and so on. A version never changes, and the digest identifies
its weights. Requests use a version number or an alias. An alias points at one version, or splits the requests among
several versions by percentage. Every name has the alias `latest`, and a bare name means `latest`. Each push moves
`latest` to the new version, unless `latest` was set not to follow pushes.

Every change is one transaction. Every process that shares the storage learns of the change through `changes`. The
number of a deleted version is not reused while the name exists. A name that was deleted and is pushed again starts with
version 1.

An engine knows weights only by tenant and digest (`AdapterVersion`). When no version of the tenant uses the weights,
they are orphaned, and engines may drop them. A blob that no version of any tenant refers to may be deleted, but only
through `collect`. An upload reserves the digest before it stores the blob, and `collect` keeps reserved blobs.

A pin belongs to an alias (to `latest` if a bare name is pinned). Every version that a pinned alias points at is kept in
the page pool of every engine, even before a request needs it. When the alias moves, the pin applies to its new
versions. The pin ends when the alias is deleted.

This module does not access the store or any tensors; `catalog.py` combines registry and store. It does not know how
names are stored (see `registry_storage.py`) or whether a tenant exists.
"""

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from slora_adapters.database.change_feed import Change, Changes
from slora_adapters.errors import BadAdapterName, BadAlias, StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import (
    NO_EXTRAS,
    AdapterDetails,
    AdapterRecord,
    Publication,
    Removal,
    Rollout,
    StorageUsage,
)
from slora_adapters.registry.alias import Targets
from slora_adapters.registry.name_cache import Answer, ExtrasOf, NameCache, Target
from slora_adapters.registry.named_adapter import MAX_ALIASES, NamedAdapter, not_found
from slora_adapters.registry.reference import AdapterReference, check_adapter_name, parse_reference
from slora_adapters.registry.registry_storage import ALL_VERSIONS, RESERVATION_S, NameKey, RegistryStorage
from slora_adapters.store.blob_name import check_digest
from slora_adapters.version import AdapterVersion

__all__ = [
    "MAX_ALIASES",
    "RESERVATION_S",
    "AdapterDetails",
    "AdapterRecord",
    "Change",
    "Changes",
    "PinCheck",
    "Publication",
    "Registry",
    "Removal",
    "Rollout",
    "StorageCheck",
    "StorageUsage",
    "check_adapter_name",
]

T = TypeVar("T")
PinCheck = Callable[[Rollout, Sequence[Rollout]], None]
StorageCheck = Callable[[StorageUsage], None]
# Maximum number of lookups of one request. A lookup is repeated if the version that it found was deleted before the
# version's extras were read.
_MAX_LOOKUPS = 3


class Registry:
    """The adapters of all tenants, kept in a shared storage.

    Every method raises StoreUnavailable if the storage does not answer. AdapterNotFound has the same message whether an
    adapter does not exist or belongs to another tenant.

    `get`, `serve` and `rollout` answer repeated lookups from a cache, even while the storage does not answer. A change
    by this process drops the changed name from the cache at once. A change by another process drops it when `changes`
    reports the change, so `changes` must be polled continually.
    """

    def __init__(
        self,
        storage: RegistryStorage,
        clock: Callable[[], float] = time.time,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_behind: returns whether the cache may miss a change by another process. Lookups then bypass the cache."""
        self._storage = storage
        self._clock = clock
        self._cache = NameCache(is_behind=is_behind)

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
            record = found if isinstance(found, AdapterRecord) else found.choose(user)
            # Read the extras of every version that the alias points at. The cache can then serve requests of all users
            # while the storage is unavailable.
            texts = {one.number: self._find_extras(tenant, one) for one in _records(found)}
            extras = texts[record.number]
            if extras is not None:
                return record, extras
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
        """Drops this name from the cache, so that the next lookup of the name queries the storage."""
        self._cache.drop((tenant, _parse(reference).name))

    def rollouts(
        self, tenant: str, *, limit: int | None = None, after: tuple[str, str] | None = None
    ) -> Sequence[Rollout]:
        """Returns the aliases of a tenant, sorted by name and alias in byte order.

        The result has at most `limit` aliases that sort after `after`, a pair (name, alias) that need not exist.
        """
        return self._storage.rollouts(tenant, limit, after)

    def aliases(self, tenant: str, name: str) -> Sequence[Rollout]:
        """Returns all aliases of one name, sorted; empty if the name does not exist."""
        return self._storage.aliases((tenant, name))

    def list(self, tenant: str, *, limit: int | None = None, after: str | None = None) -> Sequence[Rollout]:
        """Returns the alias `latest` of each of a tenant's names, sorted by name in byte order.

        The result has at most `limit` names that sort after the name `after`, which need not exist.
        """
        return self._storage.names(tenant, limit, after)

    def versions(
        self, tenant: str, name: str, *, limit: int | None = None, after: int | None = None
    ) -> Sequence[AdapterRecord]:
        """Returns at most `limit` versions of a name with numbers below `after`, newest first. Raises AdapterNotFound
        if the name does not exist.
        """
        found = self._storage.versions((tenant, name), limit, after)
        if not found and self.newest(tenant, name) is None:
            raise not_found(name)
        return found

    def newest(self, tenant: str, name: str) -> AdapterRecord | None:
        """Returns the newest existing version of a name; None if the name does not exist."""
        return self._storage.newest((tenant, name))

    def storage_usage(self, tenant: str, digest: str) -> StorageUsage:
        """Returns the total size of what the tenant stores, and the stored size of the weights with this digest."""
        return self._storage.storage_usage(tenant, digest)

    def pinned(
        self, *, limit: int | None = None, after: tuple[str, str, str] | None = None
    ) -> Sequence[Rollout]:
        """Returns the pinned aliases of all tenants, sorted by tenant, name and alias.

        The result has at most `limit` aliases that sort after `after`: tenant, name and alias, which need not exist.
        """
        return self._storage.pinned(limit, after)

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        """Returns those of the given weights that at least one name of their tenant still uses. Engines may drop the
        other weights.
        """
        return self._storage.named(versions)

    def find_names(self, versions: Collection[AdapterVersion]) -> Mapping[AdapterVersion, str]:
        """Returns a reference `name@number` for each of the given weights that a name still uses. If several references
        fit, the newest one is returned.
        """
        return self._storage.find_names(versions)

    def find_references(
        self, versions: Collection[AdapterVersion]
    ) -> Mapping[AdapterVersion, Collection[str]]:
        """Returns everything that a request may write as its model for each of the given weights that a name still
        uses: `name@number`, `name@alias`, and `name` for the alias `latest`.
        """
        return self._storage.find_references(versions)

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
        did not receive the response can safely retry. Raises BadAdapterName, and StoreUnavailable if the reservation
        has expired.
        """
        check_adapter_name(name)
        check_digest(version.digest)
        now = self._clock()

        def push(named: NamedAdapter, usage: StorageUsage) -> tuple[AdapterRecord, bool]:
            record, is_new = named.push(version, details, extras, now)
            if is_new:
                check(usage)
            return record, is_new

        key = (version.tenant, name)
        (record, is_new), change = self._storage.push(key, version.digest, push, reservation, now)
        self._drop_changed(key)
        return Publication(record, is_new, change.moved_pin)

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
            ALL_VERSIONS if wanted.number is None else (wanted.number,),
            lambda named: named.remove(wanted.number, now, force=force),
            frees_room=True,
        )
        digests = (version.digest for version in change.orphaned)
        unreferenced = tuple(digest for digest in digests if not self._storage.is_referenced(digest, now))
        return Removal(records, change.orphaned, unreferenced, change.moved_pin)

    # -- aliases ----------------------------------------------------------------------------------------------------

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
        return self._change(
            "alias.move",
            (tenant, name),
            tuple(targets),
            lambda named: named.move(alias, targets, expected, now, follows_pushes=follows_pushes),
        )[0]

    def roll_back(self, tenant: str, name: str, alias: str) -> Rollout:
        """Restores the targets that an alias had before its last move. Further calls undo earlier moves, one per call,
        up to 20 moves (`MAX_HISTORY`).

        Raises AdapterNotFound, and AliasConflict if there is no earlier state.
        """
        now = self._clock()
        return self._change("alias.rollback", (tenant, name), (), lambda named: named.roll_back(alias, now))[
            0
        ]

    def delete_alias(self, tenant: str, name: str, alias: str) -> Rollout:
        """Deletes an alias and returns its last state. Raises AdapterNotFound, and BadAlias for `latest`."""
        return self._change(
            "alias.delete", (tenant, name), (), lambda named: named.delete_alias(alias), frees_room=True
        )[0]

    # -- pins -------------------------------------------------------------------------------------------------------

    def pin(self, tenant: str, reference: str, check: PinCheck) -> Rollout:
        """Pins an alias.

        `check` is called with the rollout of this alias and with all other pinned rollouts. If `check` raises, the
        alias is not pinned. An alias that is already pinned is returned without a check. Raises AdapterNotFound, and
        BadAlias if the reference is a version number.
        """
        name, alias = _parse_pinnable(reference)

        def pin(named: NamedAdapter, others: Sequence[Rollout]) -> Rollout:
            rollout = named.rollout(alias)
            if not rollout.pinned:
                check(rollout, others)
            return named.set_pinned(alias, pinned=True)

        pinned, _ = self._storage.change_pins((tenant, name), pin)
        self._drop_changed((tenant, name))
        return pinned

    def unpin(self, tenant: str, reference: str) -> Rollout:
        """Unpins an alias; a no-op if it is not pinned. Raises AdapterNotFound, and BadAlias for a version number."""
        name, alias = _parse_pinnable(reference)
        return self._change(
            "adapter.unpin",
            (tenant, name),
            (),
            lambda named: named.set_pinned(alias, pinned=False),
            frees_room=True,
        )[0]

    # -- blobs ------------------------------------------------------------------------------------------------------

    @property
    def registry(self) -> str:
        """The unique id of this registry, under which it claims a store."""
        return self._storage.registry

    def is_referenced(self, digest: str) -> bool:
        """Returns whether a version of any tenant, or an upload in progress, needs the blob."""
        return self._storage.is_referenced(digest, self._clock())

    def reserve(self, digest: str) -> str:
        """Protects a blob from `collect` while no version refers to it yet. Returns the reservation, which `put` or
        `release` ends. It expires after RESERVATION_S.
        """
        return self._storage.reserve(check_digest(digest), self._clock())

    def release(self, reservation: str) -> None:
        """Ends a reservation; a no-op if it has already ended. If the storage does not answer, the reservation expires
        later.
        """
        with suppress(StoreUnavailable):
            self._storage.release(reservation)

    def collect(self, digest: str, drop: Callable[[str], None], *, leaving: str = "") -> bool:
        """Calls `drop(digest)` if no version refers to the blob and no upload has reserved it. Returns whether `drop`
        was called.

        No new reference to the blob can be created while `drop` runs, so `drop` must be fast. leaving: a tenant whose
        versions do not count, because it is being purged.
        """
        return self._storage.collect(digest, drop, self._clock(), leaving)

    def blobs_of(self, tenant: str) -> Mapping[str, int]:
        """Returns the size of each blob that versions of the tenant refer to, by digest."""
        return self._storage.blobs_of(tenant)

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None = None) -> Changes:
        """Returns the changes that all processes made after the cursor, oldest first. Pass None on the first call. See
        `change_feed.py`.
        """
        changes = self._storage.changes(cursor)
        if changes.resync:
            self._cache.clear()
        for change in changes.changes:
            if not (change.name or change.key_id):  # the tenant may have been purged
                self._cache.drop_tenant(change.tenant)
            self._cache.drop((change.tenant, change.name))
        return changes

    def _find(self, tenant: str, wanted: AdapterReference) -> AdapterRecord | Rollout:
        """Returns the record or rollout that a reference means, from the cache if possible. Raises AdapterNotFound."""
        key = (tenant, wanted.name)

        def ask() -> AdapterRecord | Rollout | None:
            if isinstance(wanted.target, int):
                return self._storage.find_version(key, wanted.target)
            return self._storage.find_rollout(key, wanted.target)

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
            return self._storage.find_extras(key, record)

        found = self._find_cached(key, ExtrasOf(record.number), ask)
        return found if isinstance(found, AdapterExtras) else None

    def _find_cached(self, key: NameKey, target: Target, ask: Callable[[], Answer | None]) -> Answer | None:
        found = self._cache.get(key, target)
        return self._cache.look_up(key, target, ask) if found is None else found

    def _change(
        self,
        action: str,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        *,
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        done = self._storage.change(action, key, wanted, edit, frees_room=frees_room)
        self._drop_changed(key)
        return done

    def _drop_changed(self, key: NameKey) -> None:
        """Drops a name from the cache after this process changed it.

        A change that raised may still have been written. In that case the feed (`changes`) drops the name.
        """
        self._cache.drop(key)


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
