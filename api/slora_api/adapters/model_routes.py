"""/v1/models: the models that the API key may use. /v1/adapter-modules: the modules of the base model that adapters may
change.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from slora_api.adapters.model_catalog import ModelObject
from slora_api.adapters.routes import AdapterServices
from slora_api.core.errors import BadRequest, ModelNotFound, Starting, speaks_anthropic
from slora_api.core.listing import ListObject, PageObject, list_json
from slora_api.http.field_types import Limit
from slora_api.http.openapi import errors
from slora_api.http.request_bounds import RequestBounds
from slora_api.http.wiring import TenantRoute, Wired
from slora_api.keys.authentication import AdapterReader, InferenceKey

router = APIRouter(route_class=TenantRoute, tags=["models"])


class DescribedModel(ModelObject):
    """A model with the bounds of its requests. limits: the bounds; null while there is no engine."""

    limits: RequestBounds | None


class MessagesModel(TypedDict):
    """A model in the form of Anthropic's API. The fields of type None tell what this server does not know.

    max_input_tokens, max_tokens: the context, which the prompt and the answer share; null until the engine has started
    for the first time.
    """

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None
    line: None
    deprecated_at: None
    retires_at: None


class MessagesModelPage(TypedDict):
    """A page of models in the form of Anthropic's API."""

    data: list[MessagesModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


# As in Anthropic's API.
_MESSAGES_LIMIT = 20


@dataclass(frozen=True, slots=True)
class _ModelsParameters:
    limit: Limit | None = None
    after: str | None = None
    after_id: str | None = None
    before_id: str | None = None
    lifecycle: Annotated[list[str] | None, Query(alias="lifecycle[]")] = None


@router.get("/v1/models", response_model=PageObject[ModelObject] | MessagesModelPage)
def list_models(
    request: Request,
    key: InferenceKey,
    services: Wired[AdapterServices],
    asked: Annotated[_ModelsParameters, Depends()],
) -> JSONResponse:
    """Lists the models. Without `limit`, lists all of them, because OpenAI's clients do not request pages of models.

    With the header `anthropic-version`, answers in the form of Anthropic's API, with 20 models unless `limit` says
    otherwise. `after_id`, `before_id` and `lifecycle[]` need this header. All models are `active`.
    """
    # Serialize the models on this thread: thousands of them take milliseconds, which must not block the event loop.
    if not speaks_anthropic(request.scope):
        for name, value in (
            ("after_id", asked.after_id),
            ("before_id", asked.before_id),
            ("lifecycle[]", asked.lifecycle),
        ):
            if value is not None:
                raise BadRequest(
                    f"`{name}` belongs to Anthropic's API; send the header `anthropic-version`, or use `after`.",
                    name,
                )
        return JSONResponse(services.catalog.list_models(key, asked.limit, asked.after))
    if asked.after_id is not None and asked.before_id is not None:
        raise BadRequest("`after_id` and `before_id` exclude each other; send one of them.", "before_id")
    page = services.catalog.list_models(
        key, asked.limit or _MESSAGES_LIMIT, asked.after_id or asked.after, asked.before_id
    )
    if asked.lifecycle and "active" not in asked.lifecycle:
        page = list_json([], "id")
    return JSONResponse(
        {
            "data": [_messages_model(model) for model in page["data"]],
            "first_id": page["first_id"],
            "last_id": page["last_id"],
            "has_more": page["has_more"],
        }
    )


def _messages_model(model: ModelObject) -> MessagesModel:
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
        "capabilities": None,
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }


class AdapterModule(TypedDict):
    """A module of the base model that an adapter may change. path: its full name in PEFT's spelling."""

    object: Literal["adapter.module"]
    path: str
    in_features: int
    out_features: int
    num_experts: int


@router.get("/v1/adapter-modules", responses=errors(Starting))
def list_adapter_modules(_key: AdapterReader, services: Wired[AdapterServices]) -> ListObject[AdapterModule]:
    """Lists the modules of the base model that an adapter may change, layer by layer. The embedding and the head come
    last.
    """
    modules = services.bounds.info().shape.modules
    return {
        "object": "list",
        "data": [
            {
                "object": "adapter.module",
                "path": module.path,
                "in_features": module.in_width,
                "out_features": module.out_width,
                "num_experts": module.num_experts,
            }
            for module in modules
        ],
    }


@router.get(
    "/v1/models/{model:path}",
    response_model=DescribedModel | MessagesModel,
    responses=errors(ModelNotFound),
)
def get_model(
    request: Request, model: str, key: InferenceKey, services: Wired[AdapterServices]
) -> DescribedModel | MessagesModel:
    """Describes one model. With the header `anthropic-version`, answers in the form of Anthropic's API."""
    found = services.catalog.describe_model(key, model)
    if speaks_anthropic(request.scope):
        return _messages_model(found)
    return {**found, "limits": _limits(services)}


def _limits(services: AdapterServices) -> RequestBounds | None:
    try:
        return services.bounds.find()
    except Starting:
        return None
