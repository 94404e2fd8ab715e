"""/v1/responses: OpenAI's Responses API without stored answers."""

from fastapi import APIRouter, Request, Response

from slora_api.chat.reasoning_counter import ReasoningCounter
from slora_api.generation.answer_format import LogprobsFormat, Usage
from slora_api.generation.answering import answer_request
from slora_api.generation.responses_format import ResponsesFormat
from slora_api.generation.responses_objects import ResponseEvent, ResponseObject
from slora_api.generation.served_model import ServedModel
from slora_api.generation.service_terms import ServiceTerms
from slora_api.generation.sse import unless_disconnected
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.request_bounds import JsonBounds
from slora_api.responses_request import ResponsesRequest
from slora_api.routes.answers import ANSWER_ERRORS, answer_with, prompt_maker
from slora_api.routes.json_body import read_json
from slora_api.routes.openapi import event_stream, json_body
from slora_api.routes.services import Services, Wired, open_meter
from slora_api.tenants.authentication import InferenceKey
from slora_api.tenants.key_record import KeyRecord

__all__ = ["router"]

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
    """Answers a conversation with a list of items. The answer is not stored."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, ResponsesRequest, bounds, JsonBounds(bounds.chat_values))
    return await answer_with(
        request, body, key, services, lambda model: _respond(request, body, key, meter, services, model)
    )


async def _respond(
    request: Request,
    body: ResponsesRequest,
    key: KeyRecord,
    meter: RequestMeter,
    services: Services,
    model: ServedModel,
) -> Response:
    terms, generator = ServiceTerms.of(key, body, request), services.generator
    maker = prompt_maker(terms, meter, services, model)
    prompt = await unless_disconnected(request.receive, maker.conversation_prompt(body))
    shape = ResponsesFormat(
        model.asked_for,
        body,
        prompt.sampling,
        LogprobsFormat(generator.tokenizer, body.num_top_logprobs),
        prompt.syntax,
    )
    return await answer_request(
        request,
        body,
        generator,
        meter,
        generator.open_answers(terms, model, [prompt]),
        Usage(len(prompt.token_ids), ReasoningCounter.of(prompt.syntax)),
        shape,
        headers=model.headers,
        writing=services.writing,
    )
