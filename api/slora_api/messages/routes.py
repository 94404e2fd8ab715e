"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API. A request is answered as a chat."""

from fastapi import APIRouter, Request, Response

from slora_api.adapters.served_model import ServedModel
from slora_api.completions.answers import ANSWER_ERRORS, Prepared, answer_prompts, count_chat_tokens
from slora_api.completions.prompts import PromptMaker
from slora_api.http.json_body import read_json
from slora_api.http.openapi import event_stream, json_body
from slora_api.keys.authentication import InferenceKey
from slora_api.messages.messages_format import MessagesFormat
from slora_api.messages.messages_objects import MessageEvent, MessageObject, TokenCount
from slora_api.messages.messages_request import CountTokensRequest, MessagesRequest
from slora_api.serve.services import Wired, open_meter

router = APIRouter(tags=["completions"])

_EVENTS = (
    "Server-sent events, named by their types. The last one is `message_stop` or `error`. A `ping` may come at any "
    "time."
)


@router.post(
    "/v1/messages",
    response_model=MessageObject,
    responses=event_stream(MessageEvent, _EVENTS) | ANSWER_ERRORS,
    openapi_extra=json_body(MessagesRequest),
)
async def create_message(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Answers a conversation in the form of Anthropic's API. The key may be sent in the header `x-api-key`."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, MessagesRequest.read_chat, bounds, bounds.chat_json)

    async def prepare(maker: PromptMaker, model: ServedModel) -> Prepared:
        prompt = await maker.conversation_prompt(body)
        return [prompt], MessagesFormat(model.asked_for, body, prompt.syntax)

    return await answer_prompts(request, body, key, meter, services, prepare)


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(CountTokensRequest),
)
async def count_message_tokens(request: Request, key: InferenceKey, services: Wired) -> TokenCount:
    """Counts the tokens of a conversation as /v1/messages would send them to the model. For quotas, this counts as a
    request without tokens.
    """
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, CountTokensRequest.read_chat, bounds, bounds.chat_json)
    return {"input_tokens": await count_chat_tokens(request, body, key, meter, services)}
