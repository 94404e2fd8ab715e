"""/v1/models: what the key may call, and nothing else."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from slora_api.routes.services import Wired
from slora_api.schemas import Limit
from slora_api.tenants.authentication import CurrentKey

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
def list_models(
    key: CurrentKey, services: Wired, limit: Limit | None = None, after: str | None = None
) -> JSONResponse:
    """All of them unless `limit` says how many: OpenAI's clients ask once, and know no pages of models."""
    # Written here, on this thread: thousands of models take milliseconds that the event loop has not got.
    return JSONResponse(services.catalog.list_models(key, limit, after))


@router.get("/v1/models/{model:path}")
def get_model(model: str, key: CurrentKey, services: Wired) -> dict[str, Any]:
    return services.catalog.describe_model(key, model)
