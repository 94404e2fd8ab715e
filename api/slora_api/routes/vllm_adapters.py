"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them, for the operator: those who migrate.

To load is to push from a directory of this machine (`lora_root`): it makes the next version of the name, durably, so it
needs to be done once and not at each start. To unload is to delete the name.
"""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from slora_api.errors import BadRequest
from slora_api.routes.services import Services, Wired
from slora_api.schemas import LoadLoraRequest, UnloadLoraRequest
from slora_api.tenants.authentication import Operator

__all__ = ["router"]

router = APIRouter(prefix="/v1")


@router.post("/load_lora_adapter")
async def load_lora_adapter(body: LoadLoraRequest, _operator: Operator, services: Wired) -> PlainTextResponse:
    tenant = _tenant(services, body.tenant)
    with services.generator.admission.upload(tenant):
        async with services.local_adapters.copy(body.lora_path) as directory:
            loaded = await services.catalog.publish(tenant, body.lora_name, directory)
    return PlainTextResponse(f"Success: {loaded['name']}@{loaded['version']} of tenant {tenant} is loaded.")


@router.post("/unload_lora_adapter")
async def unload_lora_adapter(
    body: UnloadLoraRequest, _operator: Operator, services: Wired
) -> PlainTextResponse:
    tenant = _tenant(services, body.tenant)
    await services.catalog.delete(tenant, body.lora_name)
    return PlainTextResponse(f"Success: {body.lora_name} of tenant {tenant} is unloaded.")


def _tenant(services: Services, name: str | None) -> str:
    """vLLM knows no tenants: where there is only one here, it need not be told."""
    if name is not None:
        return services.tenancy.find_tenant(name).name
    tenants = services.tenancy.list_tenants()
    if len(tenants) != 1:
        raise BadRequest(
            f"This server has {len(tenants)} tenants; name the one that is meant in `tenant`.",
            "tenant",
            "missing_parameter",
        )
    return tenants[0].name
