"""The quotas of tenants and keys in the shared database.

Each process caches the quotas of the keys that it has seen. In the process that makes a change, the change applies from
the next request on. Other processes apply the change within a second, when they read the feed of changes.

Methods block on the database, so an event loop must call them on a thread; see also `find_cached`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, delete, insert, select

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.change_feed import Change, Changes, publish
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.peft.adapter import CheckedAdapter
from slora_adapters.registry.record import ExtrasSummary, StorageUsage
from slora_api.core.errors import NotFound, QuotaExceeded
from slora_api.keys.key_store import KeyCache
from slora_api.quotas.quota import NO_QUOTA, QUOTA_FIELDS, Quota
from slora_api.quotas.quota_counters import Subject

_q = schema.quotas.c
_QUOTA = select(*(_q[name] for name in QUOTA_FIELDS)).where(
    _q.tenant == bindparam("tenant"), _q.key_id == bindparam("key_id")
)
_QUOTAS_OF_KEY = select(_q.key_id, *(_q[name] for name in QUOTA_FIELDS)).where(
    _q.tenant == bindparam("tenant"), _q.key_id.in_(("", bindparam("key_id")))
)
_TENANT_EXISTS = select(schema.tenants.c.name).where(schema.tenants.c.tenant_id == bindparam("tenant"))
_KEY_OWNER = select(schema.api_keys.c.tenant).where(schema.api_keys.c.key_id == bindparam("key_id"))


@dataclass(frozen=True, slots=True)
class KeyQuotas:
    """The quotas that limit the requests of one key. subjects: the tenant and the key, each only if its quota limits
    requests.
    """

    tenant: str
    subjects: tuple[Subject, ...]


class QuotaStore:
    """The quotas of all tenants and keys. It may be used by several threads. Methods raise StoreUnavailable.

    default: the default limits, which apply to tenants whose quota does not set them.
    """

    def __init__(self, database: Database, default: Quota) -> None:
        self._database = database
        self._default = default
        self._cache = KeyCache[KeyQuotas](lambda quotas: quotas.tenant, is_behind=database.is_behind)

    def find_cached(self, key_id: str) -> KeyQuotas | None:
        """Returns the quotas of a key if they are cached. Does not block."""
        return self._cache.get(key_id)

    def find(self, tenant: str, key_id: str) -> KeyQuotas:
        """Returns the quotas of a key, from the cache or else from the database."""
        found = self._cache.get(key_id) or self._cache.look_up(key_id, lambda: self._read(tenant, key_id))
        assert found is not None
        return found

    def find_tenant_quota(self, tenant: str) -> Quota:
        """Returns the limits that apply to a tenant, without using the cache. Raises NotFound."""
        if not self._database.read(_TENANT_EXISTS, {"tenant": tenant}):
            raise NotFound.of_tenant(tenant)
        return self._read_quota(tenant, "").or_default(self._default)

    def find_key_subject(self, key_id: str) -> Subject:
        """Returns a key with its quota, without using the cache. Raises NotFound."""
        rows = self._database.read(_KEY_OWNER, {"key_id": key_id})
        if not rows or rows[0][0] is None:
            raise NotFound.of_key(key_id)
        tenant = str(rows[0][0])
        return Subject(tenant, key_id, self._read_quota(tenant, key_id))

    def change_tenant_quota(
        self, tenant: str, changes: Mapping[str, int | None], check: Callable[[], None] = lambda: None
    ) -> None:
        """Changes the quota of a tenant. None removes a limit.

        check: called in the transaction, after the values were checked. If it raises, the quota stays as it is.

        Raises NotFound, or BadRequest naming the field.
        """
        self._change(tenant, "", changes, check)

    def change_key_quota(self, key_id: str, changes: Mapping[str, int | None]) -> None:
        """Changes the quota of a key. None removes a limit. Raises NotFound, or BadRequest naming the field."""
        self._change(self.find_key_subject(key_id).tenant, key_id, changes, lambda: None)

    def apply_changes(self, changes: Changes) -> None:
        """Drops changed entries from the cache. changes: the changes that were just read from the feed."""
        self._cache.apply_changes(changes)

    def _read(self, tenant: str, key_id: str) -> KeyQuotas:
        rows = self._database.read(_QUOTAS_OF_KEY, {"tenant": tenant, "key_id": key_id})
        quotas = {owner: Quota(*limits) for owner, *limits in rows}
        subjects = (
            Subject(tenant, "", quotas.get("", NO_QUOTA).or_default(self._default)),
            Subject(tenant, key_id, quotas.get(key_id, NO_QUOTA)),
        )
        return KeyQuotas(tenant, tuple(subject for subject in subjects if subject.quota.limits_requests))

    def _read_quota(self, tenant: str, key_id: str) -> Quota:
        rows = self._database.read(_QUOTA, {"tenant": tenant, "key_id": key_id})
        return Quota(*rows[0]) if rows else NO_QUOTA

    def _change(
        self, tenant: str, key_id: str, changes: Mapping[str, int | None], check: Callable[[], None]
    ) -> None:
        names: dict[str, Any] = {"tenant": tenant, "key_id": key_id}
        with self._database.transaction(CHANGES) as connection:
            if connection.execute(_TENANT_EXISTS, {"tenant": tenant}).first() is None:
                raise NotFound.of_tenant(tenant)
            row = connection.execute(_QUOTA, names).first()
            quota = (Quota(*row) if row else NO_QUOTA).changed(changes, of_key=bool(key_id))
            check()
            connection.execute(delete(schema.quotas).where(_q.tenant == tenant, _q.key_id == key_id))
            if quota != NO_QUOTA:
                connection.execute(insert(schema.quotas), names | quota.to_json())
            publish(connection, Change(tenant, key_id=key_id))
            record_change(connection, "quota.change", tenant, key_id, details=changes)
        if key_id:
            self._cache.drop(key_id)
        else:
            self._cache.drop_tenant(tenant)


class AdapterQuota:
    """Checks new adapter versions against the quota of their tenant: the number of versions, and the bytes stored for
    all of them. count_refusal: called at each refusal, with the field of the exceeded limit."""

    def __init__(self, quota_store: QuotaStore, count_refusal: Callable[[str], None]) -> None:
        self._quota_store = quota_store
        self._count_refusal = count_refusal

    def check(self, tenant: str, usage: StorageUsage, name: str, adapter: CheckedAdapter) -> None:
        """Raises QuotaExceeded if a tenant with this usage may not have `adapter` as a new version of `name`.

        The quota is read from the database. Call this inside the transaction that creates the version. The check then
        takes into account a quota that another request lowers at the same time.
        """
        quota = self._quota_store.find_tenant_quota(tenant)
        if quota.adapter_versions is not None and usage.num_versions >= quota.adapter_versions:
            self._count_refusal("adapter_versions")
            raise QuotaExceeded(
                f"Your tenant has {usage.num_versions} adapter versions, and the limit is "
                f"{quota.adapter_versions} (adapter_versions); remove one first."
            )
        # Weights that another of the tenant's adapter versions already uses are not stored again.
        added = max(0, adapter.blob_bytes - (usage.weights_bytes or 0))
        added += ExtrasSummary.of(adapter.extras).num_bytes
        wanted = usage.num_bytes + added
        if quota.stored_bytes is not None and wanted > quota.stored_bytes:
            self._count_refusal("stored_bytes")
            raise QuotaExceeded(
                f"With the {added} bytes of `{name}`, your adapters would take {wanted} bytes, "
                f"including chat templates and generation configs. The limit is {quota.stored_bytes} "
                "(stored_bytes). Remove others first."
            )


def check_stored(changes: Mapping[str, int | None], tenant: str, usage: StorageUsage) -> None:
    """Raises QuotaExceeded if the tenant already stores more than the changed limits allow."""
    for name, used, unit in (
        ("adapter_versions", usage.num_versions, "adapter versions"),
        ("stored_bytes", usage.num_bytes, "stored bytes"),
    ):
        limit = changes.get(name)
        if limit is not None and used > limit:
            raise QuotaExceeded(
                f"`{name}` would be {limit}, but the tenant `{tenant}` has {used} {unit}. Delete some of its "
                f"adapters first, or set at least {used}.",
                name,
            )
