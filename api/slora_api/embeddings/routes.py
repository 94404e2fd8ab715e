"""/v1/embeddings, and /v1/score and /v1/rerank, which compare embeddings."""

import asyncio
import sys
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NotRequired, cast

import numpy as np
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from slora.core.request import NOT_SAMPLED, EngineRequest, FinishReason, Pooling, PoolingKind
from slora.core.request_check import check_embedded_tokens, check_pooling, check_terms
from slora_api.adapters.served_model import ServedModel
from slora_api.completions.inference_call import ANSWER_ERRORS, InferenceCall
from slora_api.completions.prompts import prompt_token_ids
from slora_api.completions.services import AnswerServices
from slora_api.core.threads import tenant_thread
from slora_api.embeddings.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from slora_api.http.json_slices import LongList, PartedResponse, write_json
from slora_api.http.openapi import json_body
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import InferenceKey
from slora_api.usage.usage_recorder import OpenRequest

# This many short texts are enough to fill the token budget of a step. By default, one tenant may have four times as
# many answers in progress.
_MAX_LANES = 64


@dataclass(slots=True)
class EmbeddedInput:
    """One input of a request. embedding: what `encode` of `compute_embeddings` returned; None until the engine has
    returned the embedding.

    num_cached, num_generated: token counts that `UsageRecorder` reads. Both stay 0, because an embedding arrives all at
    once.
    """

    request: EngineRequest
    embedding: str | LongList | bytes | None = None
    num_cached: int = 0
    num_generated: int = 0
    prompt_only: bool = False


def count_lanes(num_inputs: int, most_permits: int, most_answers: int | None) -> int:
    """Returns how many inputs of one request are computed at a time.

    most_permits: the maximum number of permits that a tenant may hold. most_answers: the tenant's quota of answers in
    progress, if any.
    """
    most = most_permits if most_answers is None else min(most_permits, most_answers)
    return max(1, min(num_inputs, _MAX_LANES, most))


async def run_lanes(
    requests: Iterator[EngineRequest], num_lanes: int, compute: Callable[[EmbeddedInput], Awaitable[None]]
) -> list[EmbeddedInput]:
    """Computes an embedding for each request, `num_lanes` at a time. Returns the inputs in the order of the requests.

    If an input fails, cancels the other inputs and raises the first error. If the caller is cancelled, cancels all
    inputs.
    """
    inputs: list[EmbeddedInput] = []

    async def run_lane() -> None:
        for request in requests:
            inputs.append(EmbeddedInput(request))
            await compute(inputs[-1])

    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(num_lanes):
                lanes.create_task(run_lane())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return inputs


async def _make_inputs(call: InferenceCall, body: EmbeddingRequest, pooling: Pooling) -> list[list[int]]:
    """Returns the token ids of each input. Raises BadRequest, RequestRefused, and the errors of the meter."""
    check_terms(call.priority, None, call.info)
    check_pooling(pooling, call.info)
    given, bounds = body.inputs, call.bounds
    dimensions = pooling.dimensions or call.info.shape.hidden_size
    bounds.check_embeddings(len(given), dimensions, is_base64=body.is_base64)
    call.meter.check_answers(1)
    for item in given:
        if isinstance(item, list) and not body.truncates:
            check_embedded_tokens(len(item), call.info.max_model_len)
    inputs = await prompt_token_ids(call, body, given, call.info.max_model_len, "input")
    for token_ids in inputs:
        check_embedded_tokens(len(token_ids), call.info.max_model_len)
    bounds.check_prompt_tokens(sum(map(len, inputs)), "input")
    return inputs


async def compute_embeddings(
    call: InferenceCall,
    inputs: Sequence[list[int]],
    pooling: Pooling,
    encode: Callable[[bytes], str | LongList | bytes],
) -> list[EmbeddedInput]:
    """Computes the embeddings of a request. Returns the inputs, in order, as soon as the usage of all of them is
    durable.

    A request may have thousands of inputs. Each lane sends one input to the engine and waits for the embedding before
    sending the next input. So a large request never holds more permits or sequences than it has lanes.

    inputs: the token ids of each input. encode: called with each embedding as it arrives.

    Raises the same errors as `compute_answers`. After an error, no engine request is left running.
    """
    generator = call.services.generator
    generator.usage.check()
    started_at = time.perf_counter()
    is_background = call.background_id is not None
    num_lanes = count_lanes(len(inputs), call.bounds.prompts, call.meter.most_answers)
    requests = (
        call.engine_request(index, token_ids, NOT_SAMPLED, pooling) for index, token_ids in enumerate(inputs)
    )
    sent: list[OpenRequest] = []

    async def compute(one: EmbeddedInput) -> None:
        sent.append(generator.usage.open(one, spending.open()))
        async with aclosing(generator.client.generate(one.request)) as deltas:
            async for arrived in deltas:
                for delta in arrived:
                    assert delta.embedding is not None, "the only delta has the embedding"
                    one.embedding = encode(delta.embedding)
        if not is_background:
            generator.metrics.finished(FinishReason.STOP, time.perf_counter() - started_at)

    async with call.meter.hold(sum(map(len, inputs)), 0, num_lanes, param="input") as spending:
        embedded = await run_lanes(requests, num_lanes, compute)
        await generator.usage.wait(sent)
    return embedded


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(TypedDict):
    """One embedding. embedding: the components as numbers; with `encoding_format: base64`, as little-endian float32 in
    base64.
    """

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """The embeddings of a request. data: one embedding for each input, in order. model: the name in the request."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class ScoreObject(TypedDict):
    """The score of one pair of texts, from -1 to 1."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage


class RerankedText(TypedDict):
    text: str


class RerankedDocument(TypedDict):
    """One document. index: its position in the request. relevance_score: from -1 to 1."""

    index: int
    relevance_score: float
    document: NotRequired[RerankedText]


class RerankedList(TypedDict):
    """The documents, the nearest first."""

    id: str
    model: str
    results: list[RerankedDocument]
    usage: EmbeddingUsage


def compare_embeddings(first: Sequence[EmbeddedInput], second: Sequence[EmbeddedInput]) -> list[float]:
    """Returns the cosine of each pair of embeddings, which have length 1 and are float32 in the byte order of the
    machine. A single first input is paired with each second input. 1,500 pairs of 4,096 components take 4 ms.
    """
    vectors = [np.frombuffer(cast(bytes, one.embedding), np.float32) for one in first]
    pairs = zip(vectors * (len(second) // len(first)), second, strict=True)
    return [float(left @ np.frombuffer(cast(bytes, one.embedding), np.float32)) for left, one in pairs]


def encode_embedding(embedding: bytes, *, is_base64: bool) -> str | LongList:
    """Returns the JSON value of one embedding. embedding: float32 in the byte order of the machine."""
    if not is_base64:
        return LongList(lambda: memoryview(embedding).cast("f"))
    if sys.byteorder == "big":
        numbers = array("f", embedding)
        numbers.byteswap()
        embedding = numbers.tobytes()
    return b64encode(embedding).decode("ascii")


def format_embeddings(
    model: str, embeddings: Sequence[str | LongList | bytes | None], num_tokens: int
) -> dict[str, object]:
    """Returns the JSON of an answer. embeddings: values from `encode_embedding`. num_tokens: tokens of all inputs."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(embeddings)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


router = APIRouter(tags=["embeddings"])


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(EmbeddingRequest, model="default", input=["a text", "another text"]),
)
async def embed(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Computes the embedding of one or several inputs."""
    call = await InferenceCall.open(request, key, services)
    body = await call.read(EmbeddingRequest.read_body, call.bounds.completion_json)
    encode = partial(encode_embedding, is_base64=body.is_base64)

    def write(model: ServedModel, inputs: list[EmbeddedInput], num_tokens: int) -> dict[str, Any]:
        return format_embeddings(model.asked_for, [one.embedding for one in inputs], num_tokens)

    return await _answer(call, body, encode, write)


@router.post(
    "/v1/score",
    response_model=ScoreList,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(
        ScoreRequest, model="default", text_1="a question", text_2=["a text", "another text"]
    ),
)
async def score(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Compares texts by the cosine of their embeddings."""
    call = await InferenceCall.open(request, key, services)
    sent = await call.read(ScoreRequest.read_body, call.bounds.completion_json)
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
    return await _answer(call, body, bytes, write)


@router.post("/rerank", response_model=RerankedList, include_in_schema=False)
@router.post(
    "/v1/rerank",
    response_model=RerankedList,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(
        RerankRequest, model="default", query="a question", documents=["a text", "another text"]
    ),
)
async def rerank(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Orders documents by the cosine of their embeddings with that of a query, the nearest first."""
    call = await InferenceCall.open(request, key, services)
    sent = await call.read(RerankRequest.read_body, call.bounds.completion_json)
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
    return await _answer(call, body, bytes, write)


def _envelope(prefix: str, model: ServedModel, num_tokens: int) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "model": model.asked_for,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


# Comparing the embeddings of 4,096 inputs and listing the scores takes up to 20 ms.
_MAX_INPUTS_ON_LOOP = 256

# Makes the JSON of an answer from the model, the inputs with their embeddings, and the number of their tokens.
_Write = Callable[[ServedModel, list[EmbeddedInput], int], dict[str, Any]]


async def _answer(
    call: InferenceCall,
    body: EmbeddingRequest,
    encode: Callable[[bytes], str | LongList | bytes],
    write: _Write,
) -> Response:
    """Computes the embeddings of a request, and answers with what `write` makes of them."""

    async def compute() -> list[bytes]:
        kind = PoolingKind(body.pooling or call.services.settings.embedding_pooling)
        pooling = Pooling(kind, body.dimensions, body.is_normalized)
        inputs = await _make_inputs(call, body, pooling)
        embedded = await compute_embeddings(call, inputs, pooling, encode)
        num_tokens = sum(map(len, inputs))
        if len(inputs) <= _MAX_INPUTS_ON_LOOP:
            answer = write(call.model, embedded, num_tokens)
        else:
            answer = await tenant_thread(call.tenant, write, call.model, embedded, num_tokens)
        return await write_json(answer, call.tenant, call.services.cpu_slots)

    async def answer() -> Response:
        return PartedResponse(await call.until_gone(compute()), call.model.headers)

    return await call.answer_with(body, answer)
