"""/admin: the operator's routes for the API keys of tenants and operators."""

from typing import Literal

from fastapi import APIRouter, status
from typing_extensions import TypedDict

from slora_adapters.errors import DiskFull
from slora_api.errors import NotFound
from slora_api.listing import ListObject
from slora_api.routes.openapi import errors
from slora_api.routes.services import Wired
from slora_api.schemas import NewKeyRequest, NewOperatorKeyRequest
from slora_api.tenants.authentication import Operator
from slora_api.tenants.key_record import Caller, KeyRecord
from slora_api.tenants.scopes import TENANT_SCOPES, Scope, parse_scopes

__all__ = ["router"]

router = APIRouter(prefix="/admin", tags=["operator"])


class KeyObject(TypedDict):
    """A key without its secret. Times are Unix times in seconds.

    tenant: null for an operator's key. adapter: the default adapter; null for the base model.
    """

    object: Literal["api_key"]
    key_id: str
    tenant: str | None
    name: str
    scopes: list[Scope]
    adapter: str | None
    created: int
    expires_at: int | None
    last_used_at: int | None
    revoked: bool


class NewKey(KeyObject):
    """key: the secret, which the server cannot show again."""

    key: str


class RevokedKey(TypedDict):
    object: Literal["api_key"]
    key_id: str
    revoked: bool


def _key_json(key: Caller) -> KeyObject:
    return {
        "object": "api_key",
        "key_id": key.key_id,
        "tenant": key.tenant,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "adapter": key.adapter if isinstance(key, KeyRecord) else None,
        "created": key.created_at,
        "expires_at": key.expires_at,
        "last_used_at": key.last_used_at,
        "revoked": key.revoked_at is not None,
    }


# Functions without `async`: FastAPI runs them on a thread, because the database may wait for a disk.
@router.post(
    "/tenants/{tenant}/keys", status_code=status.HTTP_201_CREATED, responses=errors(NotFound, DiskFull)
)
def create_key(
    tenant: str, _operator: Operator, services: Wired, body: NewKeyRequest | None = None
) -> NewKey:
    wanted = body or NewKeyRequest()
    if wanted.adapter is not None:
        services.catalog.check_key_adapter(wanted.adapter)
    scopes = TENANT_SCOPES if wanted.scopes is None else parse_scopes(wanted.scopes, "scopes")
    record, key = services.key_store.create_key(
        tenant, wanted.adapter, name=wanted.name, scopes=scopes, expires_at=wanted.expires_at
    )
    return {**_key_json(record), "key": key.secret}


@router.get("/tenants/{tenant}/keys", responses=errors(NotFound))
def list_keys(tenant: str, _operator: Operator, services: Wired) -> ListObject[KeyObject]:
    return {"object": "list", "data": [_key_json(key) for key in services.key_store.list_keys(tenant)]}


@router.post("/keys", status_code=status.HTTP_201_CREATED, responses=errors(DiskFull))
def create_operator_key(body: NewOperatorKeyRequest, _operator: Operator, services: Wired) -> NewKey:
    record, key = services.key_store.create_operator_key(body.name, body.expires_at)
    return {**_key_json(record), "key": key.secret}


@router.get("/keys")
def list_operator_keys(_operator: Operator, services: Wired) -> ListObject[KeyObject]:
    """Lists the operators' keys without the bootstrap key."""
    return {"object": "list", "data": [_key_json(key) for key in services.key_store.list_operator_keys()]}


@router.delete("/keys/{key_id}", responses=errors(NotFound))
def revoke_key(key_id: str, _operator: Operator, services: Wired) -> RevokedKey:
    services.key_store.revoke_key(key_id)
    return {"object": "api_key", "key_id": key_id, "revoked": True}
