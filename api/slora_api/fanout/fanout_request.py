"""The body of POST /v1/fanout: a chat or a completion for several models."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from slora_api.field_types import STRICT, Name
from slora_api.schemas import AdapterWeight, ChatRequest, CompletionRequest
from slora_api.unsupported import Unsupported

__all__ = ["ChatFanoutRequest", "CompletionFanoutRequest", "FanoutRequest", "split_request"]


def _as_object(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


class FanoutModel(BaseModel):
    """One model of a fan-out. A plain string gives only the name of the model. adapters: as in completions, a weighted
    sum.
    """

    model_config = STRICT
    model: Name = "default"
    adapters: list[AdapterWeight] | None = None


_Model = Annotated[FanoutModel, BeforeValidator(_as_object, json_schema_input_type=str | FanoutModel)]


class _FanoutFields(BaseModel):
    """The fields of every call of /v1/fanout.

    models: names of adapters or of the base model, or objects with `adapters`. Each model gets the rest of the body.
    """

    models: Annotated[list[_Model], Field(min_length=1)]
    model: Annotated[Any, Unsupported(instead="Send the list `models`.")] = None
    adapters: Annotated[Any, Unsupported([], instead="Name them in an entry of `models`.")] = None


class ChatFanoutRequest(_FanoutFields, ChatRequest):
    """POST /v1/fanout with `messages` and all fields of /v1/chat/completions except `model`."""


class CompletionFanoutRequest(_FanoutFields, CompletionRequest):
    """POST /v1/fanout with `prompt` and all fields of /v1/completions except `model`."""


FanoutRequest = ChatFanoutRequest | CompletionFanoutRequest


def split_request(body: FanoutRequest) -> list[FanoutRequest]:
    """Returns the request for each model. A `request_id` is extended by the position of the model."""
    return [
        body.model_copy(
            update={
                "model": entry.model,
                "adapters": entry.adapters,
                "request_id": body.request_id and f"{body.request_id}-{index}",
            }
        )
        for index, entry in enumerate(body.models)
    ]
