"""/v1/models: the models that the API key may use. /v1/adapter-modules: the modules of the base model that adapters may
change.
"""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from slora_api.adapters.model_catalog import ModelObject
from slora_api.errors import ModelNotFound, Starting
from slora_api.listing import ListObject, PageObject
from slora_api.request_bounds import RequestBounds
from slora_api.routes.openapi import errors
from slora_api.routes.services import Services, TenantRoute, Wired
from slora_api.schemas import Limit
from slora_api.tenants.authentication import AdapterReader, InferenceKey

__all__ = ["router"]

router = APIRouter(route_class=TenantRoute, tags=["models"])


class DescribedModel(ModelObject):
    """A model with the bounds of its requests. limits: the bounds; null while there is no engine."""

    limits: RequestBounds | None


@router.get("/v1/models", response_model=PageObject[ModelObject])
def list_models(
    key: InferenceKey, services: Wired, limit: Limit | None = None, after: str | None = None
) -> JSONResponse:
    """Lists the models. Without `limit`, lists all of them, because OpenAI's clients do not request pages of models."""
    # Serialize the models on this thread: thousands of them take milliseconds, which must not block the event loop.
    return JSONResponse(services.catalog.list_models(key, limit, after))


class AdapterModule(TypedDict):
    """A module of the base model that an adapter may change. path: its full name in PEFT's spelling."""

    object: Literal["adapter.module"]
    path: str
    in_features: int
    out_features: int


@router.get("/v1/adapter-modules", responses=errors(Starting))
def list_adapter_modules(_key: AdapterReader, services: Wired) -> ListObject[AdapterModule]:
    """Lists the modules of the base model that an adapter may change, layer by layer. The embedding and the head come
    last.
    """
    modules = services.generator.engine_info().shape.modules
    return {
        "object": "list",
        "data": [
            {
                "object": "adapter.module",
                "path": module.path,
                "in_features": module.in_width,
                "out_features": module.out_width,
            }
            for module in modules
        ],
    }


@router.get("/v1/models/{model:path}", responses=errors(ModelNotFound))
def get_model(model: str, key: InferenceKey, services: Wired) -> DescribedModel:
    """Describes one model."""
    return {**services.catalog.describe_model(key, model), "limits": _limits(services)}


def _limits(services: Services) -> RequestBounds | None:
    try:
        return services.bounds()
    except Starting:
        return None
