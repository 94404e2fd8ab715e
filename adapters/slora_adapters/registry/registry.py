"""Which adapters a tenant has: names with numbered versions, aliases that point at them, and who needs which blob.

Each push under a name is a version, 1, 2, 3, ...: it never changes, and its weights are identified by their digest.
Requests go by alias, which points at one version or at several by weight; what a bare name serves is its alias
`latest`, which every name has and which each push moves, unless it was set to stay. Every change is one transaction,
and every process that shares the storage hears of it (`changes`). Numbers of deleted versions do not come back while
the name lives; a name that was deleted and is pushed again starts anew.

A (tenant, digest) whose last version is gone is orphaned: engines may forget it. A blob that no version of any tenant
refers to may be deleted, but only through `collect`: an upload of the same weights that goes on at the same time has
reserved the digest first, and keeps its blob.

A pin is an alias's, `latest` where a bare name is pinned: all that it points at is to be in the pool of every engine
before anybody asks. So it follows pushes, moves and rollbacks by itself, covers both sides of a canary, and ends with
its alias.

Knows no store and no weights: `catalog.py` puts both together. Nor how names are kept (`registry_storage.py`), nor
whether a tenant exists.
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from slora_adapters.errors import BadAdapterName, BadAlias, StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import (
    NO_EXTRAS,
    AdapterDetails,
    AdapterRecord,
    Holdings,
    Publication,
    Removal,
    Rollout,
)
from slora_adapters.registry.alias import Targets
from slora_adapters.registry.name_cache import Answer, ExtrasOf, NameCache, Target
from slora_adapters.registry.named_adapter import MAX_ALIASES, NamedAdapter, not_found
from slora_adapters.registry.reference import AdapterReference, check_adapter_name, parse_reference
from slora_adapters.registry.registry_storage import (
    ALL_VERSIONS,
    RESERVATION_S,
    Change,
    Changes,
    NameKey,
    RegistryStorage,
)
from slora_adapters.store.blob_name import check_digest
from slora_adapters.version import AdapterVersion

__all__ = [
    "MAX_ALIASES",
    "RESERVATION_S",
    "AdapterDetails",
    "AdapterRecord",
    "Change",
    "Changes",
    "Holdings",
    "HoldingsCheck",
    "PinCheck",
    "Publication",
    "Registry",
    "Removal",
    "Rollout",
    "check_adapter_name",
]

T = TypeVar("T")
PinCheck = Callable[[Rollout, Sequence[Rollout]], None]
HoldingsCheck = Callable[[Holdings], None]
# Of one request, while the versions that it finds are deleted.
_MAX_LOOKUPS = 3


class Registry:
    """Adapters in a shared storage. Methods raise StoreUnavailable when it does not answer, and AdapterNotFound in the
    same words for what only another tenant has.

    cache: for a storage that is far away. `get` and `rollout` answer from it what they were asked before, even while
    the storage does not answer; what this process changes it forgets at once, and what others change when `changes`
    tells, which must then be asked all the time.
    """

    def __init__(
        self,
        storage: RegistryStorage,
        clock: Callable[[], float] = time.time,
        cache: NameCache | None = None,
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._cache = cache
        # Why the feed could not be read when it was last asked for.
        self._cut_off: StoreUnavailable | None = None

    # -- looking up -------------------------------------------------------------------------------------------------

    def get(self, tenant: str, reference: str, user: str | None = None) -> AdapterRecord:
        """The version that a request gets. Where an alias points at several, the same user gets the same, and None a
        drawn one. Raises AdapterNotFound.
        """
        found = self._find(tenant, _parse(reference))
        return found if isinstance(found, AdapterRecord) else found.choose(user or uuid.uuid4().hex)

    def serve(
        self, tenant: str, reference: str, user: str | None = None
    ) -> tuple[AdapterRecord, AdapterExtras]:
        """The version that a request gets, as `get`, with the texts of its extras. Raises AdapterNotFound."""
        user = user or uuid.uuid4().hex
        for _ in range(_MAX_LOOKUPS):
            found = self._find(tenant, _parse(reference))
            record = found if isinstance(found, AdapterRecord) else found.choose(user)
            # With a cache, all that the alias points at: while the storage is away, each user must be answered.
            wanted = (record,) if self._cache is None else _records(found)
            texts = {one.number: self._find_extras(tenant, one) for one in wanted}
            extras = texts[record.number]
            if extras is not None:
                return record, extras
            self.doubt(tenant, reference)  # it was deleted between the two lookups
        raise not_found(reference)

    def rollout(self, tenant: str, reference: str) -> Rollout:
        """A bare name's is that of `latest`. Raises AdapterNotFound, for the number of a version too."""
        wanted = _parse(reference)
        found = None if wanted.alias is None else self._find(tenant, wanted)
        if not isinstance(found, Rollout):
            raise not_found(reference)
        return found

    def is_near(self, tenant: str, reference: str) -> bool:
        """Whether `serve` and `rollout` answer within microseconds, and may be called on an event loop."""
        if self._cache is None or self._cut_off is not None:
            return True
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

    def doubt(self, tenant: str, reference: str) -> None:
        """The next lookup of this name asks the storage."""
        if self._cache is not None:
            self._cache.drop((tenant, _parse(reference).name))

    def rollouts(
        self, tenant: str, *, limit: int | None = None, after: tuple[str, str] | None = None
    ) -> Sequence[Rollout]:
        """The aliases of a tenant, sorted by name and alias in byte order: at most `limit` of those strictly after the
        name and alias `after`, which need not be there."""
        return self._storage.rollouts(tenant, limit, after)

    def aliases(self, tenant: str, name: str) -> Sequence[Rollout]:
        """All of one name, sorted; none if there is no such name."""
        return self._storage.aliases((tenant, name))

    def list(self, tenant: str, *, limit: int | None = None, after: str | None = None) -> Sequence[Rollout]:
        """The names of a tenant, each with what it serves, sorted in byte order: at most `limit` of those strictly
        after the name `after`, which need not be there."""
        return self._storage.names(tenant, limit, after)

    def versions(
        self, tenant: str, name: str, *, limit: int | None = None, after: int | None = None
    ) -> Sequence[AdapterRecord]:
        """Those of a name, newest first: at most `limit` of those older than the number `after`, which need not be
        there. Raises AdapterNotFound if there is no such name."""
        found = self._storage.versions((tenant, name), limit, after)
        if not found and self.newest(tenant, name) is None:
            raise not_found(name)
        return found

    def newest(self, tenant: str, name: str) -> AdapterRecord | None:
        """The version of a name that was pushed last, of those that are there; None if there is no such name."""
        return self._storage.newest((tenant, name))

    def holdings(self, tenant: str, digest: str) -> Holdings:
        """digest: of the weights whose share is asked about."""
        return self._storage.holdings(tenant, digest)

    def pinned(self) -> Sequence[Rollout]:
        """All aliases that are pinned, by tenant, name and alias."""
        return self._storage.pinned()

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        """Those that a name of their tenant has; engines may forget the others."""
        return self._storage.named(versions)

    # -- versions come and go ---------------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        version: AdapterVersion,
        details: AdapterDetails,
        extras: AdapterExtras = NO_EXTRAS,
        *,
        reservation: str | None = None,
        check: HoldingsCheck = lambda holdings: None,
    ) -> Publication:
        """Makes the next version of a name of weights whose blob is stored, moves the aliases that follow pushes, and
        gives back the reservation that protected the blob.

        check: is told what the tenant holds without the new version. If it raises, no version is made. No other process
        adds a version of the tenant between the check and the end of this call.

        Pushing the newest version with the same extras again is a no-op and is not checked, so that a client that lost
        the answer may push again. Raises BadAdapterName, and StoreUnavailable if the reservation has run out.
        """
        check_adapter_name(name)
        check_digest(version.digest)
        now = self._clock()

        def push(named: NamedAdapter, holdings: Holdings) -> tuple[AdapterRecord, bool]:
            record, is_new = named.push(version, details, extras, now)
            if is_new:
                check(holdings)
            return record, is_new

        key = (version.tenant, name)
        (record, is_new), change = self._storage.push(key, version.digest, push, reservation, now)
        self._forget(key)
        return Publication(record, is_new, change.moved_pin)

    def delete(self, tenant: str, reference: str, *, force: bool = False) -> Removal:
        """Deletes a version, or a name with all of its versions and aliases.

        Raises AdapterNotFound, BadAlias for an alias, and AdapterInUse while an alias points at it. Deleting a whole
        name ignores its alias `latest`. A forced deletion gives the version's share of an alias to the heaviest version
        left there. An alias that points nowhere then is deleted; `latest` moves to the newest version. The name goes
        with its last version.
        """
        wanted = _parse(reference)
        if wanted.alias is not None and "@" in reference:
            raise BadAlias(f"{reference!r} is an alias; delete it as one, or the version that it points at")
        now = self._clock()
        records, change = self._change(
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
        """Points an alias at versions by weight, atomically; makes it if there is none. Where it points there already
        nothing changes.

        expected: where it must point now, else AliasConflict; empty if it must not exist yet. Raises BadAlias, and
        AdapterNotFound for a name or a version that is not there.
        """
        now = self._clock()
        return self._change(
            (tenant, name),
            tuple(targets),
            lambda named: named.move(alias, targets, expected, now, follows_pushes=follows_pushes),
        )[0]

    def roll_back(self, tenant: str, name: str, alias: str) -> Rollout:
        """Puts an alias back to where it was before its last move; again, to before the one before, some 20 moves back.

        Raises AdapterNotFound, and AliasConflict if there is nothing to go back to.
        """
        now = self._clock()
        return self._change((tenant, name), (), lambda named: named.roll_back(alias, now))[0]

    def delete_alias(self, tenant: str, name: str, alias: str) -> Rollout:
        """Takes an alias away; returns it as it was. Raises AdapterNotFound, and BadAlias for `latest`."""
        return self._change((tenant, name), (), lambda named: named.delete_alias(alias))[0]

    # -- pins -------------------------------------------------------------------------------------------------------

    def pin(self, tenant: str, reference: str, check: PinCheck) -> Rollout:
        """`check` is told what is to be pinned, and what is pinned besides; raising, it keeps the alias unpinned. One
        that is pinned stays so, unchecked. Raises AdapterNotFound, BadAlias for a version by its number.
        """
        name, alias = _parse_pinnable(reference)

        def pin(named: NamedAdapter, others: Sequence[Rollout]) -> Rollout:
            rollout = named.rollout(alias)
            if not rollout.pinned:
                check(rollout, others)
            return named.set_pinned(alias, pinned=True)

        pinned, _ = self._storage.change_pins((tenant, name), pin)
        self._forget((tenant, name))
        return pinned

    def unpin(self, tenant: str, reference: str) -> Rollout:
        """One that is not pinned stays so. Raises AdapterNotFound, BadAlias for a version by its number."""
        name, alias = _parse_pinnable(reference)
        return self._change((tenant, name), (), lambda named: named.set_pinned(alias, pinned=False))[0]

    # -- blobs ------------------------------------------------------------------------------------------------------

    @property
    def registry(self) -> str:
        """What stores call it: a name that no other registry has."""
        return self._storage.registry

    def is_referenced(self, digest: str) -> bool:
        """Whether a version of any tenant, or an upload that goes on, needs the blob."""
        return self._storage.is_referenced(digest, self._clock())

    @contextmanager
    def reservation(self, digest: str) -> Iterator[str]:
        """Keeps `collect` away from a blob that is being stored but has no name yet; yields the id for `put`."""
        reservation = self._storage.reserve(check_digest(digest), self._clock())
        try:
            yield reservation
        finally:
            with suppress(StoreUnavailable):  # then it runs out by itself
                self._storage.give_back(reservation)

    def collect(self, digest: str, drop: Callable[[str], None]) -> bool:
        """Calls `drop(digest)` if nobody refers to the blob or has reserved it. Returns whether it did.

        Nobody can begin to refer to it meanwhile: `drop` must be quick.
        """
        return self._storage.collect(digest, drop, self._clock())

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None = None) -> Changes:
        """What all processes did since a cursor, in order; None is to begin with. See `registry_storage.py`."""
        try:
            changes = self._storage.changes(cursor)
        except StoreUnavailable as error:
            self._cut_off = error
            raise
        self._cut_off = None
        if self._cache is not None:
            if changes.resync:
                self._cache.clear()
            for change in changes.changes:
                self._cache.drop((change.tenant, change.name))
        return changes

    def close(self) -> None:
        """Ends connections."""
        self._storage.close()

    def _find(self, tenant: str, wanted: AdapterReference) -> AdapterRecord | Rollout:
        """Raises AdapterNotFound."""
        key = (tenant, wanted.name)

        def ask() -> AdapterRecord | Rollout | None:
            if isinstance(wanted.target, int):
                return self._storage.find_version(key, wanted.target)
            return self._storage.find_rollout(key, wanted.target)

        found = ask() if self._cache is None else self._find_cached(self._cache, key, wanted.target, ask)
        if not isinstance(found, AdapterRecord | Rollout):
            raise not_found(wanted.text)
        return found

    def _find_extras(self, tenant: str, record: AdapterRecord) -> AdapterExtras | None:
        """None if the version has been deleted since the record was read."""
        if not record.extras.digest:
            return NO_EXTRAS
        key = (tenant, record.name)

        def ask() -> AdapterExtras | None:
            return self._storage.find_extras(key, record)

        if self._cache is None:
            return ask()
        found = self._find_cached(self._cache, key, ExtrasOf(record.number), ask)
        return found if isinstance(found, AdapterExtras) else None

    def _find_cached(
        self,
        cache: NameCache,
        key: NameKey,
        target: Target,
        ask: Callable[[], Answer | None],
    ) -> Answer | None:
        found = cache.get(key, target)
        if found is not None:
            return found
        if self._cut_off is not None:
            # At once, or each request for what is not known here would wait for an answer.
            raise StoreUnavailable(f"{key[1]!r} can't be looked up just now: {self._cut_off}")
        return cache.look_up(key, target, ask)

    def _change(
        self,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        *,
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        done = self._storage.change(key, wanted, edit, frees_room=frees_room)
        self._forget(key)
        return done

    def _forget(self, key: NameKey) -> None:
        """It was changed here. One whose change failed may have changed as well; then the feed tells."""
        if self._cache is not None:
            self._cache.drop(key)


def _records(found: AdapterRecord | Rollout) -> Collection[AdapterRecord]:
    """All that it stands for."""
    return (found,) if isinstance(found, AdapterRecord) else found.records.values()


def _parse(reference: str) -> AdapterReference:
    try:
        return parse_reference(reference)
    except BadAdapterName:
        raise not_found(reference) from None


def _parse_pinnable(reference: str) -> tuple[str, str]:
    """Name and alias. Raises AdapterNotFound, BadAlias."""
    wanted = _parse(reference)
    if wanted.alias is None:
        raise BadAlias(
            f"{reference!r} is one version; names and aliases are pinned, with all that they point at: make an alias "
            "for it"
        )
    return wanted.name, wanted.alias
