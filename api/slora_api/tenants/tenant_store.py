"""Tenants. A tenant is a name with a share of the engine. While a tenant is suspended, its keys are refused.

On the host that changes a share, the new share applies from the next request on. Other hosts apply the new share within
a second, when they read the feed of changes.

Methods block on the database, so an event loop must call them on a thread. This module does not depend on HTTP.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.engine import Connection

from slora.request import MAX_PRIORITY
from slora.tenant_share import DEFAULT_SHARE, TenantShare
from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.change_feed import Change, publish
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.database.tenant_rows import MAX_FLOORS, delete_tenant_rows, rename_tenant_rows
from slora_adapters.version import AdapterVersion
from slora_api.errors import BadRequest, Conflict, NotFound, PurgeBegun, TenantSuspended
from slora_api.tenants.key_rows import TERM_COLUMNS
from slora_api.tenants.key_store import KeyStore
from slora_api.tenants.tenant_status import TenantStatus

__all__ = ["ShareChanges", "Tenant", "TenantStore", "check_name"]

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


# With a larger weight, a tenant would use almost the whole engine. With a smaller weight, a tenant would never be
# served.
_LEAST_WEIGHT, _MAX_WEIGHT = 0.001, 1000.0


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
    """Changes to a tenant's share. A field that is None keeps its value. The fields have the names that they have in
    the operator's API.

    min_pool_share, max_pool_share: fractions of the pool's pages; they change `min_share` and `max_share` of a
    TenantShare.
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


_t = schema.tenants.c
_TENANTS = select(_t.name, _t.created_at, *TERM_COLUMNS).order_by(_t.name)
_DIGESTS = (
    select(schema.adapter_versions.c.digest)
    .where(schema.adapter_versions.c.tenant == bindparam("name"))
    .distinct()
)
_UNPURGED = select(_t.name).where(
    _t.name.in_(bindparam("names", expanding=True)), _t.status != bindparam("purging")
)
_ONE_TENANT = _TENANTS.where(_t.name == bindparam("name"))


class TenantStore:
    """Tenants in the shared database. key_store: the store of keys, which caches each key with its tenant's share."""

    def __init__(self, database: Database, key_store: KeyStore) -> None:
        self._database = database
        self._key_store = key_store

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
        """Changes a tenant's share. The new share applies from the tenant's next request on.

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
            # The pins that the engine has contain the share of their tenant, so they have to be sent again.
            publish(connection, Change(name, moved_pin=True))
            record_change(connection, "tenant.change", name, details=_differences(before.share, tenant.share))
        self._key_store.drop_tenant(name)
        return tenant

    def suspend(self, name: str) -> Tenant:
        """Suspends the tenant: within a second, every process refuses its requests and uploads. Its pins have no effect
        until the tenant is resumed. Suspending a suspended tenant is a no-op. Raises NotFound and PurgeBegun.
        """
        return self._set_status("tenant.suspend", name, TenantStatus.SUSPENDED)

    def resume(self, name: str) -> Tenant:
        """Serves a suspended tenant again. Resuming an active tenant is a no-op. Raises NotFound and PurgeBegun."""
        return self._set_status("tenant.resume", name, TenantStatus.ACTIVE)

    def rename(self, name: str, new_name: str) -> Tenant:
        """Renames the tenant in all its rows. The old name is free afterwards. Earlier entries of the audit log keep
        the old name.

        Raises BadRequest for an invalid name, Conflict for a name that is taken, NotFound and PurgeBegun.
        """
        check_name(new_name, "name")
        with self._database.transaction(CHANGES) as connection:
            before = _find_tenant(connection.execute(_ONE_TENANT, {"name": name}).fetchall(), name)
            if before.status is TenantStatus.PURGING:
                raise PurgeBegun(name)
            if connection.execute(_ONE_TENANT, {"name": new_name}).first() is not None:
                raise Conflict(f"The tenant `{new_name}` already exists.")
            digests = connection.execute(_DIGESTS, {"name": name}).scalars()
            orphaned = tuple(AdapterVersion(name, digest) for digest in digests)
            rename_tenant_rows(connection, name, new_name)
            publish(connection, Change(name, orphaned=orphaned, moved_pin=True))
            publish(connection, Change(new_name))
            record_change(connection, "tenant.rename", new_name, details={"name": [name, new_name]})
        for changed in (name, new_name):
            self._key_store.drop_tenant(changed)
        return replace(before, name=new_name)

    def begin_purge(self, name: str) -> None:
        """Marks the tenant as being purged, so that its keys are refused from now on. Repeating the call is a no-op.
        Raises NotFound.
        """
        self._set_status("tenant.purge", name, TenantStatus.PURGING)

    def finish_purge(self, name: str, details: Mapping[str, Any]) -> Mapping[str, int]:
        """Deletes a tenant whose purge has begun, with its keys, names and settings, in one transaction. Its name is
        free afterwards. Returns the number of deleted rows by table.

        details: what the purge has deleted so far, for the audit log. Raises NotFound.
        """
        with self._database.transaction(CHANGES, even_if_full=True) as connection:
            tenant = _find_tenant(connection.execute(_ONE_TENANT, {"name": name}).fetchall(), name)
            if tenant.status is not TenantStatus.PURGING:
                # Another process has finished the purge, and a new tenant already has this name.
                raise NotFound(f"There is no purge of the tenant `{name}`.")
            counts = delete_tenant_rows(connection, name)
            publish(connection, Change(name, moved_pin=True, purged=True))
            record_change(connection, "tenant.purged", name, details={**details, **counts})
        self._key_store.drop_tenant(name)
        return counts

    def _set_status(self, action: str, name: str, status: TenantStatus) -> Tenant:
        with self._database.transaction(CHANGES) as connection:
            before = _find_tenant(connection.execute(_ONE_TENANT, {"name": name}).fetchall(), name)
            if before.status is status:
                return before
            if before.status is TenantStatus.PURGING:
                raise PurgeBegun(name)
            connection.execute(update(schema.tenants).where(_t.name == name).values(status=status))
            # The engine must not have pins of a suspended tenant, so the pins have to be sent again.
            publish(connection, Change(name, moved_pin=True, purged=status is TenantStatus.PURGING))
            record_change(connection, action, name)
        self._key_store.drop_tenant(name)
        return replace(before, status=status)

    def find_tenant(self, name: str) -> Tenant:
        """Returns the tenant. Raises NotFound."""
        return _find_tenant(self._database.read(_ONE_TENANT, {"name": name}), name)

    def find_served(self, names: Collection[str]) -> set[str]:
        """Returns the subset of `names` that belong to tenants whose purge has not begun."""
        rows = self._database.read(_UNPURGED, {"names": list(names), "purging": TenantStatus.PURGING})
        return {name for (name,) in rows}

    def list_tenants(
        self,
        *,
        contains: str | None = None,
        names: Collection[str] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> Sequence[Tenant]:
        """Lists tenants, sorted by name.

        contains: a part of the name, in upper or lower case. names: list only these tenants. limit: None lists all.
        after: the last name of the previous page.
        """
        wanted = _TENANTS
        if contains is not None:
            wanted = wanted.where(_t.name.contains(contains.lower(), autoescape=True))
        if names is not None:
            wanted = wanted.where(_t.name.in_(names))
        if after is not None:
            wanted = wanted.where(_t.name > after)
        return [_read_tenant(row) for row in self._database.read(wanted.limit(limit))]


def _read_tenant(row: Sequence[Any]) -> Tenant:
    name, created_at, status, *share = row
    return Tenant(name, created_at, TenantShare(*share), TenantStatus(status))


def _find_tenant(rows: Sequence[Sequence[Any]], name: str) -> Tenant:
    if not rows:
        raise NotFound.of_tenant(name)
    return _read_tenant(rows[0])


def _differences(before: TenantShare, after: TenantShare) -> dict[str, list[float]]:
    """Returns the old and the new value of each changed field of a share."""
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
    """Raises BadRequest if the pool shares guaranteed to all tenants together exceed the pool. share: the share that
    was just written.
    """
    floors = [floor for (floor,) in connection.execute(select(_t.min_pool_share))]
    if (total := math.fsum(floors)) > MAX_FLOORS:
        left = max(0.0, 1 - (total - share.min_share))
        raise BadRequest(
            f"`min_pool_share` is {share.min_share:g}, but the shares of other tenants leave only "
            f"{left:g} of the pool; lower this share, or theirs.",
            "min_pool_share",
        )
