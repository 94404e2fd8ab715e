"""/v1/embeddings, and /v1/score and /v1/rerank, which compare embeddings."""

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from slora.core.request import Pooling, PoolingKind
from slora_api.adapters.served_model import ServedModel
from slora_api.completions.answers import ANSWER_ERRORS, answer_with, prompt_maker
from slora_api.completions.generation import embedding_requests
from slora_api.completions.service_terms import ServiceTerms, background_id
from slora_api.embeddings.embedding_format import (
    EmbeddingList,
    RerankedList,
    ScoreList,
    compare_embeddings,
    encode_embedding,
    format_embeddings,
)
from slora_api.embeddings.embedding_run import EmbeddedInput, count_lanes
from slora_api.embeddings.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from slora_api.http.json_body import read_json
from slora_api.http.json_slices import LongList, write_json
from slora_api.http.openapi import json_body
from slora_api.http.parted_response import PartedResponse
from slora_api.http.sse import unless_disconnected
from slora_api.keys.authentication import InferenceKey
from slora_api.keys.key_record import KeyRecord
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.serve.services import Services, Wired, open_meter

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
    body = await read_json(request, EmbeddingRequest.read_body, bounds, bounds.completion_json)
    encode = partial(encode_embedding, is_base64=body.is_base64)

    def write(model: ServedModel, inputs: list[EmbeddedInput], num_tokens: int) -> dict[str, Any]:
        return format_embeddings(model.asked_for, [one.embedding for one in inputs], num_tokens)

    return await _answer(request, body, key, meter, services, encode, write)


@router.post(
    "/v1/score", response_model=ScoreList, responses=ANSWER_ERRORS, openapi_extra=json_body(ScoreRequest)
)
async def score(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Compares texts by the cosine of their embeddings."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    sent = await read_json(request, ScoreRequest.read_body, bounds, bounds.completion_json)
    num_first = len(sent.text_1)

    def write(model: ServedModel, inputs: list[EmbeddedInput], num_tokens: int) -> dict[str, Any]:
        scores = compare_embeddings(inputs[:num_first], inputs[num_first:])
        return _envelope("score", model, num_tokens) | {
            "object": "list",
            "created": int(time.time()),
            "data": [
                {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
            ],
        }

    body = sent.embedding_request([*sent.text_1, *sent.text_2])
    return await _answer(request, body, key, meter, services, bytes, write)


@router.post("/rerank", response_model=RerankedList, include_in_schema=False)
@router.post(
    "/v1/rerank",
    response_model=RerankedList,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(RerankRequest),
)
async def rerank(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Orders documents by the cosine of their embeddings with that of a query, the nearest first."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    sent = await read_json(request, RerankRequest.read_body, bounds, bounds.completion_json)
    texts = [document.text for document in sent.documents]

    def write(model: ServedModel, inputs: list[EmbeddedInput], num_tokens: int) -> dict[str, Any]:
        scores = compare_embeddings(inputs[:1], inputs[1:])
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": index, "relevance_score": scores[index], "document": {"text": texts[index]}}
            for index in order[: sent.top_n or None]
        ]
        if sent.return_documents is False:
            results = [{"index": one["index"], "relevance_score": one["relevance_score"]} for one in results]
        return _envelope("rerank", model, num_tokens) | {"results": results}

    body = sent.embedding_request([sent.query, *texts])
    return await _answer(request, body, key, meter, services, bytes, write)


def _envelope(prefix: str, model: ServedModel, num_tokens: int) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "model": model.asked_for,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


# Makes the JSON of an answer from the model, the inputs with their embeddings, and the number of their tokens.
_Write = Callable[[ServedModel, list[EmbeddedInput], int], dict[str, Any]]


async def _answer(
    request: Request,
    body: EmbeddingRequest,
    key: KeyRecord,
    meter: RequestMeter,
    services: Services,
    encode: Callable[[bytes], str | LongList | bytes],
    write: _Write,
) -> Response:
    """Computes the embeddings of a request, and answers with what `write` makes of them."""

    async def answer(model: ServedModel) -> Response:
        terms = ServiceTerms(
            key.tenant, key.key_id, key.share, body.priority or 0, background_id=background_id(request)
        )
        maker = prompt_maker(request, terms, meter, services, model)

        async def compute() -> list[bytes]:
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
                encode,
            )
            return await write_json(write(model, embedded, num_tokens), key.tenant, services.writing)

        return PartedResponse(await unless_disconnected(request.receive, compute()), model.headers)

    return await answer_with(request, body, key, services, answer)
