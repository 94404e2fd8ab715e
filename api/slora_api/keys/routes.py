"""/admin: the operator's routes for the API keys of tenants and operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response, status
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora_adapters.errors import DiskFull
from slora_api.core.errors import KeyConflict, NotFound
from slora_api.core.foundation import Foundation
from slora_api.core.listing import DEFAULT_LIMIT, PageObject, list_json
from slora_api.http.field_types import STRICT, Limit, Name
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import AnyKey, Operator
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import (
    DEFAULT_SCOPES,
    OPERATOR_SCOPES,
    AllowList,
    Caller,
    KeyRecord,
    Pepper,
    Scope,
    parse_scopes,
)
from slora_api.keys.key_store import KeyStore, RevocationJournal
from slora_api.keys.key_use import KeyUse
from slora_api.keys.running_requests import RunningRequests

router = APIRouter(prefix="/admin", tags=["operator"])


@dataclass(frozen=True, slots=True)
class KeyServices:
    """What the routes of keys use.

    find_tenant: returns the id of the tenant that has a name. Raises NotFound.
    check_adapter, read_allow_list: see `ModelCatalog`.
    """

    key_admin: KeyAdmin
    find_tenant: Callable[[str], str]
    check_adapter: Callable[[str], None]
    read_allow_list: Callable[[str, Sequence[str], str | None], AllowList]


def _find_tenant(tenant: str, _operator: Operator, services: Wired[KeyServices]) -> str:
    return services.find_tenant(tenant)


# The id of the tenant that the path names.
_TenantId = Annotated[str, Depends(_find_tenant)]


class NewKeyRequest(BaseModel):
    """POST /admin/tenants/{tenant}/keys. The default adapter need not exist yet, because uploading it requires a key.

    scopes: by default, all that a tenant's key can have.
    models: the allow-list; by default, all models of the tenant.
    expires_at: Unix time in seconds.
    """

    model_config = STRICT
    name: Name = ""
    scopes: list[Name] | None = None
    adapter: Name | None = None
    models: list[Name] | None = None
    expires_at: int | None = None


class RotateKeyRequest(BaseModel):
    """POST /admin/keys/{key_id}/rotate.

    overlap_seconds: how long the old key stays valid; one day by default.
    expires_at: when the new key expires, as a Unix time in seconds. By default, the new key gets the lifetime of the
        old key.
    """

    model_config = STRICT
    overlap_seconds: int = 86_400
    expires_at: int | None = None


class NewOperatorKeyRequest(BaseModel):
    """POST /admin/keys.

    scopes: `admin` by default, which permits all. `metrics:read` permits GET /metrics only.
    """

    model_config = STRICT
    name: Name
    scopes: list[Name] | None = None
    expires_at: int | None = None


class KeyObject(TypedDict):
    """A key without its secret. Times are Unix times in seconds.

    tenant, tenant_id: null for an operator's key. adapter: the default adapter; null for the base model. models: the
    allow-list; null permits all models of the tenant. replaced_by: the id of the key that replaced this key in a
    rotation.
    """

    object: Literal["api_key"]
    key_id: str
    tenant: str | None
    tenant_id: str | None
    name: str
    scopes: list[Scope]
    adapter: str | None
    models: list[str] | None
    created: int
    expires_at: int | None
    last_used_at: int | None
    replaced_by: str | None
    revoked: bool


class NewKey(KeyObject):
    """A key that was just created. key: the secret, which the server cannot show again."""

    key: str


class RevokedKey(TypedDict):
    object: Literal["api_key"]
    key_id: str
    revoked: bool


def key_json(key: Caller) -> KeyObject:
    return {
        "object": "api_key",
        "key_id": key.key_id,
        "tenant": key.tenant_name,
        "tenant_id": key.tenant,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "adapter": key.adapter if isinstance(key, KeyRecord) else None,
        "models": sorted(key.models.entries) if isinstance(key, KeyRecord) and key.models else None,
        "created": key.created_at,
        "expires_at": key.expires_at,
        "last_used_at": key.last_used_at,
        "replaced_by": key.replaced_by,
        "revoked": key.revoked_at is not None,
    }


def _show_once(response: Response, record: Caller, secret: str) -> NewKey:
    """The answer with a new key. No cache and no browser may keep it."""
    response.headers["Cache-Control"] = "no-store"
    return {**key_json(record), "key": secret}


# The database may wait for a disk, so these functions are not `async`: FastAPI then runs them on a thread.
@router.post(
    "/tenants/{tenant}/keys", status_code=status.HTTP_201_CREATED, responses=errors(NotFound, DiskFull)
)
def create_key(
    tenant: _TenantId,
    _operator: Operator,
    services: Wired[KeyServices],
    response: Response,
    body: NewKeyRequest | None = None,
) -> NewKey:
    wanted = body or NewKeyRequest()
    if wanted.adapter is not None:
        services.check_adapter(wanted.adapter)
    scopes = DEFAULT_SCOPES if wanted.scopes is None else parse_scopes(wanted.scopes, "scopes")
    models = None
    if wanted.models is not None:
        models = services.read_allow_list(tenant, wanted.models, wanted.adapter)
    record, key = services.key_admin.create_key(
        tenant,
        wanted.adapter,
        name=wanted.name,
        scopes=scopes,
        models=models,
        expires_at=wanted.expires_at,
    )
    return _show_once(response, record, key.secret)


@router.get("/tenants/{tenant}/keys", responses=errors(NotFound))
def list_keys(
    tenant: _TenantId,
    _operator: Operator,
    services: Wired[KeyServices],
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[KeyObject]:
    """Lists the keys of a tenant, oldest first."""
    found = services.key_admin.list_keys(tenant, limit=limit + 1, after=after)
    return list_json([key_json(key) for key in found], "key_id", limit)


@router.post("/keys", status_code=status.HTTP_201_CREATED, responses=errors(DiskFull))
def create_operator_key(
    body: NewOperatorKeyRequest, _operator: Operator, services: Wired[KeyServices], response: Response
) -> NewKey:
    scopes = {Scope.ADMIN} if body.scopes is None else parse_scopes(body.scopes, "scopes", OPERATOR_SCOPES)
    record, key = services.key_admin.create_operator_key(body.name, body.expires_at, scopes)
    return _show_once(response, record, key.secret)


@router.get("/keys")
def list_operator_keys(
    _operator: Operator, services: Wired[KeyServices], limit: Limit = DEFAULT_LIMIT, after: str | None = None
) -> PageObject[KeyObject]:
    """Lists the operators' keys, oldest first, except the bootstrap key."""
    found = services.key_admin.list_operator_keys(limit=limit + 1, after=after)
    return list_json([key_json(key) for key in found], "key_id", limit)


@router.post(
    "/keys/{key_id}/rotate",
    status_code=status.HTTP_201_CREATED,
    responses=errors(NotFound, KeyConflict, DiskFull),
)
def rotate_key(
    key_id: str,
    _operator: Operator,
    services: Wired[KeyServices],
    response: Response,
    body: RotateKeyRequest | None = None,
) -> NewKey:
    """Creates a key with the same permissions and limits. The old key expires at the end of the overlap."""
    wanted = body or RotateKeyRequest()
    record, key = services.key_admin.rotate_key(key_id, wanted.overlap_seconds, wanted.expires_at)
    return _show_once(response, record, key.secret)


@router.delete("/keys/{key_id}", responses=errors(NotFound, KeyConflict))
def revoke_key(
    request: Request, key_id: str, _operator: Operator, services: Wired[KeyServices]
) -> RevokedKey:
    has_bootstrap_key: bool = request.app.state.has_bootstrap_key
    services.key_admin.revoke_key(key_id, keeps_operator=not has_bootstrap_key)
    return {"object": "api_key", "key_id": key_id, "revoked": True}


own_router = APIRouter(tags=["server"])


@own_router.get("/v1/me")
async def show_key(key: AnyKey) -> KeyObject:
    """Describes the key of the request: its tenant, its scopes, and when it expires."""
    return key_json(key)


@dataclass(frozen=True, slots=True)
class Keys:
    store: KeyStore
    admin: KeyAdmin
    use: KeyUse
    running: RunningRequests


def build_keys(foundation: Foundation) -> Keys:
    journal = RevocationJournal(foundation.data.revocations)
    foundation.stack.callback(journal.close)
    store = KeyStore(
        foundation.database,
        Pepper.from_file(foundation.data.pepper),
        journal,
        foundation.settings.auth_stale_seconds,
    )
    return Keys(store, KeyAdmin(store), KeyUse(foundation.database), RunningRequests(store))
