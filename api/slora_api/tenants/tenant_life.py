"""Purges tenants from the database, the stores and the engines. A purge deletes a tenant with everything that it has:

| step | afterwards                                                                                               |
|------|----------------------------------------------------------------------------------------------------------|
| 1    | the tenant is marked: within a second, no process admits its requests or uploads; its batches have ended   |
| 2    | the engine of this host has ended the tenant's requests, and has dropped and zeroed the tenant's data    |
| 3    | the store and the warm tier do not have the blobs that only this tenant used                             |
| 4    | the tenant's usage is erased, if the operator wants that                                                 |
| 5    | the database does not have the tenant or its keys, adapter names and settings; the tenant's name is free |

Steps 1 and 5 also tell all processes through the feed of changes. Each process then repeats step 2 in its engine. If a
purge was interrupted, even by a crash, it can be repeated: each step finds
what is left to delete.
"""

from dataclasses import asdict, dataclass

from slora.client.client import EngineClient
from slora.core.engine_state import TenantPurge as EnginePurge
from slora.core.errors import EngineUnavailable
from slora_adapters.registry.catalog import Catalog, PurgedBlobs
from slora_api.core.threads import HOUSEKEEPING, control_thread, tenant_thread
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.usage_ledger import UsageLedger


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """A report of what a purge deleted. The report of a repeated purge includes what earlier attempts deleted, except
    requests, pages and usage.

    num_requests, num_pages: requests that the engine of this host ended, and pages that it zeroed. num_usage_records:
    None if the usage was kept.
    """

    num_keys: int
    num_names: int
    num_versions: int
    blobs: PurgedBlobs
    num_requests: int
    num_pages: int
    num_page_bytes: int
    num_usage_records: int | None


class TenantLife:
    """Purges tenants. Runs on one event loop."""

    def __init__(
        self, tenant_store: TenantStore, ledger: UsageLedger, adapters: Catalog, client: EngineClient
    ) -> None:
        self._tenant_store = tenant_store
        self._ledger = ledger
        self._adapters = adapters
        self._client = client

    async def purge(self, tenant: str, *, erase_usage: bool) -> PurgeReport:
        """Deletes a tenant with everything that it has. Raises NotFound. If a step raises StoreUnavailable, repeat the
        purge to complete it.
        """
        await control_thread(self._tenant_store.begin_purge, tenant)
        freed, page_bytes = await self._purge_engine(tenant)
        blobs = await tenant_thread(HOUSEKEEPING, self._adapters.purge_blobs, tenant)
        erased = await tenant_thread(HOUSEKEEPING, self._ledger.erase, tenant) if erase_usage else None
        details = {"blobs": asdict(blobs), "num_pages": freed.num_pages, "num_usage_records": erased}
        rows = await tenant_thread(HOUSEKEEPING, self._tenant_store.finish_purge, tenant, details)
        return PurgeReport(
            rows["api_keys"],
            rows["adapter_names"],
            rows["adapter_versions"],
            blobs,
            freed.num_requests,
            freed.num_pages,
            freed.num_pages * page_bytes,
            erased,
        )

    async def _purge_engine(self, tenant: str) -> tuple[EnginePurge, int]:
        """Ends the tenant's requests in the engine. Returns what the engine dropped, and the bytes of a page. An engine
        that is not connected counts as empty.
        """
        try:
            return await self._client.purge_tenant(tenant), self._client.info.full_page_bytes
        except EngineUnavailable:
            return EnginePurge(0, 0, 0), 0
