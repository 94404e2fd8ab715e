"""/v1/adapters: a tenant's own adapters, uploaded, listed and deleted."""

from typing import Any

from fastapi import APIRouter, Request, status

from slora_api.authentication import CurrentKey
from slora_api.services import Wired

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/adapters", status_code=status.HTTP_201_CREATED)
async def upload_adapter(request: Request, key: CurrentKey, services: Wired) -> dict[str, Any]:
    """Multipart fields: name, config, weights; optional tokenizer_config, chat_template, generation_config, replace."""
    with services.generator.admission.upload(key.tenant):
        content_type = request.headers.get("content-type", "")
        async with services.uploads.receive(content_type, request.stream()) as upload:
            return await services.catalog.publish(
                key.tenant, upload.name, upload.directory, replace=upload.replace
            )


@router.get("/v1/adapters")
def list_adapters(key: CurrentKey, services: Wired) -> dict[str, Any]:
    return {"object": "list", "data": services.catalog.list_adapters(key.tenant)}


@router.get("/v1/adapters/{name}")
def get_adapter(name: str, key: CurrentKey, services: Wired) -> dict[str, Any]:
    return services.catalog.describe_adapter(key.tenant, name)


@router.delete("/v1/adapters/{name}")
async def delete_adapter(name: str, key: CurrentKey, services: Wired) -> dict[str, Any]:
    await services.catalog.delete(key.tenant, name)
    return {"name": name, "object": "adapter", "deleted": True}
