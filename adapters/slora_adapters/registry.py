"""Which adapters a tenant has: names with numbered versions, aliases that point at them, and who needs which blob.

Each push under a name is a version, 1, 2, 3, ...: it never changes, and its weights are identified by their digest.
Requests go by alias, which points at one version or at several by weight; what a bare name serves is its alias
`latest`, which every name has and which each push moves, unless it was set to stay. Every change is one transaction,
seen at once by every process that shares the database. Numbers of deleted versions do not come back while the name
lives; a name that was deleted and is pushed again starts anew.

A (tenant, digest) whose last version is gone is orphaned: engines may forget it. A blob that no version of any tenant
refers to may be deleted, but only through `collect`, which holds the write lock meanwhile: an upload of the same
weights that goes on at the same time has reserved the digest first, and keeps its blob.

A pin is an alias's, `latest` where a bare name is pinned: all that it points at is to be in the pool of every engine
before anybody asks. So it follows pushes, moves and rollbacks by itself, covers both sides of a canary, and ends with
its alias.

Knows no store and no weights: `catalog.py` puts both together. Whether a tenant exists is not its business either.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sqlite3 import Connection

from slora_adapters.adapter_record import (
    AdapterDetails,
    AdapterRecord,
    Holdings,
    Publication,
    Removal,
    Rollout,
)
from slora_adapters.alias import AliasState, Targets, check_targets
from slora_adapters.blob_name import check_digest
from slora_adapters.database import Database
from slora_adapters.errors import (
    AdapterInUse,
    AliasConflict,
    BadAdapterName,
    BadAlias,
    StoreUnavailable,
)
from slora_adapters.reference import (
    LATEST,
    AdapterReference,
    check_adapter_name,
    check_alias_name,
    parse_reference,
)
from slora_adapters.registry_rows import (
    ALIASES,
    BEHIND_ALL,
    NAMES,
    NEWEST,
    NO_LIMIT,
    OF_NAME,
    ONE_ROLLOUT,
    PINNED,
    VERSION_PAGE,
    VERSIONS,
    NameKey,
    delete_alias,
    find_newest,
    find_rollout,
    find_rollouts,
    find_version,
    find_versions,
    give_back,
    insert_alias,
    insert_version,
    not_found,
    only_rollout,
    push_aliases,
    read_history,
    read_record,
    read_rollouts,
    remove_name,
    remove_versions,
    set_packed_bytes,
    set_pinned,
    take_number,
    write_history,
)
from slora_adapters.registry_schema import MIGRATIONS
from slora_adapters.version import AdapterVersion

__all__ = [
    "RESERVATION_S",
    "AdapterDetails",
    "AdapterRecord",
    "Holdings",
    "Publication",
    "Registry",
    "Removal",
    "Rollout",
    "check_adapter_name",
]

# How long an upload may take between storing its blob and naming it. A crashed one frees its blob afterwards.
RESERVATION_S = 3600.0
# Of one name, `latest` included: all are read when one of its versions is deleted.
MAX_ALIASES = 32

PinCheck = Callable[[Rollout, Sequence[Rollout]], None]


class Registry:
    """Adapters in the shared database. Methods raise StoreUnavailable when it does not answer, and AdapterNotFound in
    the same words for what only another tenant has."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        database.migrate("registry", MIGRATIONS)

    # -- looking up -------------------------------------------------------------------------------------------------

    def get(self, tenant: str, reference: str, user: str | None = None) -> AdapterRecord:
        """The version that a request gets. Where an alias points at several, the same user gets the same, and None a
        drawn one. Raises AdapterNotFound.
        """
        wanted = _parse(reference)
        if wanted.alias is not None:
            return self._rollout(tenant, wanted.name, wanted.alias).choose(user or uuid.uuid4().hex)
        where = "v.tenant = ? AND v.name = ? AND v.number = ?"
        rows = self._database.read(f"{VERSIONS} WHERE {where}", (tenant, wanted.name, wanted.number))
        if not rows:
            raise not_found(reference)
        return read_record(rows[0])

    def rollout(self, tenant: str, reference: str) -> Rollout:
        """A bare name's is that of `latest`. Raises AdapterNotFound, for the number of a version too."""
        wanted = _parse(reference)
        if wanted.alias is None:
            raise not_found(reference)
        return self._rollout(tenant, wanted.name, wanted.alias)

    def rollouts(
        self, tenant: str, *, limit: int | None = None, after: tuple[str, str] | None = None
    ) -> Sequence[Rollout]:
        """The aliases of a tenant, sorted by name and alias in byte order: at most `limit` of those strictly after the
        name and alias `after`, which need not be there."""
        name, alias = after or ("", "")
        rows = self._database.read(ALIASES, (tenant, name, alias, NO_LIMIT if limit is None else limit))
        return read_rollouts(rows)

    def aliases(self, tenant: str, name: str) -> Sequence[Rollout]:
        """All of one name, sorted; none if there is no such name."""
        return read_rollouts(self._database.read(OF_NAME, (tenant, name)))

    def list(self, tenant: str, *, limit: int | None = None, after: str | None = None) -> Sequence[Rollout]:
        """The names of a tenant, each with what it serves, sorted in byte order: at most `limit` of those strictly
        after the name `after`, which need not be there."""
        rows = self._database.read(NAMES, (tenant, after or "", NO_LIMIT if limit is None else limit))
        return read_rollouts(rows)

    def versions(
        self, tenant: str, name: str, *, limit: int | None = None, after: int | None = None
    ) -> Sequence[AdapterRecord]:
        """Those of a name, newest first: at most `limit` of those older than the number `after`, which need not be
        there. Raises AdapterNotFound if there is no such name."""
        before = BEHIND_ALL if after is None else after
        rows = self._database.read(VERSION_PAGE, (tenant, name, before, NO_LIMIT if limit is None else limit))
        if not rows and self.newest(tenant, name) is None:
            raise not_found(name)
        return [read_record(row) for row in rows]

    def newest(self, tenant: str, name: str) -> AdapterRecord | None:
        """The version of a name that was pushed last, of those that are there; None if there is no such name."""
        rows = self._database.read(NEWEST, (tenant, name))
        return read_record(rows[0]) if rows else None

    def holdings(self, tenant: str) -> Holdings:
        query = (
            "SELECT count(*), digest, max(num_bytes) FROM adapter_versions WHERE tenant = ? GROUP BY digest"
        )
        rows = self._database.read(query, (tenant,))
        return Holdings(sum(row[0] for row in rows), {digest: num_bytes for _, digest, num_bytes in rows})

    def pinned(self) -> Sequence[Rollout]:
        """All aliases that are pinned, by tenant, name and alias."""
        return read_rollouts(self._database.read(PINNED))

    # -- versions come and go ---------------------------------------------------------------------------------------

    def put(
        self, name: str, version: AdapterVersion, details: AdapterDetails, reservation: str | None = None
    ) -> Publication:
        """Makes the next version of a name of weights whose blob is stored, moves the aliases that follow pushes, and
        gives back the reservation that protected the blob.

        What is the newest version already, with the same extras, stays that one, and nothing moves: whoever lost the
        answer may push again. Raises BadAdapterName, and StoreUnavailable if the reservation has run out.
        """
        check_adapter_name(name)
        check_digest(version.digest)
        key, now = (version.tenant, name), self._clock()
        with self._database.transaction() as connection:
            if reservation is not None and not give_back(connection, reservation, now):
                raise StoreUnavailable("the upload took too long, so its space was given up; upload again")
            newest = find_newest(connection, key)
            if newest is not None and newest.holds(version, details.extras):
                # It may have been published by a release that did not keep it.
                set_packed_bytes(connection, key, newest.number, details.packed_bytes)
                return Publication(find_version(connection, key, newest.number), is_new=False)
            number = take_number(connection, key, now)
            insert_version(connection, key, number, version, details, now)
            moved_pin = push_aliases(connection, key, number, now)
            return Publication(find_version(connection, key, number), is_new=True, moved_pin=moved_pin)

    def delete(self, tenant: str, reference: str, *, force: bool = False) -> Removal:
        """Takes away a version, or a name with all of its versions and aliases.

        Raises AdapterNotFound, BadAlias for an alias, and AdapterInUse while an alias points at it; those of a whole
        name are all but `latest`. Forced, its share of an alias goes to the heaviest version left there; an alias that
        has none goes, `latest` to the newest version, and the name with its last version.
        """
        wanted = _parse(reference)
        key, now = (tenant, wanted.name), self._clock()
        if wanted.alias is not None and "@" in reference:
            raise BadAlias(f"{reference!r} is an alias; delete it as one, or the version that it points at")
        with self._database.transaction() as connection:
            records = {record.number: record for record in find_versions(connection, key)}
            if not records or (wanted.number is not None and wanted.number not in records):
                raise not_found(reference)
            rollouts = find_rollouts(connection, key)
            if not force:
                _check_unused(reference, wanted.number, rollouts)
            removed = frozenset(records if wanted.number is None else {wanted.number})
            left = max(records.keys() - removed, default=None)
            if left is None:
                remove_name(connection, key)
            else:
                remove_versions(connection, key, removed, left, now)
            moved_pin = any(one.pinned and not removed.isdisjoint(one.targets) for one in rollouts)
            return self._removal(connection, [records[number] for number in sorted(removed)], moved_pin)

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
        check_alias_name(alias)
        check_targets(targets)
        key, wanted = (tenant, name), AliasState(dict(targets), follows_pushes)
        with self._database.transaction() as connection:
            present = {record.number for record in find_versions(connection, key)}
            if missing := sorted(targets.keys() - present):
                raise not_found(f"{name}@{missing[0]}" if present else name)
            history = read_history(connection, key, alias)
            if history is None or history.state != wanted:
                current: Targets = {} if history is None else history.state.targets
                if expected is not None and current != expected:
                    raise AliasConflict(
                        f"{name}@{alias} points at {_say(current)}, not at {_say(expected)}: somebody else has moved "
                        "it; look at it and decide again"
                    )
                if history is None:
                    _check_alias_count(connection, key)
                    insert_alias(connection, key, alias, wanted, self._clock())
                else:
                    write_history(connection, key, alias, history.move(wanted), self._clock())
            return find_rollout(connection, key, alias)

    def roll_back(self, tenant: str, name: str, alias: str) -> Rollout:
        """Puts an alias back to where it was before its last move; again, to before the one before, some 20 moves back.

        Raises AdapterNotFound, and AliasConflict if there is nothing to go back to.
        """
        key = (tenant, name)
        with self._database.transaction() as connection:
            history = read_history(connection, key, alias)
            if history is None:
                raise not_found(f"{name}@{alias}")
            before = history.roll_back()
            if before is None:
                raise AliasConflict(
                    f"{name}@{alias} can't be rolled back: it has not moved since it was made, or where it was "
                    "before has been deleted; point it at a version"
                )
            write_history(connection, key, alias, before, self._clock())
            return find_rollout(connection, key, alias)

    def delete_alias(self, tenant: str, name: str, alias: str) -> Rollout:
        """Takes an alias away; returns it as it was. Raises AdapterNotFound, and BadAlias for `latest`."""
        key = (tenant, name)
        with self._database.transaction() as connection:
            rollout = find_rollout(connection, key, alias)
            if alias == LATEST:
                raise BadAlias(f"{LATEST!r} is what the bare name serves; move it, or delete the name")
            delete_alias(connection, key, alias)
            return rollout

    # -- pins -------------------------------------------------------------------------------------------------------

    def pin(self, tenant: str, reference: str, check: PinCheck) -> Rollout:
        """`check` is told what is to be pinned, and what is pinned besides; raising, it keeps the alias unpinned. One
        that is pinned stays so, unchecked. Raises AdapterNotFound, BadAlias for a version by its number.
        """
        with self._database.transaction() as connection:
            rollout = _find_pinnable(connection, tenant, reference)
            if not rollout.pinned:
                check(rollout, read_rollouts(connection.execute(PINNED)))
            return set_pinned(connection, rollout, pinned=True)

    def unpin(self, tenant: str, reference: str) -> Rollout:
        """One that is not pinned stays so. Raises AdapterNotFound, BadAlias for a version by its number."""
        with self._database.transaction() as connection:
            return set_pinned(connection, _find_pinnable(connection, tenant, reference), pinned=False)

    # -- blobs ------------------------------------------------------------------------------------------------------

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
                give_back(connection, reservation, self._clock())

    def collect(self, digest: str, drop: Callable[[str], None]) -> bool:
        """Calls `drop(digest)` if nobody refers to the blob or has reserved it. Returns whether it did.

        The write lock is held meanwhile, so nobody can begin to refer to it: `drop` must be quick.
        """
        with self._database.transaction() as connection:
            if self._referenced(connection, digest):
                return False
            drop(digest)
            return True

    def _rollout(self, tenant: str, name: str, alias: str) -> Rollout:
        rows = self._database.read(ONE_ROLLOUT, (tenant, name, alias))
        return only_rollout(read_rollouts(rows), name, alias)

    def _removal(self, connection: Connection, records: Sequence[AdapterRecord], moved_pin: bool) -> Removal:
        query = "SELECT 1 FROM adapter_versions WHERE digest = ? AND tenant = ? LIMIT 1"
        orphaned = tuple(
            version
            for version in dict.fromkeys(record.version for record in records)
            if connection.execute(query, (version.digest, version.tenant)).fetchone() is None
        )
        digests = (version.digest for version in orphaned)
        unreferenced = tuple(digest for digest in digests if not self._referenced(connection, digest))
        return Removal(tuple(records), orphaned, unreferenced, moved_pin)

    def _referenced(self, connection: Connection, digest: str) -> bool:
        connection.execute("DELETE FROM adapter_reservations WHERE expires_at <= ?", (self._clock(),))
        query = (
            "SELECT 1 FROM adapter_versions WHERE digest = ?1 "
            "UNION ALL SELECT 1 FROM adapter_reservations WHERE digest = ?1 LIMIT 1"
        )
        return connection.execute(query, (digest,)).fetchone() is not None


def _parse(reference: str) -> AdapterReference:
    try:
        return parse_reference(reference)
    except BadAdapterName:
        raise not_found(reference) from None


def _find_pinnable(connection: Connection, tenant: str, reference: str) -> Rollout:
    wanted = _parse(reference)
    if wanted.alias is None:
        raise BadAlias(
            f"{reference!r} is one version; names and aliases are pinned, with all that they point at: make an alias "
            "for it"
        )
    return find_rollout(connection, (tenant, wanted.name), wanted.alias)


def _check_unused(reference: str, number: int | None, rollouts: Sequence[Rollout]) -> None:
    using = tuple(
        one.alias for one in rollouts if (one.alias != LATEST if number is None else number in one.targets)
    )
    if using:
        raise AdapterInUse(reference, using)


def _check_alias_count(connection: Connection, key: NameKey) -> None:
    query = "SELECT count(*) FROM adapter_aliases WHERE tenant = ? AND name = ?"
    if connection.execute(query, key).fetchone()[0] >= MAX_ALIASES:
        raise BadAlias(f"{key[1]!r} has {MAX_ALIASES} aliases, and no more are kept; delete one")


def _say(targets: Mapping[int, int]) -> str:
    if not targets:
        return "nothing (there is no such alias)"
    return ", ".join(f"{number} ({weight}%)" for number, weight in sorted(targets.items()))
