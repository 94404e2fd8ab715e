"""/v1/limits: how large a request may be, for any valid key."""

from typing import Any

from fastapi import APIRouter

from slora_api.routes.services import Wired
from slora_api.tenants.authentication import CurrentKey

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/limits")
async def show_limits(_key: CurrentKey, services: Wired) -> dict[str, Any]:
    return {"object": "limits", **services.bounds().to_json()}
