"""/v1/responses: OpenAI's Responses API without stored answers."""

from fastapi import APIRouter, Request, Response

from slora_api.completions.answer_format import AnswerFormat, LogprobsFormat
from slora_api.completions.answering import answer_call, count_chat_tokens
from slora_api.completions.inference_call import ANSWER_ERRORS, InferenceCall
from slora_api.completions.prompts import add_conversation_answer
from slora_api.completions.services import AnswerServices
from slora_api.http.openapi import event_stream, json_body
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import InferenceKey
from slora_api.responses.responses_format import ResponsesFormat
from slora_api.responses.responses_objects import InputTokens, ResponseEvent, ResponseObject
from slora_api.responses.responses_request import ResponsesRequest

router = APIRouter(tags=["completions"])

_EVENTS = (
    "Server-sent events, named by their types and numbered. The last one is `response.completed`, "
    "`response.incomplete` or `response.failed`."
)


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=event_stream(ResponseEvent, _EVENTS) | ANSWER_ERRORS,
    openapi_extra=json_body(ResponsesRequest, model="default", input="Who are you?"),
)
async def respond(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Answers a conversation with a list of items. The server does not store the answer."""
    call = await InferenceCall.open(request, key, services)
    body = await call.read(ResponsesRequest.read_body, call.bounds.chat_json)

    async def prepare() -> AnswerFormat:
        sampling = (await add_conversation_answer(call, body)).request.sampling
        logprobs = LogprobsFormat(call.encoder.tokenizer, body.count_listed(body.num_top_logprobs))
        return ResponsesFormat(call.model.asked_for, body, sampling, logprobs, call.syntax)

    return await answer_call(call, body, prepare)


@router.post(
    "/v1/responses/input_tokens",
    response_model=InputTokens,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(ResponsesRequest, model="default", input="Who are you?"),
)
async def count_input_tokens(
    request: Request, key: InferenceKey, services: Wired[AnswerServices]
) -> InputTokens:
    """Counts the tokens of a request as /v1/responses would send them to the model. For quotas, this counts as a
    request without tokens.
    """
    call = await InferenceCall.open(request, key, services)
    body = await call.read(ResponsesRequest.read_body, call.bounds.chat_json)
    return {"object": "response.input_tokens", "input_tokens": await count_chat_tokens(call, body)}
