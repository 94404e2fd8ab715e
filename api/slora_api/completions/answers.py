"""The common part of all routes that compute answers: their errors, the lookup of the model, and the steps from prompts
to answers.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response

from slora.core.errors import (
    AdapterFetchFailed,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    StepFailed,
    UsageJournalFull,
)
from slora_adapters.errors import AdapterCorrupt
from slora_api.adapters.served_model import ServedModel
from slora_api.chat.reasoning_counter import ReasoningCounter
from slora_api.completions.answer_format import AnswerFormat, Usage
from slora_api.completions.answering import AnswerResponse, answer_request
from slora_api.completions.prompts import ConversationRequest, Prompt, PromptMaker
from slora_api.completions.schemas import AnswerFields
from slora_api.completions.service_terms import ServiceTerms
from slora_api.core.errors import ModelNotFound
from slora_api.embeddings.schemas import EmbeddingRequest
from slora_api.http.openapi import errors
from slora_api.http.sse import unless_disconnected
from slora_api.keys.key_record import KeyRecord
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.serve.services import Services

# AdapterFetchFailed is not listed: it has the code of ModelNotFound, StoreUnavailable or AdapterCorrupt.
ANSWER_ERRORS = errors(
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

# This header identifies the user if the field `user` is missing. An alias that splits requests sends all requests of a
# user to the same version.
_SESSION_HEADER = "x-session-id"

_Response = TypeVar("_Response", bound=Response)

# The prompts of a request, and the format of its answer.
Prepared = tuple[list[Prompt], AnswerFormat]


async def answer_with(
    request: Request,
    body: AnswerFields | EmbeddingRequest,
    key: KeyRecord,
    services: Services,
    answer: Callable[[ServedModel], Awaitable[_Response]],
) -> _Response:
    """Finds the model and calls `answer` with it. If the engine reports that the adapter does not exist, looks the
    model up again and retries once.
    """
    user = body.user or request.headers.get(_SESSION_HEADER)
    model = await services.catalog.find_answering_model(key, body.model, body.adapters, user)
    try:
        return await answer(model)
    except AdapterFetchFailed as error:
        if error.code != "not_found":
            raise
        current = await services.catalog.find_answering_model(
            key, body.model, body.adapters, user, is_stale=True
        )
        if current.adapters == model.adapters:
            raise
        return await answer(current)


def prompt_maker(
    request: Request, terms: ServiceTerms, meter: RequestMeter, services: Services, model: ServedModel
) -> PromptMaker:
    """Returns the `PromptMaker` of one request. Raises BadRequest if the model combines more adapters than a quota
    permits.
    """
    meter.check_adapters(len(model.adapters))
    generator = services.generator
    tokenizer = services.prompt_tokenizer(terms.tenant, meter, model, request.state.ignored)
    return PromptMaker(terms, tokenizer, services.grammars, generator.limiter, generator.engine_info())


async def count_chat_tokens(
    request: Request, body: ConversationRequest, key: KeyRecord, meter: RequestMeter, services: Services
) -> int:
    """Returns how many tokens the prompt of a conversation has. Counts a request without tokens."""
    await meter.count_request()
    model = await services.catalog.find_model(key, body.model, None)
    tokenizer = services.prompt_tokenizer(key.tenant, meter, model, request.state.ignored)
    encoding = tokenizer.encode_chat(body.chat_messages, body.shown_tools, body, body.messages_field)
    return len((await unless_disconnected(request.receive, encoding)).token_ids)


async def answer_prompts(
    request: Request,
    body: AnswerFields,
    key: KeyRecord,
    meter: RequestMeter,
    services: Services,
    prepare: Callable[[PromptMaker, ServedModel], Coroutine[Any, Any, Prepared]],
) -> AnswerResponse:
    """Finds the model, makes the prompts, and answers them. prepare: may be called twice, see `answer_with`."""
    terms, generator = ServiceTerms.of(key, body, request), services.generator

    async def answer(model: ServedModel) -> AnswerResponse:
        maker = prompt_maker(request, terms, meter, services, model)
        prompts, shape = await unless_disconnected(request.receive, prepare(maker, model))
        syntax = None if prompts[0].sampling.use_beam_search else prompts[0].syntax
        return await answer_request(
            request,
            body,
            generator,
            meter,
            generator.open_answers(terms, model, prompts),
            Usage(sum(len(prompt.token_ids) for prompt in prompts), ReasoningCounter.of(syntax)),
            shape,
            echoes=[prompt.echo for prompt in prompts if prompt.echo is not None],
            headers=model.headers,
            writing=services.writing,
        )

    return await answer_with(request, body, key, services, answer)
