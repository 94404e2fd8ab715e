"""/admin/tenants: the operator's routes for tenants and their shares."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Query, status
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora.core.errors import EngineUnavailable
from slora_adapters.errors import DiskFull
from slora_api.core.errors import BadRequest, Conflict, NotFound, PinsFull, PurgeBegun
from slora_api.core.listing import DEFAULT_LIMIT, PageObject, list_json
from slora_api.core.threads import control_thread
from slora_api.http.field_types import STRICT, Limit, Name, NamePart
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.keys.key_record import TenantStatus
from slora_api.tenants.named_tenant import NamedTenant
from slora_api.tenants.tenant_store import ShareChanges, Tenant, TenantStore

router = APIRouter(prefix="/admin", tags=["operator"])

_Names = Annotated[list[str] | None, Query(max_length=100)]


@dataclass(frozen=True, slots=True)
class TenantServices:
    """What the routes of tenants use. change_share: see `Pinning.change_share`."""

    tenant_store: TenantStore
    change_share: Callable[[str, ShareChanges], Awaitable[Tenant]]


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
    contains: NamePart | None = None,
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
    return _tenant_json(await services.change_share(tenant.tenant_id, _changes(body)))


@router.post("/tenants/{tenant}/suspend", responses=errors(NotFound, PurgeBegun, DiskFull))
def suspend_tenant(tenant: NamedTenant, _operator: Operator, services: Wired[TenantServices]) -> TenantObject:
    return _tenant_json(services.tenant_store.suspend(tenant.tenant_id))


@router.post("/tenants/{tenant}/resume", responses=errors(NotFound, PurgeBegun, DiskFull))
def resume_tenant(tenant: NamedTenant, _operator: Operator, services: Wired[TenantServices]) -> TenantObject:
    return _tenant_json(services.tenant_store.resume(tenant.tenant_id))
