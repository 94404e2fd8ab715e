"""/v1/models: the models that the API key may use."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from slora_api.adapters.model_catalog import ModelObject
from slora_api.errors import ModelNotFound, Starting
from slora_api.listing import PageObject
from slora_api.request_bounds import RequestBounds
from slora_api.routes.openapi import errors
from slora_api.routes.services import Services, Wired
from slora_api.schemas import Limit
from slora_api.tenants.authentication import InferenceKey

__all__ = ["router"]

router = APIRouter(tags=["models"])


class DescribedModel(ModelObject):
    """A model with the bounds of its requests. They are null while there is no engine."""

    limits: RequestBounds | None


@router.get("/v1/models", response_model=PageObject[ModelObject])
def list_models(
    key: InferenceKey, services: Wired, limit: Limit | None = None, after: str | None = None
) -> JSONResponse:
    """Lists all models if the client sends no `limit`, because OpenAI's clients do not request pages of models."""
    # Serialized on this thread: thousands of models take milliseconds, which must not block the event loop.
    return JSONResponse(services.catalog.list_models(key, limit, after))


@router.get("/v1/models/{model:path}", responses=errors(ModelNotFound))
def get_model(model: str, key: InferenceKey, services: Wired) -> DescribedModel:
    """Describes one model."""
    return {**services.catalog.describe_model(key, model), "limits": _limits(services)}


def _limits(services: Services) -> RequestBounds | None:
    try:
        return services.bounds()
    except Starting:
        return None
