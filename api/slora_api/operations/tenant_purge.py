"""POST /admin/tenants/{tenant}/purge: purges a tenant from the database, the stores and the
engines. A purge deletes the tenant with everything that it has:

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
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora.client.client import EngineClient
from slora.core.engine_state import TenantPurge as EnginePurge
from slora.core.errors import EngineUnavailable
from slora_adapters.errors import DiskFull
from slora_adapters.registry.registry import PurgedBlobs, StoredAdapters
from slora_api.core.errors import BadRequest, NotFound
from slora_api.core.threads import HOUSEKEEPING, control_thread, tenant_thread
from slora_api.http.field_types import STRICT
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.tenants.named_tenant import NamedTenant
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


class TenantPurges:
    """Purges tenants. Runs on one event loop."""

    def __init__(
        self, tenant_store: TenantStore, ledger: UsageLedger, adapters: StoredAdapters, client: EngineClient
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


router = APIRouter(prefix="/admin", tags=["operator"])


class PurgeRequest(BaseModel):
    """POST /admin/tenants/{tenant}/purge. confirm: the name of the tenant. ledger: whether the tenant's usage is kept
    or erased.
    """

    model_config = STRICT
    confirm: str
    ledger: Literal["keep", "erase"]


class PurgeObject(TypedDict):
    """What a purge deleted. blobs: how many stored weights were deleted. blobs_kept: how many stored weights were kept,
    because other tenants or other databases may still use them. requests: how many requests the engine of this host
    ended. pool_pages: how many pages this engine overwrote. usage_records: null if the usage was kept.
    """

    object: Literal["tenant.purge"]
    tenant: str
    tenant_id: str
    keys: int
    adapters: int
    versions: int
    blobs: int
    blob_bytes: int
    blobs_kept: int
    requests: int
    pool_pages: int
    pool_bytes: int
    usage_records: int | None


@router.post("/tenants/{tenant}/purge", responses=errors(NotFound, DiskFull))
async def purge_tenant(
    tenant: NamedTenant, body: PurgeRequest, _operator: Operator, purges: Wired[TenantPurges]
) -> PurgeObject:
    """Deletes a tenant with everything that it has. Other hosts end its requests within a second. If a purge is
    interrupted, repeat the request to complete the purge.
    """
    if body.confirm != tenant.name:
        raise BadRequest(
            f"`confirm` is {body.confirm[:140]!r}; repeat the name of the tenant to purge, {tenant.name!r}.",
            "confirm",
        )
    report = await purges.purge(tenant.tenant_id, erase_usage=body.ledger == "erase")
    return {
        "object": "tenant.purge",
        "tenant": tenant.name,
        "tenant_id": tenant.tenant_id,
        "keys": report.num_keys,
        "adapters": report.num_names,
        "versions": report.num_versions,
        "blobs": report.blobs.num_deleted,
        "blob_bytes": report.blobs.num_bytes,
        "blobs_kept": report.blobs.num_kept,
        "requests": report.num_requests,
        "pool_pages": report.num_pages,
        "pool_bytes": report.num_page_bytes,
        "usage_records": report.num_usage_records,
    }
