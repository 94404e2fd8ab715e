"""/v1/models: what the key may call, and nothing else."""

from typing import Any

from fastapi import APIRouter

from slora_api.authentication import CurrentKey
from slora_api.services import Wired

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
def list_models(key: CurrentKey, services: Wired) -> dict[str, Any]:
    return {"object": "list", "data": services.catalog.list_models(key)}


@router.get("/v1/models/{model:path}")
def get_model(model: str, key: CurrentKey, services: Wired) -> dict[str, Any]:
    return services.catalog.describe_model(key, model)
