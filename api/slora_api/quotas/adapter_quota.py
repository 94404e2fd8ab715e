"""Checks adapters against the quota of their tenant: the number of versions, and the bytes stored for all versions."""

from collections.abc import Callable, Mapping

from slora_adapters.peft.checked_adapter import CheckedAdapter
from slora_adapters.registry.record import ExtrasSummary, StorageUsage
from slora_api.core.errors import QuotaExceeded
from slora_api.quotas.quota_store import QuotaStore


class AdapterQuota:
    """Checks new adapter versions. refused: called at each refusal, with the field of the exceeded limit."""

    def __init__(self, quota_store: QuotaStore, refused: Callable[[str], None]) -> None:
        self._quota_store = quota_store
        self._refused = refused

    def check(self, tenant: str, usage: StorageUsage, name: str, adapter: CheckedAdapter) -> None:
        """Raises QuotaExceeded if a tenant with this usage may not have `adapter` as a new version of `name`.

        The quota is read from the database. Call this inside the transaction that creates the version. The check then
        takes into account a quota that another request lowers at the same time.
        """
        quota = self._quota_store.find_tenant_quota(tenant)
        if quota.adapter_versions is not None and usage.num_versions >= quota.adapter_versions:
            self._refused("adapter_versions")
            raise QuotaExceeded(
                f"Your tenant has {usage.num_versions} adapter versions, and the limit is "
                f"{quota.adapter_versions} (adapter_versions); remove one first."
            )
        # Weights that another of the tenant's adapter versions already uses are not stored again.
        added = max(0, adapter.blob_bytes - (usage.weights_bytes or 0))
        added += ExtrasSummary.of(adapter.extras).num_bytes
        wanted = usage.num_bytes + added
        if quota.stored_bytes is not None and wanted > quota.stored_bytes:
            self._refused("stored_bytes")
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
