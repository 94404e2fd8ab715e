"""/v1/limits: the bounds of a request, for an API key with the scope `inference`."""

from dataclasses import asdict, dataclass
from typing import Literal

from fastapi import APIRouter

from slora_api.completions.services import AnswerServices
from slora_api.core.errors import Starting
from slora_api.http.openapi import errors
from slora_api.http.request_bounds import RequestBounds
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import InferenceKey

router = APIRouter(tags=["models"])


@dataclass(frozen=True, slots=True)
class LimitsObject(RequestBounds):
    object: Literal["limits"] = "limits"


@router.get("/v1/limits", responses=errors(Starting))
async def show_limits(_key: InferenceKey, services: Wired[AnswerServices]) -> LimitsObject:
    return LimitsObject(**asdict(services.bounds()))
