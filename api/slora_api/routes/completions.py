"""/v1/completions and /v1/chat/completions."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from slora.errors import (
    AdapterFetchFailed,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    StepFailed,
    UsageJournalFull,
)
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterCorrupt
from slora_api.chat.chat_parts import ChatParts
from slora_api.errors import ModelNotFound
from slora_api.generation.answer_format import ChatFormat, CompletionFormat, LogprobsFormat
from slora_api.generation.answer_objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from slora_api.generation.answering import answer_request
from slora_api.generation.prompts import PromptMaker
from slora_api.generation.served_model import ServedModel
from slora_api.generation.service_terms import ServiceTerms
from slora_api.generation.sse import unless_disconnected
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.request_bounds import JsonBounds
from slora_api.routes.json_body import read_json
from slora_api.routes.openapi import errors, event_stream, json_body
from slora_api.routes.services import Services, Wired, open_meter
from slora_api.schemas import ChatRequest, CompletionRequest, GenerationFields
from slora_api.tenants.authentication import InferenceKey
from slora_api.tenants.key_record import KeyRecord

__all__ = ["router"]

router = APIRouter(tags=["completions"])

# The codes of AdapterFetchFailed are those of ModelNotFound, StoreUnavailable and AdapterCorrupt.
_ERRORS = errors(
    *(
        ModelNotFound,
        EngineUnavailable,
        StepFailed,
        DeadlineMissed,
        RequestFailed,
        AdapterCorrupt,
        UsageJournalFull,
    )
)

# Identifies the user of a request without the field `user`. If an alias splits requests, a user stays with one version.
_SESSION_HEADER = "x-session-id"


async def _answer_with(
    request: Request,
    body: GenerationFields,
    key: KeyRecord,
    services: Services,
    answer: Callable[[ServedModel], Awaitable[Response]],
) -> Response:
    """Finds the model and answers. Retries once with a new lookup if the engine reports that the adapter does not
    exist.
    """
    user = body.user or request.headers.get(_SESSION_HEADER)
    model = await services.catalog.find_model(key, body.model, user)
    try:
        return await answer(model)
    except AdapterFetchFailed as error:
        if error.code != "not_found":
            raise
        current = await services.catalog.find_model(key, body.model, user, is_stale=True)
        if current.adapter == model.adapter:
            raise
        return await answer(current)


def _prompt_maker(
    terms: ServiceTerms, meter: RequestMeter, services: Services, model: ServedModel
) -> PromptMaker:
    generator = services.generator
    tokenizer = services.prompt_tokenizer(terms.tenant, meter, model)
    return PromptMaker(terms, tokenizer, services.grammars, generator.limiter, generator.engine_info())


def _logprobs_format(tokenizer: Tokenizer, body: GenerationFields, num_top: int | None) -> LogprobsFormat:
    return LogprobsFormat(
        tokenizer, num_top, body.prompt_logprobs, shows_ids=bool(body.return_tokens_as_token_ids)
    )


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=event_stream(CompletionChunk) | _ERRORS,
    openapi_extra=json_body(CompletionRequest),
)
async def complete(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Continues one or several prompts."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, CompletionRequest, bounds, JsonBounds(bounds.completion_values))
    return await _answer_with(
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
    terms, generator = ServiceTerms.of(key, body), services.generator
    maker = _prompt_maker(terms, meter, services, model)
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
        shape,
        echoes=[prompt.echo for prompt in prompts if prompt.echo is not None],
        headers=model.headers,
        writing=services.writing,
    )


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=event_stream(ChatCompletionChunk) | _ERRORS,
    openapi_extra=json_body(ChatRequest),
)
async def chat(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Answers a conversation."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, ChatRequest, bounds, JsonBounds(bounds.chat_values))
    return await _answer_with(
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
    terms, generator = ServiceTerms.of(key, body), services.generator
    maker = _prompt_maker(terms, meter, services, model)
    prompt = await unless_disconnected(request.receive, maker.chat_prompt(body))
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    shape = ChatFormat(
        model.asked_for,
        body,
        _logprobs_format(generator.tokenizer, body, num_top),
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
        shape,
        headers=model.headers,
        writing=services.writing,
    )
