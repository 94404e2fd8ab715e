"""/v1/embeddings."""

from functools import partial

from fastapi import APIRouter, Request, Response

from slora.pooling import Pooling, PoolingKind
from slora_api.generation.embedding_format import EmbeddingList, encode_embedding, format_embeddings
from slora_api.generation.embedding_run import count_lanes
from slora_api.generation.generation import embedding_requests
from slora_api.generation.json_slices import write_json
from slora_api.generation.parted_response import PartedResponse
from slora_api.generation.prompts import PromptMaker
from slora_api.generation.served_model import ServedModel
from slora_api.generation.service_terms import ServiceTerms, background_id
from slora_api.generation.sse import unless_disconnected
from slora_api.http.json_body import read_json
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.routes.answers import ANSWER_ERRORS, answer_with, prompt_maker
from slora_api.routes.openapi import json_body
from slora_api.routes.services import Services, Wired, open_meter
from slora_api.schemas import EmbeddingRequest
from slora_api.tenants.authentication import InferenceKey
from slora_api.tenants.key_record import KeyRecord

__all__ = ["router"]

router = APIRouter(tags=["embeddings"])


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(EmbeddingRequest),
)
async def embed(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Computes the embedding of one or several inputs."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, EmbeddingRequest, bounds, bounds.completion_json)
    return await answer_with(
        request, body, key, services, lambda model: _embed(request, body, key, meter, services, model)
    )


async def _embed(
    request: Request,
    body: EmbeddingRequest,
    key: KeyRecord,
    meter: RequestMeter,
    services: Services,
    model: ServedModel,
) -> Response:
    terms = ServiceTerms(
        key.tenant, key.key_id, key.share, body.priority or 0, background_id=background_id(request)
    )
    maker = prompt_maker(request, terms, meter, services, model)
    work = _write_embeddings(body, terms, meter, services, model, maker)
    return PartedResponse(await unless_disconnected(request.receive, work), model.headers)


async def _write_embeddings(
    body: EmbeddingRequest,
    terms: ServiceTerms,
    meter: RequestMeter,
    services: Services,
    model: ServedModel,
    maker: PromptMaker,
) -> list[bytes]:
    """Computes the embeddings. Returns the parts of the answer's JSON."""
    kind = PoolingKind(body.pooling or services.settings.embedding_pooling)
    pooling = Pooling(kind, body.dimensions, body.is_normalized)
    inputs = await maker.embedding_inputs(body, pooling)
    num_tokens = sum(map(len, inputs))
    embedded = await services.generator.embed(
        terms,
        embedding_requests(terms, model, inputs, pooling),
        num_tokens,
        count_lanes(len(inputs), services.bounds().prompts, meter.most_answers),
        meter,
        partial(encode_embedding, is_base64=body.is_base64),
    )
    answer = format_embeddings(model.asked_for, [one.embedding for one in embedded], num_tokens)
    return await write_json(answer, terms.tenant, services.writing)
