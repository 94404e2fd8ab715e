"""/admin: the operator's routes for the adapters of tenants and for pins."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter

from slora.core.errors import EngineUnavailable
from slora_adapters.errors import DiskFull
from slora_adapters.registry.record import Rollout
from slora_adapters.registry.registry import Registry
from slora_api.adapters.adapter_json import AdapterObject, AliasObject, adapter_json, alias_json
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.core.errors import BadRequest, NotFound, PinsFull
from slora_api.core.listing import DEFAULT_LIMIT, PageObject, list_json
from slora_api.http.field_types import Limit
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.tenants.named_tenant import NamedTenant
from slora_api.tenants.tenant_store import TenantStore

router = APIRouter(prefix="/admin", tags=["operator"])

# None of the three names may contain a slash or an at sign.
_PIN_ID = re.compile("([^/@]+)/([^/@]+)@([^/@]+)")


@dataclass(frozen=True, slots=True)
class PinServices:
    """What the routes of pins use."""

    tenant_store: TenantStore
    pinning: Pinning
    catalog: ModelCatalog
    registry: Registry


class PinObject(AliasObject):
    """A pinned alias of a tenant. id: `tenant_id/name@alias`. tenant: the name of the tenant."""

    id: str
    tenant: str
    tenant_id: str


def _pins_json(services: PinServices, pins: Sequence[Rollout]) -> list[PinObject]:
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


@router.get("/tenants/{tenant}/adapters", responses=errors(NotFound))
def list_tenant_adapters(
    tenant: NamedTenant,
    _operator: Operator,
    services: Wired[PinServices],
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[AdapterObject]:
    return services.catalog.list_tenant_adapters(tenant.tenant_id, limit, after)


@router.get("/pins")
def list_pins(
    _operator: Operator,
    services: Wired[PinServices],
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
    tenant: NamedTenant, name: str, _operator: Operator, services: Wired[PinServices]
) -> AdapterObject:
    return adapter_json(await services.pinning.pin(tenant.tenant_id, name))


@router.delete("/tenants/{tenant}/adapters/{name}/pin", responses=errors(NotFound, DiskFull))
async def unpin_adapter(
    tenant: NamedTenant, name: str, _operator: Operator, services: Wired[PinServices]
) -> AdapterObject:
    return adapter_json(await services.pinning.unpin(tenant.tenant_id, name))
