"""/v1/limits: the bounds of a request, for any valid API key of a tenant."""

from typing import Any

from fastapi import APIRouter

from slora_api.routes.services import Wired
from slora_api.tenants.authentication import CurrentKey

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/limits")
async def show_limits(_key: CurrentKey, services: Wired) -> dict[str, Any]:
    return {"object": "limits", **services.bounds().to_json()}
