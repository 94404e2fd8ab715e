"""/v1/responses: OpenAI's Responses API without stored answers."""

from fastapi import APIRouter, Request, Response

from slora_api.adapters.served_model import ServedModel
from slora_api.completions.answer_format import LogprobsFormat
from slora_api.completions.answers import ANSWER_ERRORS, Prepared, answer_prompts, count_chat_tokens
from slora_api.completions.prompts import PromptMaker
from slora_api.http.json_body import read_json
from slora_api.http.openapi import event_stream, json_body
from slora_api.keys.authentication import InferenceKey
from slora_api.responses.responses_format import ResponsesFormat
from slora_api.responses.responses_objects import InputTokens, ResponseEvent, ResponseObject
from slora_api.responses.responses_request import ResponsesRequest
from slora_api.serve.services import Wired, open_meter

router = APIRouter(tags=["completions"])

_EVENTS = (
    "Server-sent events, named by their types and numbered. The last one is `response.completed`, "
    "`response.incomplete` or `response.failed`."
)


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=event_stream(ResponseEvent, _EVENTS) | ANSWER_ERRORS,
    openapi_extra=json_body(ResponsesRequest),
)
async def respond(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Answers a conversation with a list of items. The server does not store the answer."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, ResponsesRequest.read_body, bounds, bounds.chat_json)

    async def prepare(maker: PromptMaker, model: ServedModel) -> Prepared:
        prompt = await maker.conversation_prompt(body)
        logprobs = LogprobsFormat(services.generator.tokenizer, body.count_listed(body.num_top_logprobs))
        return [prompt], ResponsesFormat(model.asked_for, body, prompt.sampling, logprobs, prompt.syntax)

    return await answer_prompts(request, body, key, meter, services, prepare)


@router.post(
    "/v1/responses/input_tokens",
    response_model=InputTokens,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(ResponsesRequest),
)
async def count_input_tokens(request: Request, key: InferenceKey, services: Wired) -> InputTokens:
    """Counts the tokens of a request as /v1/responses would send them to the model. For quotas, this counts as a
    request without tokens.
    """
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, ResponsesRequest.read_body, bounds, bounds.chat_json)
    count = await count_chat_tokens(request, body, key, meter, services)
    return {"object": "response.input_tokens", "input_tokens": count}
