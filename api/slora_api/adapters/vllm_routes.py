"""/v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM, for operators who migrate.

Loading publishes an adapter from a directory below `lora_root` as the next version of its name. The version is durable,
so it need not be loaded again after a restart. Unloading deletes the name with all its versions.
"""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from slora.core.errors import EngineUnavailable
from slora_adapters.errors import AdapterInvalid, DiskFull
from slora_api.adapters.routes import AdapterServices
from slora_api.core.errors import (
    BadRequest,
    InspectionFailed,
    InUse,
    ModelNotFound,
    NotFound,
    QuotaExceeded,
    ServerBusy,
    TenantBusy,
)
from slora_api.core.threads import control_thread
from slora_api.http.field_types import STRICT, Name, Text
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.tenants.tenant_store import Tenant

router = APIRouter(prefix="/v1", tags=["adapters"])


class LoadLoraRequest(BaseModel):
    """POST /v1/load_lora_adapter, with vLLM's fields and a tenant.

    tenant: the owner of the adapter; may be left out if the server has only one tenant.
    load_inplace: as in vLLM, whether to replace an adapter of the same name. By default, the request is refused if the
        name exists. Replacing keeps the old version.
    """

    model_config = STRICT
    lora_name: Name
    lora_path: Text
    load_inplace: bool | None = None
    tenant: Name | None = None


class UnloadLoraRequest(BaseModel):
    """POST /v1/unload_lora_adapter. lora_int_id: vLLM's internal number of the adapter, which this server ignores."""

    model_config = STRICT
    lora_name: Name
    lora_int_id: int | None = None
    tenant: Name | None = None


@router.post(
    "/load_lora_adapter",
    response_class=PlainTextResponse,
    responses=errors(
        NotFound,
        AdapterInvalid,
        QuotaExceeded,
        TenantBusy,
        ServerBusy,
        EngineUnavailable,
        InspectionFailed,
        DiskFull,
    ),
)
async def load_lora_adapter(
    request: Request, body: LoadLoraRequest, _operator: Operator, services: Wired[AdapterServices]
) -> PlainTextResponse:
    tenant = await control_thread(_find_tenant, services, body.tenant)
    async with services.local_adapters.take_turn(tenant.tenant_id):
        if not body.load_inplace and await services.catalog.has_adapter(tenant.tenant_id, body.lora_name):
            raise BadRequest(
                f"The adapter `{body.lora_name}` of tenant `{tenant.name}` has already been loaded. Send "
                "`load_inplace: true` to add a version, or choose another `lora_name`.",
                "lora_name",
            )
        with services.limiter.admit_upload(tenant.tenant_id):
            async with services.local_adapters.copy(
                tenant.tenant_id, body.lora_name, body.lora_path
            ) as upload:
                loaded = await services.publisher.publish(tenant.tenant_id, upload, request.receive)
    name = f"{loaded['name']}@{loaded['version']}"
    return PlainTextResponse(f"Success: the adapter {name} of tenant {tenant.name} was loaded successfully.")


@router.post(
    "/unload_lora_adapter",
    response_class=PlainTextResponse,
    responses=errors(NotFound, ModelNotFound, InUse, DiskFull),
)
async def unload_lora_adapter(
    body: UnloadLoraRequest, _operator: Operator, services: Wired[AdapterServices]
) -> PlainTextResponse:
    tenant = await control_thread(_find_tenant, services, body.tenant)
    await services.catalog.delete(tenant.tenant_id, body.lora_name)
    return PlainTextResponse(
        f"Success: the adapter {body.lora_name} of tenant {tenant.name} was unloaded successfully."
    )


def _find_tenant(services: AdapterServices, name: str | None) -> Tenant:
    """Returns the tenant of the request. The field `tenant` may be missing if the server has only one tenant, because
    vLLM's clients do not send it.
    """
    if name is not None:
        return services.tenant_store.find_named(name)
    tenants = services.tenant_store.list_tenants()
    if len(tenants) != 1:
        raise BadRequest(
            f"This server has {len(tenants)} tenants; name the tenant of the adapter in `tenant`.",
            "tenant",
            "missing_parameter",
        )
    return tenants[0]
