"""/admin: the operator's routes for the adapters of tenants and for pins."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, status

from slora.core.errors import EngineUnavailable
from slora_adapters.errors import DiskFull
from slora_adapters.registry.record import Rollout
from slora_adapters.registry.registry import Registry
from slora_api.adapters.model_catalog import (
    AdapterObject,
    AliasObject,
    ModelCatalog,
    PublishedObject,
    adapter_json,
    alias_json,
)
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.routes import UPLOAD_ERRORS, AdapterServices, UploadForm, receive_upload
from slora_api.core.errors import BadRequest, NotFound, PinsFull
from slora_api.core.listing import DEFAULT_LIMIT, PageObject, list_json
from slora_api.http.field_types import Limit, NamePart
from slora_api.http.openapi import errors, form_body
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.tenants.named_tenant import NamedTenant
from slora_api.tenants.tenant_store import TenantStore

router = APIRouter(prefix="/admin", tags=["operator"])

# None of the three names may contain a slash or an at sign.
_PIN_ID = re.compile("([^/@]+)/([^/@]+)@([^/@]+)")
_ADAPTER_ID = re.compile("([^/@]+)/([^/@]+)")


@dataclass(frozen=True, slots=True)
class OperatorServices:
    """What the operator's routes of adapters and pins use."""

    tenant_store: TenantStore
    pinning: Pinning
    catalog: ModelCatalog
    registry: Registry


class PinObject(AliasObject):
    """A pinned alias of a tenant. id: `tenant_id/name@alias`. tenant: the name of the tenant."""

    id: str
    tenant: str
    tenant_id: str


def _pins_json(services: OperatorServices, pins: Sequence[Rollout]) -> list[PinObject]:
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


class OwnedAdapterObject(AdapterObject):
    """An adapter with its owner. id: `tenant_id/name`. tenant: the name of the tenant."""

    id: str
    tenant: str
    tenant_id: str


@router.get("/adapters")
def find_adapters(
    _operator: Operator,
    services: Wired[OperatorServices],
    contains: NamePart = "",
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[OwnedAdapterObject]:
    """Lists the adapters of all tenants, sorted by the tenant's id and the adapter's name.

    contains: a part of the name of the adapter or of its tenant.
    """
    behind = None
    if after is not None:
        match = _ADAPTER_ID.fullmatch(after)
        if match is None:
            raise BadRequest(
                f"`after` is {after[:140]!r}, which is not the id of an adapter, such as `T3f0c…/greeter`; send the "
                "`last_id` of the previous page.",
                "after",
            )
        behind = (match[1], match[2])
    found = services.registry.find_adapters(contains, limit=limit + 1, after=behind)
    owners = services.tenant_store.find_names({rollout.tenant for rollout in found})
    data: list[OwnedAdapterObject] = [
        {
            "id": f"{rollout.tenant}/{rollout.main.name}",
            "tenant": owners.get(rollout.tenant, rollout.tenant),
            "tenant_id": rollout.tenant,
            **adapter_json(rollout),
        }
        for rollout in found
    ]
    return list_json(data, "id", limit)


@router.get("/tenants/{tenant}/adapters", responses=errors(NotFound))
def list_tenant_adapters(
    tenant: NamedTenant,
    _operator: Operator,
    services: Wired[OperatorServices],
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[AdapterObject]:
    return services.catalog.list_tenant_adapters(tenant.tenant_id, limit, after)


@router.post(
    "/tenants/{tenant}/adapters",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=form_body(UploadForm),
    responses={**UPLOAD_ERRORS, **errors(NotFound)},
)
async def upload_tenant_adapter(
    request: Request, tenant: NamedTenant, _operator: Operator, services: Wired[AdapterServices]
) -> PublishedObject:
    """Uploads an adapter of a tenant, as POST /v1/adapters does for a key of the tenant. The tenant's quotas apply."""
    return await receive_upload(request, tenant.tenant_id, services, lambda upload: None)


@router.get("/pins")
def list_pins(
    _operator: Operator,
    services: Wired[OperatorServices],
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
    tenant: NamedTenant, name: str, _operator: Operator, services: Wired[OperatorServices]
) -> AdapterObject:
    return adapter_json(await services.pinning.pin(tenant.tenant_id, name))


@router.delete("/tenants/{tenant}/adapters/{name}/pin", responses=errors(NotFound, DiskFull))
async def unpin_adapter(
    tenant: NamedTenant, name: str, _operator: Operator, services: Wired[OperatorServices]
) -> AdapterObject:
    return adapter_json(await services.pinning.unpin(tenant.tenant_id, name))
