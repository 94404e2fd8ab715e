"""/admin: the operator's routes for tenants and pins."""

from typing import Literal

from fastapi import APIRouter, status
from typing_extensions import TypedDict

from slora.errors import EngineUnavailable
from slora_adapters.errors import DiskFull
from slora_api.adapters.adapter_json import AdapterObject, AliasObject, adapter_json, alias_json
from slora_api.errors import Conflict, NotFound, PinsFull
from slora_api.listing import ListObject
from slora_api.routes.openapi import errors
from slora_api.routes.services import Wired
from slora_api.schemas import NewTenantRequest, TenantChanges
from slora_api.tenants.authentication import Operator
from slora_api.tenants.tenant_status import TenantStatus
from slora_api.tenants.tenant_store import ShareChanges, Tenant

__all__ = ["router"]

router = APIRouter(prefix="/admin", tags=["operator"])


class TenantObject(TypedDict):
    """created: Unix time in seconds."""

    object: Literal["tenant"]
    name: str
    created: int
    status: TenantStatus
    weight: float
    min_pool_share: float
    max_pool_share: float
    priority: int


class PinObject(AliasObject):
    """A pinned alias of a tenant."""

    tenant: str


def _tenant_json(tenant: Tenant) -> TenantObject:
    share = tenant.share
    return {
        "object": "tenant",
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


# Functions without `async`: FastAPI runs them on a thread, because the database may wait for a disk.
@router.post("/tenants", status_code=status.HTTP_201_CREATED, responses=errors(Conflict, DiskFull))
def create_tenant(body: NewTenantRequest, _operator: Operator, services: Wired) -> TenantObject:
    return _tenant_json(services.tenant_store.create_tenant(body.name, _changes(body)))


@router.get("/tenants")
def list_tenants(_operator: Operator, services: Wired) -> ListObject[TenantObject]:
    return {
        "object": "list",
        "data": [_tenant_json(tenant) for tenant in services.tenant_store.list_tenants()],
    }


@router.get("/tenants/{tenant}", responses=errors(NotFound))
def get_tenant(tenant: str, _operator: Operator, services: Wired) -> TenantObject:
    return _tenant_json(services.tenant_store.find_tenant(tenant))


@router.patch("/tenants/{tenant}", responses=errors(NotFound, PinsFull, EngineUnavailable, DiskFull))
async def change_tenant(
    tenant: str, body: TenantChanges, _operator: Operator, services: Wired
) -> TenantObject:
    return _tenant_json(await services.pinning.change_share(tenant, _changes(body)))


@router.post("/tenants/{tenant}/suspend", responses=errors(NotFound, DiskFull))
def suspend_tenant(tenant: str, _operator: Operator, services: Wired) -> TenantObject:
    return _tenant_json(services.tenant_store.suspend(tenant))


@router.post("/tenants/{tenant}/resume", responses=errors(NotFound, DiskFull))
def resume_tenant(tenant: str, _operator: Operator, services: Wired) -> TenantObject:
    return _tenant_json(services.tenant_store.resume(tenant))


@router.get("/pins")
async def list_pins(_operator: Operator, services: Wired) -> ListObject[PinObject]:
    """Lists the pins of all tenants, each as the alias that is pinned."""
    pinned = await services.pinning.list()
    return {"object": "list", "data": [{"tenant": one.tenant, **alias_json(one)} for one in pinned]}


@router.put(
    "/tenants/{tenant}/adapters/{name}/pin", responses=errors(NotFound, PinsFull, EngineUnavailable, DiskFull)
)
async def pin_adapter(tenant: str, name: str, _operator: Operator, services: Wired) -> AdapterObject:
    return adapter_json(await services.pinning.pin(tenant, name))


@router.delete("/tenants/{tenant}/adapters/{name}/pin", responses=errors(NotFound, DiskFull))
async def unpin_adapter(tenant: str, name: str, _operator: Operator, services: Wired) -> AdapterObject:
    return adapter_json(await services.pinning.unpin(tenant, name))
