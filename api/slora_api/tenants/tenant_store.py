"""Tenants and their API keys.

A tenant is a name with a share of the engine. While it is suspended, its keys are refused. A key belongs to one tenant
and may have a default adapter: a name, or `name@alias`, which is resolved at each request. Keys are stored as hashes.

Each process caches the keys that it has seen, with their tenant's share. A revocation or a new share applies to the
next request in the process that makes it. Other processes apply it when they read the feed of changes, within a second.
While the database does not answer, cached keys stay valid for `max_stale_s`, because a revocation could not arrive.

A revocation also takes effect when the database cannot be written, for example on a full disk. It is first written to a
journal that needs no free space and that every process of the host reads at each request. It stays there until the
database has it.

Hosts that share a database need the same pepper. The first one leaves a check of its pepper in the database, and a host
with another pepper is refused.

Methods block on the database, so an event loop must call them on a thread; see also `is_lookup_local`. This module does
not depend on HTTP.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.engine import Connection

from slora.request import MAX_PRIORITY
from slora.tenant_share import DEFAULT_SHARE, TenantShare
from slora_adapters.database import schema
from slora_adapters.database.audit_log import Actor, current_actor, record_change
from slora_adapters.database.change_feed import Change, Changes, publish
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import BadAdapterName, DiskFull, StoreUnavailable, StoreUnfit, TryAgain
from slora_adapters.registry.reference import parse_reference
from slora_api.errors import BadRequest, Conflict, NotFound, TenantSuspended
from slora_api.tenants.api_key import NewKey, Pepper, make_key, read_key_id
from slora_api.tenants.key_cache import KeyCache
from slora_api.tenants.revocation_journal import RevocationJournal

__all__ = ["KeyRecord", "ShareChanges", "Tenant", "TenantStatus", "TenantStore", "check_name"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)


def check_name(name: str, param: str) -> str:
    """Returns the name if it is valid for a tenant. Raises BadRequest naming `param`."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"`{param}` is {name[:140]!r}; a name has 1 to 128 characters of a-z, 0-9, '.', '_' and "
            "'-', and starts with a letter or digit.",
            param,
        )
    return name


def _check_reference(adapter: str) -> None:
    """Raises BadRequest if the text is not a reference to an adapter."""
    try:
        parse_reference(adapter)
    except BadAdapterName as error:
        raise BadRequest(f"`adapter`: {error}.", "adapter") from None


# A tenant with a larger weight would in effect have the engine alone; one with a smaller weight would never be served.
_LEAST_WEIGHT, _MAX_WEIGHT = 0.001, 1000.0
# Tolerance for rounding errors in the sum of all tenants' `min_pool_share`, such as 0.7 + 0.2 + 0.1.
_SUM_SLACK = 1e-9


class TenantStatus(StrEnum):
    """ACTIVE: the tenant is served. SUSPENDED: its keys are refused until the operator resumes it."""

    ACTIVE = "active"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its share. created_at: Unix time in seconds."""

    name: str
    created_at: int
    share: TenantShare
    status: TenantStatus = TenantStatus.ACTIVE

    def check_active(self) -> None:
        """Raises TenantSuspended unless the tenant is active."""
        if self.status is not TenantStatus.ACTIVE:
            raise TenantSuspended(self.name)


@dataclass(frozen=True, slots=True)
class ShareChanges:
    """Changes of a tenant's share. A field that is None keeps its value. The fields are named as in the operator's API.

    min_pool_share, max_pool_share: fractions of the pool's pages, `min_share` and `max_share` of a TenantShare.
    """

    weight: float | None = None
    min_pool_share: float | None = None
    max_pool_share: float | None = None
    priority: int | None = None

    def apply(self, share: TenantShare) -> TenantShare:
        """Returns the changed share. Raises BadRequest naming the field, its value and the limit."""
        self._check_range("weight", _LEAST_WEIGHT, _MAX_WEIGHT)
        self._check_range("min_pool_share", 0, 1)
        self._check_range("max_pool_share", 0, 1)
        self._check_range("priority", -MAX_PRIORITY, MAX_PRIORITY)
        floor = share.min_share if self.min_pool_share is None else self.min_pool_share
        ceiling = share.max_share if self.max_pool_share is None else self.max_pool_share
        if floor > ceiling:
            raise BadRequest(
                f"`min_pool_share` would be {floor:g}, which is more than `max_pool_share` "
                f"({ceiling:g}); lower `min_pool_share` or raise `max_pool_share`.",
                "min_pool_share" if self.max_pool_share is None else "max_pool_share",
            )
        weight = share.weight if self.weight is None else self.weight
        return TenantShare(weight, floor, ceiling, share.priority if self.priority is None else self.priority)

    def _check_range(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if value is not None and not least <= value <= most:
            raise BadRequest(f"`{name}` is {value}; it must be from {least:g} to {most:g}.", name)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key without its secret.

    adapter: the default adapter, which `model="default"` selects; None selects the base model.
    share, status: the tenant's share and status when the key was read.
    """

    key_id: str
    tenant: str
    adapter: str | None
    created_at: int
    revoked_at: int | None
    share: TenantShare
    status: TenantStatus = TenantStatus.ACTIVE


@dataclass(frozen=True, slots=True)
class _StoredKey:
    """A key that is not revoked, as it is cached. digest: see `Pepper`."""

    record: KeyRecord
    digest: bytes

    @property
    def tenant(self) -> str:
        return self.record.tenant


_t, _k = schema.tenants.c, schema.api_keys.c
_TERM_COLUMNS = (_t.status, _t.weight, _t.min_pool_share, _t.max_pool_share, _t.priority)
_TENANTS = select(_t.name, _t.created_at, *_TERM_COLUMNS).order_by(_t.name)
_ONE_TENANT = _TENANTS.where(_t.name == bindparam("name"))
_KEYS = (
    select(_k.key_id, _k.tenant, _k.adapter, _k.created_at, _k.revoked_at, *_TERM_COLUMNS)
    .join_from(schema.api_keys, schema.tenants)
    .order_by(_k.created_at, _k.key_id)
)
_KEYS_OF_TENANT = _KEYS.where(_k.tenant == bindparam("tenant"))
_VALID_KEY = _KEYS.add_columns(_k.digest).where(_k.key_id == bindparam("key_id"), _k.revoked_at.is_(None))
_KEY_EXISTS = select(_k.key_id).where(_k.key_id == bindparam("key_id"))


class TenantStore:
    """Tenants and keys in the shared database. journal: the revocation journal of this host. max_stale_s: how long a
    cached key is valid after the last successful `apply_changes`; later, it is read from the database again.

    The constructor raises StoreUnfit if the keys in the database were made with another pepper.
    """

    def __init__(
        self,
        database: Database,
        pepper: Pepper,
        journal: RevocationJournal,
        max_stale_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._journal = journal
        self._max_stale_s = max_stale_s
        self._clock = clock
        self._cache = KeyCache[_StoredKey]()
        self._current_at = clock()
        # Who made the revocations that are not in the database yet.
        self._revokers: dict[str, Actor] = {}
        # An unknown key id is compared with this digest, so that it takes as long as a wrong secret.
        self._no_digest = pepper.digest("")
        self._check_pepper()

    def create_tenant(self, name: str, changes: ShareChanges | None = None) -> Tenant:
        """Creates a tenant whose share is the default with `changes` applied.

        Raises BadRequest for an invalid name or share, and Conflict for a name that is taken.
        """
        share = DEFAULT_SHARE if changes is None else changes.apply(DEFAULT_SHARE)
        tenant = Tenant(check_name(name, "name"), int(time.time()), share)
        with self._database.transaction(CHANGES) as connection:
            if connection.execute(_ONE_TENANT, {"name": name}).first() is not None:
                raise Conflict(f"The tenant `{name}` already exists.")
            row = {"name": tenant.name, "created_at": tenant.created_at, **_share_row(share)}
            connection.execute(insert(schema.tenants), row)
            _check_floors(connection, share)
            record_change(connection, "tenant.create", name, details=_share_row(share))
        return tenant

    def change_share(
        self,
        name: str,
        changes: ShareChanges,
        check: Callable[[TenantShare, Tenant], None] = lambda before, tenant: None,
    ) -> Tenant:
        """Changes a tenant's share from its next request on.

        check: called with the old share and the changed tenant. If it raises, the share stays as it is.

        Raises NotFound, or BadRequest naming the field.
        """
        with self._database.transaction(CHANGES) as connection:
            before = _find_tenant(connection.execute(_ONE_TENANT, {"name": name}).fetchall(), name)
            tenant = replace(before, share=changes.apply(before.share))
            check(before.share, tenant)
            connection.execute(
                update(schema.tenants).where(_t.name == name).values(**_share_row(tenant.share))
            )
            _check_floors(connection, tenant.share)
            # The engine's pins carry the share of their tenant.
            publish(connection, Change(name, moved_pin=True))
            record_change(connection, "tenant.change", name, details=_differences(before.share, tenant.share))
        self._cache.drop_tenant(name)
        return tenant

    def suspend(self, name: str) -> Tenant:
        """Refuses the tenant's requests and pushes from now on, in every process within a second. Its pins end until it
        is resumed. Suspending it again is a no-op. Raises NotFound.
        """
        return self._set_status("tenant.suspend", name, TenantStatus.SUSPENDED)

    def resume(self, name: str) -> Tenant:
        """Serves a suspended tenant again. Resuming an active tenant is a no-op. Raises NotFound."""
        return self._set_status("tenant.resume", name, TenantStatus.ACTIVE)

    def _set_status(self, action: str, name: str, status: TenantStatus) -> Tenant:
        with self._database.transaction(CHANGES) as connection:
            before = _find_tenant(connection.execute(_ONE_TENANT, {"name": name}).fetchall(), name)
            if before.status is status:
                return before
            connection.execute(update(schema.tenants).where(_t.name == name).values(status=status))
            # The engine has no pins of a suspended tenant.
            publish(connection, Change(name, moved_pin=True))
            record_change(connection, action, name)
        self._cache.drop_tenant(name)
        return replace(before, status=status)

    def find_tenant(self, name: str) -> Tenant:
        """Raises NotFound."""
        return _find_tenant(self._database.read(_ONE_TENANT, {"name": name}), name)

    def list_tenants(self) -> Sequence[Tenant]:
        return [_read_tenant(row) for row in self._database.read(_TENANTS)]

    def create_key(self, tenant: str, adapter: str | None = None) -> tuple[KeyRecord, NewKey]:
        """Creates a key. Only the second value contains the secret. Raises NotFound or BadRequest."""
        if adapter is not None:
            _check_reference(adapter)
        share = self.find_tenant(tenant).share
        key = make_key()
        record = KeyRecord(key.key_id, tenant, adapter, int(time.time()), None, share)
        self._insert("key.create", record, key.secret)
        return record, key

    def import_key(self, tenant: str, adapter: str | None, secret: str) -> KeyRecord:
        """Makes a key valid that was generated earlier. A key that the database has already stays as it is, even if it
        is revoked.

        Raises NotFound for an unknown tenant, and BadRequest for a text that is not a key.
        """
        key_id = read_key_id(secret)
        if key_id is None:
            raise BadRequest("The text is not an API key of slora.")
        share = self.find_tenant(tenant).share
        record = KeyRecord(key_id, tenant, adapter, int(time.time()), None, share)
        self._insert("key.import", record, secret)
        return record

    def list_keys(self, tenant: str) -> Sequence[KeyRecord]:
        """Raises NotFound for an unknown tenant."""
        self.find_tenant(tenant)
        rows = self._database.read(_KEYS_OF_TENANT, {"tenant": tenant})
        return [self._with_pending(_make_record(row)) for row in rows]

    def revoke_key(self, key_id: str) -> None:
        """Revokes a key at once. Revoking it again is a no-op.

        Raises NotFound. Raises TryAgain if neither the database nor the journal could be written. The revocation then
        applies in this process only, which keeps trying to write it. A restart before that would lose it. Also raises
        TryAgain if a database that several hosts share could not be written. The revocation then applies on this host,
        and on others as soon as the database answers again.
        """
        if not self._database.read(_KEY_EXISTS, {"key_id": key_id}):
            raise NotFound(f"There is no key `{key_id[:64]}`.")
        self._revokers[key_id] = current_actor()
        is_kept = self._journal.add(key_id)
        self._cache.drop(key_id)
        try:
            self._write_revocations((key_id,))
        except StoreUnavailable as error:
            logger.error(
                "key %s is revoked, but the revocation is not in the database yet: %s", key_id, error
            )
            if not is_kept:
                raise TryAgain(
                    f"key {key_id} is revoked in this process, but the revocation could not be "
                    f"written ({error}). A restart would make the key valid again, so revoke it again "
                    "later."
                ) from error
            if self._database.path is None:
                raise TryAgain(
                    f"key {key_id} is revoked on this host, but other hosts accept it until the "
                    "database answers again"
                ) from error

    def write_pending_revocations(self) -> None:
        """Writes the journal's entries to the database. Raises StoreUnavailable."""
        if pending := self._journal.pending():
            self._write_revocations(sorted(pending))
            logger.info("%d pending revocations were written to the database", len(pending))

    def _write_revocations(self, key_ids: Sequence[str]) -> None:
        try:
            self._mark_revoked(key_ids)
        except DiskFull:
            if not self._database.free_reserve():
                raise
            self._mark_revoked(key_ids)
        self._journal.remove(key_ids)
        for key_id in key_ids:
            self._revokers.pop(key_id, None)

    def _mark_revoked(self, key_ids: Sequence[str]) -> None:
        with self._database.transaction(CHANGES, even_if_full=True) as connection:
            for key_id in key_ids:
                revoked = (
                    update(schema.api_keys)
                    .where(_k.key_id == key_id, _k.revoked_at.is_(None))
                    .values(revoked_at=int(time.time()))
                    .returning(_k.tenant)
                )
                for (tenant,) in connection.execute(revoked).fetchall():
                    publish(connection, Change(tenant, key_id=key_id))
                    record_change(connection, "key.revoke", tenant, key_id, actor=self._revokers.get(key_id))
        for key_id in key_ids:
            self._cache.drop(key_id)

    def authenticate(self, secret: str) -> KeyRecord | None:
        """Returns the record of the key `secret` if it is well-formed, known and not revoked, else None. Raises
        StoreUnavailable if the key is not cached, or for too long, and the database does not answer.
        """
        key_id = read_key_id(secret)
        found = None if key_id is None or key_id in self._journal else self._find_key(key_id)
        matches = self._pepper.matches(secret, self._no_digest if found is None else found.digest)
        return found.record if found is not None and matches else None

    def is_lookup_local(self, secret: str) -> bool:
        """Returns whether `authenticate` answers within microseconds, so that an event loop may call it."""
        key_id = read_key_id(secret)
        return key_id is None or (self._is_current() and self._cache.get(key_id) is not None)

    def apply_changes(self, changes: Changes) -> None:
        """Drops from the cache what has changed. changes: what was just read from the feed."""
        if changes.resync:
            self._cache.clear()
        for change in changes.changes:
            if change.key_id:
                self._cache.drop(change.key_id)
            elif not change.name:
                self._cache.drop_tenant(change.tenant)
        self._current_at = self._clock()

    def _find_key(self, key_id: str) -> _StoredKey | None:
        found = self._cache.get(key_id) if self._is_current() else None
        return self._cache.look_up(key_id, lambda: self._read_key(key_id)) if found is None else found

    def _read_key(self, key_id: str) -> _StoredKey | None:
        rows = self._database.read(_VALID_KEY, {"key_id": key_id})
        return _StoredKey(_make_record(rows[0][:-1]), bytes(rows[0][-1])) if rows else None

    def _is_current(self) -> bool:
        return self._clock() - self._current_at <= self._max_stale_s

    def _check_pepper(self) -> None:
        query = select(schema.platform.c.pepper_check)
        check = self._no_digest
        ((stored,),) = self._database.read(query)
        if stored is None:
            with self._database.transaction(CHANGES) as connection:
                first = update(schema.platform).where(schema.platform.c.pepper_check.is_(None))
                connection.execute(first.values(pepper_check=check))
            ((stored,),) = self._database.read(query)
        if not self._pepper.matches("", bytes(stored)):
            raise StoreUnfit(
                "the API keys in the database were made with another pepper, so this server would refuse all of "
                "them: copy the file `pepper` from the data directory of a server that uses the database"
            )

    def _with_pending(self, record: KeyRecord) -> KeyRecord:
        """Marks a key as revoked if only the journal has its revocation. The journal has no times, so the current time
        is used.
        """
        if record.revoked_at is None and record.key_id in self._journal:
            return replace(record, revoked_at=int(time.time()))
        return record

    def _insert(self, action: str, record: KeyRecord, secret: str) -> None:
        row = {
            "key_id": record.key_id,
            "tenant": record.tenant,
            "digest": self._pepper.digest(secret),
            "adapter": record.adapter,
            "created_at": record.created_at,
        }
        with self._database.transaction(CHANGES) as connection:
            if connection.execute(_KEY_EXISTS, {"key_id": record.key_id}).first() is None:
                connection.execute(insert(schema.api_keys), row)
                details = {"adapter": record.adapter}
                record_change(connection, action, record.tenant, record.key_id, details)


def _read_tenant(row: Sequence[Any]) -> Tenant:
    name, created_at, status, *share = row
    return Tenant(name, created_at, TenantShare(*share), TenantStatus(status))


def _find_tenant(rows: Sequence[Sequence[Any]], name: str) -> Tenant:
    if not rows:
        raise NotFound(f"There is no tenant `{name[:128]}`.")
    return _read_tenant(rows[0])


def _make_record(row: Sequence[Any]) -> KeyRecord:
    key_id, tenant, adapter, created_at, revoked_at, status, *share = row
    return KeyRecord(
        key_id, tenant, adapter, created_at, revoked_at, TenantShare(*share), TenantStatus(status)
    )


def _differences(before: TenantShare, after: TenantShare) -> dict[str, list[float]]:
    """Returns the old and the new value of each part of a share that differs."""
    old, new = _share_row(before), _share_row(after)
    return {name: [old[name], new[name]] for name in old if old[name] != new[name]}


def _share_row(share: TenantShare) -> dict[str, float]:
    return {
        "weight": share.weight,
        "min_pool_share": share.min_share,
        "max_pool_share": share.max_share,
        "priority": share.priority,
    }


def _check_floors(connection: Connection, share: TenantShare) -> None:
    """Raises BadRequest if the floors of all tenants exceed the whole pool. share: the share that was just written."""
    floors = [floor for (floor,) in connection.execute(select(_t.min_pool_share))]
    if (total := math.fsum(floors)) > 1 + _SUM_SLACK:
        left = max(0.0, 1 - (total - share.min_share))
        raise BadRequest(
            f"`min_pool_share` is {share.min_share:g}, but the shares of other tenants leave only "
            f"{left:g} of the pool; lower this share, or theirs.",
            "min_pool_share",
        )
