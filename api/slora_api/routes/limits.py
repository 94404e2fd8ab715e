"""/v1/limits: the bounds of a request, for an API key with the scope `inference`."""

from dataclasses import asdict, dataclass
from typing import Literal

from fastapi import APIRouter

from slora_api.errors import Starting
from slora_api.request_bounds import RequestBounds
from slora_api.routes.openapi import errors
from slora_api.routes.services import Wired
from slora_api.tenants.authentication import InferenceKey

__all__ = ["router"]

router = APIRouter(tags=["models"])


@dataclass(frozen=True, slots=True)
class LimitsObject(RequestBounds):
    object: Literal["limits"] = "limits"


@router.get("/v1/limits", responses=errors(Starting))
async def show_limits(_key: InferenceKey, services: Wired) -> LimitsObject:
    return LimitsObject(**asdict(services.bounds()))
