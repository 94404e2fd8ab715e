"""/v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from slora.text.tokenizer import Tokenizer
from slora_api.chat.chat_parts import ChatParts
from slora_api.chat.reasoning_counter import ReasoningCounter
from slora_api.generation.answer_format import ChatFormat, CompletionFormat, LogprobsFormat, Usage
from slora_api.generation.answer_objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from slora_api.generation.answering import answer_request
from slora_api.generation.served_model import ServedModel
from slora_api.generation.service_terms import ServiceTerms
from slora_api.generation.sse import unless_disconnected
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.request_bounds import JsonBounds
from slora_api.routes.answers import ANSWER_ERRORS, answer_with, prompt_maker
from slora_api.routes.json_body import read_json
from slora_api.routes.openapi import event_stream, json_body
from slora_api.routes.services import Services, Wired, open_meter
from slora_api.schemas import ChatRequest, CompletionRequest, GenerationFields
from slora_api.tenants.authentication import InferenceKey
from slora_api.tenants.key_record import KeyRecord

__all__ = ["router"]

router = APIRouter(tags=["completions"])


def _logprobs_format(tokenizer: Tokenizer, body: GenerationFields, num_top: int | None) -> LogprobsFormat:
    return LogprobsFormat(
        tokenizer, num_top, body.prompt_logprobs, shows_ids=bool(body.return_tokens_as_token_ids)
    )


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=event_stream(CompletionChunk) | ANSWER_ERRORS,
    openapi_extra=json_body(CompletionRequest),
)
async def complete(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Continues one or several prompts."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, CompletionRequest, bounds, JsonBounds(bounds.completion_values))
    return await answer_with(
        request, body, key, services, lambda model: _complete(request, body, key, meter, services, model)
    )


async def _complete(
    request: Request,
    body: CompletionRequest,
    key: KeyRecord,
    meter: RequestMeter,
    services: Services,
    model: ServedModel,
) -> Response:
    terms, generator = ServiceTerms.of(key, body, request), services.generator
    maker = prompt_maker(terms, meter, services, model)
    prompts = await unless_disconnected(request.receive, maker.completion_prompts(body))
    shape = CompletionFormat(
        model.asked_for,
        body,
        _logprobs_format(generator.tokenizer, body, body.logprobs),
        [prompt.token_ids for prompt in prompts],
        prompts[0].sampling.num_choices,
    )
    return await answer_request(
        request,
        body,
        generator,
        meter,
        generator.open_answers(terms, model, prompts),
        Usage(sum(len(prompt.token_ids) for prompt in prompts)),
        shape,
        echoes=[prompt.echo for prompt in prompts if prompt.echo is not None],
        headers=model.headers,
        writing=services.writing,
    )


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=event_stream(ChatCompletionChunk) | ANSWER_ERRORS,
    openapi_extra=json_body(ChatRequest),
)
async def chat(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Answers a conversation."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, ChatRequest, bounds, JsonBounds(bounds.chat_values))
    return await answer_with(
        request, body, key, services, lambda model: _chat(request, body, key, meter, services, model)
    )


async def _chat(
    request: Request,
    body: ChatRequest,
    key: KeyRecord,
    meter: RequestMeter,
    services: Services,
    model: ServedModel,
) -> Response:
    terms, generator = ServiceTerms.of(key, body, request), services.generator
    maker = prompt_maker(terms, meter, services, model)
    prompt = await unless_disconnected(request.receive, maker.conversation_prompt(body))
    shape = ChatFormat(
        model.asked_for,
        body,
        _logprobs_format(generator.tokenizer, body, body.num_top_logprobs),
        prompt.token_ids,
        prompt.sampling.num_choices,
        None
        if prompt.syntax is None
        else ChatParts(prompt.syntax, shows_reasoning=body.include_reasoning is not False),
    )
    return await answer_request(
        request,
        body,
        generator,
        meter,
        generator.open_answers(terms, model, [prompt]),
        Usage(len(prompt.token_ids), None if body.use_beam_search else ReasoningCounter.of(prompt.syntax)),
        shape,
        headers=model.headers,
        writing=services.writing,
    )
