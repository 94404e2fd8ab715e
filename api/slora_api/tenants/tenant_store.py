"""Tenants. A tenant has an id, a name and a share of the engine. While a tenant is suspended, its keys are refused.

The id never changes and is never given to another tenant, so everything that belongs to a tenant is stored under the
id. The name may change, and may be given to another tenant afterwards. `find_named` is the only way from a name to a
tenant.

On the host that changes a share, the new share applies from the next request on. Other hosts apply the new share within
a second, when they read the feed of changes.

Methods block on the database, so an event loop must call them on a thread. This module does not depend on HTTP.
"""

import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import bindparam, delete, insert, or_, select, union_all, update
from sqlalchemy.engine import Connection

from slora.core.request import DEFAULT_SHARE, MAX_PRIORITY, TenantShare
from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.change_feed import Change, publish
from slora_adapters.database.database import CHANGES, Database
from slora_api.core.errors import BadRequest, Conflict, NotFound, PurgeBegun, TenantSuspended
from slora_api.keys.key_record import SHARE_COLUMNS, TenantStatus
from slora_api.keys.key_store import KeyStore

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


# The largest sum of all tenants' `min_pool_share`: the whole pool, plus a tolerance for rounding errors such as in 0.7
# + 0.2 + 0.1.
_MAX_FLOORS = 1 + 1e-9
# Tables whose rows outlive a tenant: the usage ledger, the audit log, and the changes that other processes have yet to
# read.
KEPT_TABLES = (schema.audit_log, schema.changes, schema.usage_records, schema.usage_buckets)
# All other tables with a column `tenant`. A purge deletes the tenant's rows in this order: each table comes before the
# tables that its foreign keys refer to.
OWN_TABLES = tuple(
    table
    for table in reversed(schema.metadata.sorted_tables)
    if "tenant" in table.columns and table not in KEPT_TABLES
)

# With a larger weight, a tenant would use almost the whole engine. With a smaller weight, a tenant would never be
# served.
_LEAST_WEIGHT, _MAX_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its share. created_at: Unix time in seconds."""

    tenant_id: str
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
_TENANTS = select(_t.tenant_id, _t.name, _t.created_at, _t.status, *SHARE_COLUMNS).order_by(_t.name)
_ONE_TENANT = _TENANTS.where(_t.tenant_id == bindparam("tenant"))
# The id of a tenant is never the name of one; see `_make_id`.
_NAMED_TENANT = _TENANTS.where(or_(_t.name == bindparam("name"), _t.tenant_id == bindparam("name")))
_former = schema.former_tenants.c
_FORMER_TENANT = (
    select(_former.tenant_id)
    .where(or_(_former.name == bindparam("name"), _former.tenant_id == bindparam("name")))
    .order_by(_former.purged_at.desc())
    .limit(1)
)
_NAMES = select(_t.tenant_id, _t.name).where(_t.tenant_id.in_(bindparam("tenants", expanding=True)))
_ALL_NAMES = union_all(
    _NAMES,
    select(_former.tenant_id, _former.name).where(
        _former.tenant_id.in_(bindparam("tenants", expanding=True))
    ),
)


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
        tenant = Tenant(_make_id(), check_name(name, "name"), int(time.time()), share)
        with self._database.transaction(CHANGES) as connection:
            _check_free(connection, name)
            row = {"tenant_id": tenant.tenant_id, "name": name, "created_at": tenant.created_at}
            connection.execute(insert(schema.tenants), {**row, **_share_row(share)})
            _check_floors(connection, share)
            details = {"name": name, **_share_row(share)}
            record_change(connection, "tenant.create", tenant.tenant_id, details=details)
        return tenant

    def change_share(
        self,
        tenant: str,
        changes: ShareChanges,
        check: Callable[[TenantShare, Tenant], None] = lambda before, tenant: None,
    ) -> Tenant:
        """Changes a tenant's share. The new share applies from the tenant's next request on.

        check: called with the old share and the changed tenant. If it raises, the share stays as it is.

        Raises NotFound, or BadRequest naming the field.
        """
        with self._database.transaction(CHANGES) as connection:
            before = _read_one(connection, tenant)
            changed = replace(before, share=changes.apply(before.share))
            check(before.share, changed)
            _update(connection, tenant, _share_row(changed.share))
            _check_floors(connection, changed.share)
            # The pins that the engine has contain the share of their tenant, so they have to be sent again.
            publish(connection, Change(tenant, moved_pin=True))
            differences = _differences(before.share, changed.share)
            record_change(connection, "tenant.change", tenant, details=differences)
        self._key_store.drop_tenant(tenant)
        return changed

    def suspend(self, tenant: str) -> Tenant:
        """Suspends the tenant: within a second, every process refuses its requests and uploads. Its pins have no effect
        until the tenant is resumed. Suspending a suspended tenant is a no-op. Raises NotFound and PurgeBegun.
        """
        return self._set_status("tenant.suspend", tenant, TenantStatus.SUSPENDED)

    def resume(self, tenant: str) -> Tenant:
        """Serves a suspended tenant again. Resuming an active tenant is a no-op. Raises NotFound and PurgeBegun."""
        return self._set_status("tenant.resume", tenant, TenantStatus.ACTIVE)

    def rename(self, tenant: str, new_name: str) -> Tenant:
        """Renames the tenant. The old name is free afterwards.

        Raises BadRequest for an invalid name, Conflict for a name that is taken, NotFound and PurgeBegun.
        """
        check_name(new_name, "name")
        with self._database.transaction(CHANGES) as connection:
            before = _read_one(connection, tenant)
            if before.status is TenantStatus.PURGING:
                raise PurgeBegun(before.name)
            _check_free(connection, new_name)
            _update(connection, tenant, {"name": new_name})
            publish(connection, Change(tenant))
            record_change(connection, "tenant.rename", tenant, details={"name": [before.name, new_name]})
        self._key_store.drop_tenant(tenant)
        return replace(before, name=new_name)

    def begin_purge(self, tenant: str) -> None:
        """Marks the tenant as being purged, so that its keys are refused from now on. Ends its batches and the uploads
        of files in progress, so that no blob is added from now on. Repeating the call is a no-op. Raises NotFound.
        """
        self._set_status("tenant.purge", tenant, TenantStatus.PURGING)
        with self._database.transaction(even_if_full=True) as connection:
            for table in (schema.batches, schema.files):
                connection.execute(delete(table).where(table.c.tenant == tenant))

    def finish_purge(self, tenant: str, details: Mapping[str, Any]) -> Mapping[str, int]:
        """Deletes a tenant whose purge has begun, with its keys, names and settings, in one transaction. Its name is
        free afterwards. Returns the number of deleted rows by table.

        details: what the purge has deleted so far, for the audit log. Raises NotFound.
        """
        with self._database.transaction(CHANGES, even_if_full=True) as connection:
            before = _read_one(connection, tenant)
            if before.status is not TenantStatus.PURGING:
                raise NotFound(f"There is no purge of the tenant `{before.name}`.")
            counts = {
                table.name: connection.execute(delete(table).where(table.c.tenant == tenant)).rowcount
                for table in OWN_TABLES
            }
            connection.execute(delete(schema.tenants).where(_t.tenant_id == tenant))
            former = {"tenant_id": tenant, "name": before.name, "purged_at": int(time.time())}
            connection.execute(insert(schema.former_tenants), former)
            publish(connection, Change(tenant, moved_pin=True, purged=True))
            record_change(connection, "tenant.purged", tenant, details={**details, **counts})
        self._key_store.drop_tenant(tenant)
        return counts

    def _set_status(self, action: str, tenant: str, status: TenantStatus) -> Tenant:
        is_urgent = status is not TenantStatus.ACTIVE
        with self._database.transaction(CHANGES, even_if_full=is_urgent) as connection:
            before = _read_one(connection, tenant)
            if before.status is status:
                return before
            if before.status is TenantStatus.PURGING:
                raise PurgeBegun(before.name)
            _update(connection, tenant, {"status": status})
            # The engine must not have pins of a suspended tenant, so the pins have to be sent again.
            publish(connection, Change(tenant, moved_pin=True, purged=status is TenantStatus.PURGING))
            record_change(connection, action, tenant)
        self._key_store.drop_tenant(tenant)
        return replace(before, status=status)

    def find_tenant(self, tenant: str) -> Tenant:
        """Returns the tenant with this id. Raises NotFound."""
        return _find_tenant(self._database.read(_ONE_TENANT, {"tenant": tenant}), tenant)

    def find_named(self, name: str) -> Tenant:
        """Returns the tenant that has this name, or this id, at present. Raises NotFound."""
        return _find_tenant(self._database.read(_NAMED_TENANT, {"name": name}), name)

    def find_names(self, tenants: Collection[str], *, include_former: bool = False) -> Mapping[str, str]:
        """Returns the names of the tenants with these ids. Unknown ids are missing from the result.

        include_former: also return the last names of purged tenants. Another tenant may have such a name by now.
        """
        query = _ALL_NAMES if include_former else _NAMES
        return {tenant: name for tenant, name in self._database.read(query, {"tenants": list(tenants)})}

    def find_id(self, name: str) -> str:
        """Returns the id of the tenant that has this name or id. If there is no such tenant, returns the id of the
        tenant that was purged last under this name or id. Raises NotFound.
        """
        rows = self._database.read(_NAMED_TENANT, {"name": name}) or self._database.read(
            _FORMER_TENANT, {"name": name}
        )
        if not rows:
            raise NotFound.of_tenant(name)
        return str(rows[0][0])

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


def _make_id() -> str:
    """Returns a new id. It contains a capital letter, so that it is never a valid name."""
    return f"T{secrets.token_hex(8)}"


def _read_tenant(row: Sequence[Any]) -> Tenant:
    tenant_id, name, created_at, status, *share = row
    return Tenant(tenant_id, name, created_at, TenantShare(*share), TenantStatus(status))


def _read_one(connection: Connection, tenant: str) -> Tenant:
    return _find_tenant(connection.execute(_ONE_TENANT, {"tenant": tenant}).fetchall(), tenant)


def _update(connection: Connection, tenant: str, values: Mapping[str, Any]) -> None:
    connection.execute(update(schema.tenants).where(_t.tenant_id == tenant).values(**values))


def _check_free(connection: Connection, name: str) -> None:
    """Raises Conflict if a tenant has this name."""
    if connection.execute(_NAMED_TENANT, {"name": name}).first() is not None:
        raise Conflict(f"The tenant `{name}` already exists.")


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
    if (total := math.fsum(floors)) > _MAX_FLOORS:
        left = max(0.0, 1 - (total - share.min_share))
        raise BadRequest(
            f"`min_pool_share` is {share.min_share:g}, but the shares of other tenants leave only "
            f"{left:g} of the pool; lower this share, or theirs.",
            "min_pool_share",
        )
