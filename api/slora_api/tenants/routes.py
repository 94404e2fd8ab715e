"""/admin: the operator's routes for tenants and pins."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Query, status
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora.core.errors import EngineUnavailable
from slora_adapters.errors import DiskFull
from slora_adapters.registry.record import Rollout
from slora_adapters.registry.registry import Registry
from slora_api.adapters.adapter_json import AdapterObject, AliasObject, adapter_json, alias_json
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.core.errors import BadRequest, Conflict, NotFound, PinsFull, PurgeBegun
from slora_api.core.listing import DEFAULT_LIMIT, PageObject, list_json
from slora_api.core.threads import control_thread
from slora_api.http.field_types import STRICT, Limit, Name
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.keys.key_record import TenantStatus
from slora_api.tenants.named_tenant import NamedTenant
from slora_api.tenants.tenant_life import TenantLife
from slora_api.tenants.tenant_store import ShareChanges, Tenant, TenantStore

router = APIRouter(prefix="/admin", tags=["operator"])

# A name of a tenant has at most 128 characters.
_NamePart = Annotated[str, Query(max_length=128)]
# None of the three names may contain a slash or an at sign.
_PIN_ID = re.compile("([^/@]+)/([^/@]+)@([^/@]+)")
_Names = Annotated[list[str] | None, Query(max_length=100)]


@dataclass(frozen=True, slots=True)
class TenantServices:
    """What the routes of tenants use."""

    tenant_store: TenantStore
    pinning: Pinning
    tenant_life: TenantLife
    catalog: ModelCatalog
    registry: Registry


class TenantChanges(BaseModel):
    """Changes to a tenant's share. A field that is None keeps its value."""

    model_config = STRICT
    weight: float | None = None
    min_pool_share: float | None = None
    max_pool_share: float | None = None
    priority: int | None = None


class TenantPatch(TenantChanges):
    """PATCH /admin/tenants/{tenant}: changes the share, or renames the tenant. One request cannot do both."""

    name: Name | None = None


class NewTenantRequest(TenantChanges):
    """POST /admin/tenants. Fields of the share that are left out get their defaults."""

    name: Name


class PurgeRequest(BaseModel):
    """POST /admin/tenants/{tenant}/purge. confirm: the name of the tenant. ledger: whether the tenant's usage is kept
    or erased.
    """

    model_config = STRICT
    confirm: str
    ledger: Literal["keep", "erase"]


class TenantObject(TypedDict):
    """A tenant with its share. id: never changes. created: Unix time in seconds."""

    object: Literal["tenant"]
    id: str
    name: str
    created: int
    status: TenantStatus
    weight: float
    min_pool_share: float
    max_pool_share: float
    priority: int


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


class PinObject(AliasObject):
    """A pinned alias of a tenant. id: `tenant_id/name@alias`. tenant: the name of the tenant."""

    id: str
    tenant: str
    tenant_id: str


def _tenant_json(tenant: Tenant) -> TenantObject:
    share = tenant.share
    return {
        "object": "tenant",
        "id": tenant.tenant_id,
        "name": tenant.name,
        "created": tenant.created_at,
        "status": tenant.status,
        "weight": share.weight,
        "min_pool_share": share.min_share,
        "max_pool_share": share.max_share,
        "priority": share.priority,
    }


def _pins_json(services: TenantServices, pins: Sequence[Rollout]) -> list[PinObject]:
    names = services.tenant_store.find_names({pinned.tenant for pinned in pins})
    return [
        {
            "id": f"{pinned.tenant}/{alias['name']}@{alias['alias']}",
            "tenant": names.get(pinned.tenant, pinned.tenant),
            "tenant_id": pinned.tenant,
            **alias,
        }
        for pinned, alias in ((pinned, alias_json(pinned)) for pinned in pins)
    ]


def _read_pin_id(pin_id: str) -> tuple[str, str, str]:
    """Returns the tenant, the name and the alias. Raises BadRequest."""
    match = _PIN_ID.fullmatch(pin_id)
    if match is None:
        raise BadRequest(
            f"`after` is {pin_id[:140]!r}, which is not the id of a pin, such as `T3f0c…/greeter@latest`; send the "
            "`last_id` of the previous page.",
            "after",
        )
    tenant, name, alias = match.groups()
    return tenant, name, alias


def _changes(body: TenantChanges) -> ShareChanges:
    return ShareChanges(body.weight, body.min_pool_share, body.max_pool_share, body.priority)


# The database may wait for a disk, so these functions are not `async`: FastAPI then runs them on a thread.
@router.post("/tenants", status_code=status.HTTP_201_CREATED, responses=errors(Conflict, DiskFull))
def create_tenant(
    body: NewTenantRequest, _operator: Operator, services: Wired[TenantServices]
) -> TenantObject:
    return _tenant_json(services.tenant_store.create_tenant(body.name, _changes(body)))


@router.get("/tenants")
def list_tenants(
    _operator: Operator,
    services: Wired[TenantServices],
    contains: _NamePart | None = None,
    name: _Names = None,
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[TenantObject]:
    """Lists tenants, sorted by name. contains: a part of the name. name: lists only this tenant; may be repeated."""
    found = services.tenant_store.list_tenants(contains=contains, names=name, limit=limit + 1, after=after)
    return list_json([_tenant_json(tenant) for tenant in found], "name", limit)


@router.get("/tenants/{tenant}", responses=errors(NotFound))
def get_tenant(tenant: NamedTenant, _operator: Operator) -> TenantObject:
    return _tenant_json(tenant)


@router.patch(
    "/tenants/{tenant}",
    responses=errors(NotFound, Conflict, PurgeBegun, PinsFull, EngineUnavailable, DiskFull),
)
async def change_tenant(
    tenant: NamedTenant, body: TenantPatch, _operator: Operator, services: Wired[TenantServices]
) -> TenantObject:
    """Changes the share of a tenant or renames the tenant, but not both in one request."""
    if body.name is not None:
        if body.model_fields_set != {"name"}:
            raise BadRequest("`name` was sent with other fields; send a new name alone.", "name")
        renamed = await control_thread(services.tenant_store.rename, tenant.tenant_id, body.name)
        return _tenant_json(renamed)
    return _tenant_json(await services.pinning.change_share(tenant.tenant_id, _changes(body)))


@router.post("/tenants/{tenant}/suspend", responses=errors(NotFound, PurgeBegun, DiskFull))
def suspend_tenant(tenant: NamedTenant, _operator: Operator, services: Wired[TenantServices]) -> TenantObject:
    return _tenant_json(services.tenant_store.suspend(tenant.tenant_id))


@router.post("/tenants/{tenant}/resume", responses=errors(NotFound, PurgeBegun, DiskFull))
def resume_tenant(tenant: NamedTenant, _operator: Operator, services: Wired[TenantServices]) -> TenantObject:
    return _tenant_json(services.tenant_store.resume(tenant.tenant_id))


@router.post("/tenants/{tenant}/purge", responses=errors(NotFound, DiskFull))
async def purge_tenant(
    tenant: NamedTenant, body: PurgeRequest, _operator: Operator, services: Wired[TenantServices]
) -> PurgeObject:
    """Deletes a tenant with everything that it has. Other hosts end its requests within a second. If a purge is
    interrupted, repeat the request to complete the purge.
    """
    if body.confirm != tenant.name:
        raise BadRequest(
            f"`confirm` is {body.confirm[:140]!r}; repeat the name of the tenant to purge, {tenant.name!r}.",
            "confirm",
        )
    report = await services.tenant_life.purge(tenant.tenant_id, erase_usage=body.ledger == "erase")
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


@router.get("/tenants/{tenant}/adapters", responses=errors(NotFound))
def list_tenant_adapters(
    tenant: NamedTenant,
    _operator: Operator,
    services: Wired[TenantServices],
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[AdapterObject]:
    return services.catalog.list_tenant_adapters(tenant.tenant_id, limit, after)


@router.get("/pins")
def list_pins(
    _operator: Operator,
    services: Wired[TenantServices],
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[PinObject]:
    """Lists the pinned aliases of all tenants, sorted by the tenant's id, name and alias."""
    behind = None if after is None else _read_pin_id(after)
    found = services.registry.pinned(limit=limit + 1, after=behind)
    return list_json(_pins_json(services, found), "id", limit)


@router.put(
    "/tenants/{tenant}/adapters/{name}/pin", responses=errors(NotFound, PinsFull, EngineUnavailable, DiskFull)
)
async def pin_adapter(
    tenant: NamedTenant, name: str, _operator: Operator, services: Wired[TenantServices]
) -> AdapterObject:
    return adapter_json(await services.pinning.pin(tenant.tenant_id, name))


@router.delete("/tenants/{tenant}/adapters/{name}/pin", responses=errors(NotFound, DiskFull))
async def unpin_adapter(
    tenant: NamedTenant, name: str, _operator: Operator, services: Wired[TenantServices]
) -> AdapterObject:
    return adapter_json(await services.pinning.unpin(tenant.tenant_id, name))
