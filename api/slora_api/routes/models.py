"""/v1/models: what the key may call, and nothing else."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from slora_api.errors import Starting
from slora_api.routes.services import Services, Wired
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
    """One model, with the bounds of requests to it: null while there is no engine."""
    return services.catalog.describe_model(key, model) | {"limits": _limits(services)}


def _limits(services: Services) -> dict[str, int] | None:
    try:
        return services.bounds().to_json()
    except Starting:
        return None
