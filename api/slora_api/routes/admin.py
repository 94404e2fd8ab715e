"""/admin: the operator's routes for tenants, API keys and pins."""

from typing import Any

from fastapi import APIRouter, status

from slora_api.adapters.adapter_json import adapter_json, alias_json
from slora_api.routes.services import Wired
from slora_api.schemas import NewKeyRequest, NewTenantRequest, TenantChanges
from slora_api.tenants.authentication import Operator
from slora_api.tenants.tenant_store import KeyRecord, ShareChanges, Tenant

__all__ = ["router"]

router = APIRouter(prefix="/admin")


def _tenant_json(tenant: Tenant) -> dict[str, Any]:
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


def _key_json(key: KeyRecord) -> dict[str, Any]:
    return {
        "object": "api_key",
        "key_id": key.key_id,
        "tenant": key.tenant,
        "adapter": key.adapter,
        "created": key.created_at,
        "revoked": key.revoked_at is not None,
    }


# Functions without `async`: FastAPI runs them on a thread, because the database may wait for a disk.
@router.post("/tenants", status_code=status.HTTP_201_CREATED)
def create_tenant(body: NewTenantRequest, _operator: Operator, services: Wired) -> dict[str, Any]:
    return _tenant_json(services.tenant_store.create_tenant(body.name, _changes(body)))


@router.get("/tenants")
def list_tenants(_operator: Operator, services: Wired) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [_tenant_json(tenant) for tenant in services.tenant_store.list_tenants()],
    }


@router.get("/tenants/{tenant}")
def get_tenant(tenant: str, _operator: Operator, services: Wired) -> dict[str, Any]:
    return _tenant_json(services.tenant_store.find_tenant(tenant))


@router.patch("/tenants/{tenant}")
async def change_tenant(
    tenant: str, body: TenantChanges, _operator: Operator, services: Wired
) -> dict[str, Any]:
    return _tenant_json(await services.pinning.change_share(tenant, _changes(body)))


@router.post("/tenants/{tenant}/suspend")
def suspend_tenant(tenant: str, _operator: Operator, services: Wired) -> dict[str, Any]:
    return _tenant_json(services.tenant_store.suspend(tenant))


@router.post("/tenants/{tenant}/resume")
def resume_tenant(tenant: str, _operator: Operator, services: Wired) -> dict[str, Any]:
    return _tenant_json(services.tenant_store.resume(tenant))


@router.get("/pins")
async def list_pins(_operator: Operator, services: Wired) -> dict[str, Any]:
    """Lists the pins of all tenants, each as the alias that is pinned."""
    pinned = await services.pinning.list()
    return {"object": "list", "data": [{"tenant": one.tenant, **alias_json(one)} for one in pinned]}


@router.put("/tenants/{tenant}/adapters/{name}/pin")
async def pin_adapter(tenant: str, name: str, _operator: Operator, services: Wired) -> dict[str, Any]:
    return adapter_json(await services.pinning.pin(tenant, name))


@router.delete("/tenants/{tenant}/adapters/{name}/pin")
async def unpin_adapter(tenant: str, name: str, _operator: Operator, services: Wired) -> dict[str, Any]:
    return adapter_json(await services.pinning.unpin(tenant, name))


@router.post("/tenants/{tenant}/keys", status_code=status.HTTP_201_CREATED)
def create_key(
    tenant: str, _operator: Operator, services: Wired, body: NewKeyRequest | None = None
) -> dict[str, Any]:
    adapter = body.adapter if body else None
    if adapter is not None:
        services.catalog.check_key_adapter(adapter)
    record, key = services.tenant_store.create_key(tenant, adapter)
    return {**_key_json(record), "key": key.secret}


@router.get("/tenants/{tenant}/keys")
def list_keys(tenant: str, _operator: Operator, services: Wired) -> dict[str, Any]:
    return {"object": "list", "data": [_key_json(key) for key in services.tenant_store.list_keys(tenant)]}


@router.delete("/keys/{key_id}")
def revoke_key(key_id: str, _operator: Operator, services: Wired) -> dict[str, Any]:
    services.tenant_store.revoke_key(key_id)
    return {"object": "api_key", "key_id": key_id, "revoked": True}
