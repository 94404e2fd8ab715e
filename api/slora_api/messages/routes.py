"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API. A request is answered as a chat."""

from fastapi import APIRouter, Request, Response

from slora_api.completions.answer_format import AnswerFormat
from slora_api.completions.answering import answer_call, count_chat_tokens
from slora_api.completions.inference_call import ANSWER_ERRORS, InferenceCall
from slora_api.completions.prompts import add_conversation_answer
from slora_api.completions.services import AnswerServices
from slora_api.http.openapi import event_stream, json_body
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import InferenceKey
from slora_api.messages.messages_format import MessageEvent, MessageObject, MessagesFormat, TokenCount
from slora_api.messages.messages_request import CountTokensRequest, MessagesRequest

router = APIRouter(tags=["completions"])

_EVENTS = (
    "Server-sent events, named by their types. The last one is `message_stop` or `error`. A `ping` may come at any "
    "time."
)


@router.post(
    "/v1/messages",
    response_model=MessageObject,
    responses=event_stream(MessageEvent, _EVENTS) | ANSWER_ERRORS,
    openapi_extra=json_body(
        MessagesRequest,
        model="default",
        messages=[{"role": "user", "content": "Who are you?"}],
        max_tokens=100,
    ),
)
async def create_message(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Answers a conversation in the form of Anthropic's API. The key may be sent in the header `x-api-key`."""
    call = await InferenceCall.open(request, key, services)
    body = await call.read(MessagesRequest.read_chat, call.bounds.chat_json)

    async def prepare() -> AnswerFormat:
        await add_conversation_answer(call, body)
        return MessagesFormat(call.model.asked_for, body, call.syntax)

    return await answer_call(call, body, prepare)


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(
        CountTokensRequest, model="default", messages=[{"role": "user", "content": "Who are you?"}]
    ),
)
async def count_message_tokens(
    request: Request, key: InferenceKey, services: Wired[AnswerServices]
) -> TokenCount:
    """Counts the tokens of a conversation as /v1/messages would send them to the model. For quotas, this counts as a
    request without tokens.
    """
    call = await InferenceCall.open(request, key, services)
    body = await call.read(CountTokensRequest.read_chat, call.bounds.chat_json)
    return {"input_tokens": await count_chat_tokens(call, body)}
