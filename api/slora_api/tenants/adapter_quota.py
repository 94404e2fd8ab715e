"""The quota of one tenant's adapters: the number of versions, and the bytes stored for all of them together."""

from dataclasses import dataclass

from slora_adapters.inspection.checked_adapter import CheckedAdapter
from slora_adapters.registry.adapter_record import ExtrasSummary
from slora_adapters.registry.registry import StorageUsage
from slora_api.errors import QuotaExceeded

__all__ = ["AdapterQuota"]


@dataclass(frozen=True, slots=True)
class AdapterQuota:
    """One quota, which applies to every tenant.

    max_bytes: limit of all stored bytes; see `StorageUsage`.
    """

    max_versions: int
    max_bytes: int

    def check(self, usage: StorageUsage, name: str, adapter: CheckedAdapter) -> None:
        """Raises QuotaExceeded if a tenant with this usage may not have `adapter` as a new version of `name`."""
        if usage.num_versions >= self.max_versions:
            raise QuotaExceeded(
                f"Your tenant has {usage.num_versions} adapter versions, and the limit is "
                f"{self.max_versions} (max_versions_per_tenant); remove one first."
            )
        # Weights that another version of the tenant already has are stored once.
        added = max(0, adapter.blob_bytes - (usage.weights_bytes or 0))
        added += ExtrasSummary.of(adapter.extras).num_bytes
        if (wanted := usage.num_bytes + added) > self.max_bytes:
            raise QuotaExceeded(
                f"With the {added} bytes of `{name}`, your adapters would take {wanted} bytes, "
                f"including chat templates and generation configs. The limit is {self.max_bytes} "
                "(max_adapter_bytes_per_tenant). Remove others first."
            )
