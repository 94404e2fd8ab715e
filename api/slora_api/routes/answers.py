"""What the routes that generate answers share: their errors, the look-up of the model, and the maker of prompts."""

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from slora.errors import (
    AdapterFetchFailed,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    StepFailed,
    UsageJournalFull,
)
from slora_adapters.errors import AdapterCorrupt
from slora_api.errors import ModelNotFound
from slora_api.generation.prompts import PromptMaker
from slora_api.generation.served_model import ServedModel
from slora_api.generation.service_terms import ServiceTerms
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.routes.openapi import errors
from slora_api.routes.services import Services
from slora_api.schemas import AnswerFields, EmbeddingRequest
from slora_api.tenants.key_record import KeyRecord

__all__ = ["ANSWER_ERRORS", "answer_with", "prompt_maker"]

# The codes of AdapterFetchFailed are those of ModelNotFound, StoreUnavailable and AdapterCorrupt.
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

# Identifies the user of a request without the field `user`. If an alias splits requests, a user stays with one version.
_SESSION_HEADER = "x-session-id"


async def answer_with(
    request: Request,
    body: AnswerFields | EmbeddingRequest,
    key: KeyRecord,
    services: Services,
    answer: Callable[[ServedModel], Awaitable[Response]],
) -> Response:
    """Finds the model and answers. Retries once with a new lookup if the engine reports that the adapter does not
    exist.
    """
    user = body.user or request.headers.get(_SESSION_HEADER)
    model = await services.catalog.find_answering_model(key, body, user)
    try:
        return await answer(model)
    except AdapterFetchFailed as error:
        if error.code != "not_found":
            raise
        current = await services.catalog.find_answering_model(key, body, user, is_stale=True)
        if current.adapters == model.adapters:
            raise
        return await answer(current)


def prompt_maker(
    terms: ServiceTerms, meter: RequestMeter, services: Services, model: ServedModel
) -> PromptMaker:
    generator = services.generator
    tokenizer = services.prompt_tokenizer(terms.tenant, meter, model)
    return PromptMaker(terms, tokenizer, services.grammars, generator.limiter, generator.engine_info())
