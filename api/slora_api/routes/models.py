"""/v1/models: the models that the API key may use."""

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
    """Lists all models if the client sends no `limit`, because OpenAI's clients do not request pages of models."""
    # Serialized on this thread: thousands of models take milliseconds, which must not block the event loop.
    return JSONResponse(services.catalog.list_models(key, limit, after))


@router.get("/v1/models/{model:path}")
def get_model(model: str, key: CurrentKey, services: Wired) -> dict[str, Any]:
    """Describes one model. `limits` has the bounds of its requests, or null while there is no engine."""
    return services.catalog.describe_model(key, model) | {"limits": _limits(services)}


def _limits(services: Services) -> dict[str, int] | None:
    try:
        return services.bounds().to_json()
    except Starting:
        return None
