"""/v1/completions and /v1/chat/completions."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from slora.errors import AdapterFetchFailed
from slora_api.generation.answer_format import ChatFormat, CompletionFormat
from slora_api.generation.answering import answer_request
from slora_api.generation.prompts import chat_prompt, completion_prompts
from slora_api.generation.served_model import ServedModel
from slora_api.generation.service_terms import ServiceTerms
from slora_api.routes.services import Services, Wired
from slora_api.schemas import ChatRequest, CompletionRequest, GenerationFields
from slora_api.tenants.authentication import CurrentKey
from slora_api.tenants.tenancy import KeyRecord

__all__ = ["router"]

router = APIRouter()


# Who is to stay with one version of an alias that points at several, where requests have no `user`.
_SESSION_HEADER = "x-session-id"


async def _answer_with(
    request: Request,
    body: GenerationFields,
    key: KeyRecord,
    services: Services,
    answer: Callable[[ServedModel], Awaitable[Response]],
) -> Response:
    """Looks the model up and answers; once more if its adapter was deleted before the engine had it."""
    user = body.user or request.headers.get(_SESSION_HEADER)
    model = await services.catalog.find_model(key, body.model, user)
    try:
        return await answer(model)
    except AdapterFetchFailed as error:
        if error.code != "not_found":
            raise
        current = await services.catalog.find_model(key, body.model, user, is_doubtful=True)
        if current.adapter == model.adapter:
            raise
        return await answer(current)


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest, key: CurrentKey, services: Wired) -> Response:
    return await _answer_with(
        request, body, key, services, lambda model: _complete(request, body, key, services, model)
    )


async def _complete(
    request: Request, body: CompletionRequest, key: KeyRecord, services: Services, model: ServedModel
) -> Response:
    generator = services.generator
    prompts = await completion_prompts(body, model, generator.tokenizer, generator.engine_info())
    shape = CompletionFormat(
        model.asked_for, include_usage=body.include_usage, logprobs=body.logprobs is not None
    )
    return await answer_request(
        request,
        body,
        generator.run(ServiceTerms.of(key, body), model, prompts),
        shape,
        prompts=prompts,
        headers=model.headers,
    )


@router.post("/v1/chat/completions")
async def chat(request: Request, body: ChatRequest, key: CurrentKey, services: Wired) -> Response:
    return await _answer_with(
        request, body, key, services, lambda model: _chat(request, body, key, services, model)
    )


async def _chat(
    request: Request, body: ChatRequest, key: KeyRecord, services: Services, model: ServedModel
) -> Response:
    generator = services.generator
    prompt = await chat_prompt(body, model, generator.tokenizer, services.templates, generator.engine_info())
    shape = ChatFormat(
        model.asked_for,
        include_usage=body.include_usage,
        logprobs=bool(body.logprobs),
        num_choices=prompt.sampling.num_choices,
    )
    return await answer_request(
        request,
        body,
        generator.run(ServiceTerms.of(key, body), model, [prompt]),
        shape,
        prompts=[prompt],
        headers=model.headers,
    )
