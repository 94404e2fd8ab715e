"""/v1/embeddings, /v1/classify, and /v1/score and /v1/rerank, which compare embeddings or classify pairs."""

import asyncio
import operator
import sys
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NotRequired, TypeVar, cast

import numpy as np
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from slora.core.errors import RequestRefused
from slora.core.request import NOT_SAMPLED, EngineRequest, FinishReason, Pooling, PoolingKind
from slora.core.request_check import check_embedded_tokens, check_pooling, check_terms
from slora.text.generation_defaults import Classifier
from slora_api.adapters.served_model import ServedModel
from slora_api.completions.inference_call import ANSWER_ERRORS, InferenceCall
from slora_api.completions.prompt_fields import PromptFields
from slora_api.completions.prompt_tokenizer import count_long_request, encode_texts
from slora_api.completions.prompts import prompt_token_ids
from slora_api.completions.schemas import ModelFields
from slora_api.completions.services import AnswerServices
from slora_api.core.errors import BadRequest
from slora_api.core.threads import tenant_thread
from slora_api.embeddings.schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreFields,
    ScoreRequest,
)
from slora_api.http.json_slices import LongList, PartedResponse, write_json
from slora_api.http.openapi import json_body
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import InferenceKey
from slora_api.usage.usage_recorder import UnrecordedRequest

T = TypeVar("T")

# This many short texts are enough to fill the token budget of a step. By default, one tenant may have four times as
# many answers in progress.
_MAX_LANES = 64
# Joining pairs of this many ids takes 1 ms.
_IDS_AT_ONCE = 1 << 15


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


def _count_lanes_of(call: InferenceCall, num_inputs: int) -> int:
    return count_lanes(num_inputs, call.bounds.prompts, call.meter.most_answers)


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


@dataclass(frozen=True, slots=True)
class _SentInputs:
    """The inputs of a request: `num_first` from the field `first`, and then the others from the field `second`."""

    given: Sequence[str | list[int]]
    num_first: int = 0
    first: str = "input"
    second: str = "input"

    @property
    def parts(self) -> Iterator[tuple[str, Sequence[str | list[int]]]]:
        """The fields that have inputs, with their inputs."""
        if self.num_first:
            yield self.first, self.given[: self.num_first]
        yield self.second, self.given[self.num_first :]


async def _make_inputs(
    call: InferenceCall,
    body: PromptFields,
    sent: _SentInputs,
    pooling: Pooling,
    *,
    is_base64: bool = False,
    is_paired: bool = False,
) -> list[list[int]]:
    """Returns the token ids of each input. Raises BadRequest, RequestRefused, and the errors of the meter.

    is_paired: the inputs are pairs of texts. A single first text is paired with each second text.
    """
    given = sent.given
    check_terms(call.priority, None, call.info)
    check_pooling(pooling, call.info)
    classifier = call.model.classifier
    dimensions = pooling.dimensions or call.info.shape.hidden_size
    if pooling.kind is PoolingKind.CLASSIFY and classifier is not None:
        dimensions = len(classifier.labels)
    call.bounds.check_embeddings(len(given), dimensions, is_base64=is_base64, param=sent.second)
    call.meter.check_answers(1)
    for item in given:
        if isinstance(item, list) and not body.truncates:
            check_embedded_tokens(len(item), call.info.max_model_len)
    if isinstance(given[0], str):
        # Each field is tokenized alone, but the request is counted once, with all texts.
        num_inputs = len(given) - sent.num_first if is_paired else len(given)
        await count_long_request(call, cast(Sequence[str], given), _count_lanes_of(call, num_inputs))
    if is_paired:
        return await _join_pairs(call, body, sent)
    inputs: list[list[int]] = []
    for param, part in sent.parts:
        inputs += await prompt_token_ids(call, body, part, call.info.max_model_len, param)
        for token_ids in inputs[-len(part) :]:
            check_embedded_tokens(len(token_ids), call.info.max_model_len, param)
    call.bounds.check_prompt_tokens(sum(map(len, inputs)), sent.second, "input")
    return inputs


async def _join_pairs(call: InferenceCall, body: PromptFields, sent: _SentInputs) -> list[list[int]]:
    """Returns the checked token ids of each pair of texts, as the tokenizer writes a pair.

    The lengths are checked before the pairs are joined: 2,048 pairs with a long first text can have 1,000 times as many
    tokens as the request.
    """
    ids: list[list[int]] = []
    for param, part in sent.parts:
        ids += await encode_texts(call, cast(Sequence[str], part), add_special_tokens=False, param=param)
    num_first = sent.num_first
    tokenizer, room = call.encoder.tokenizer, call.info.max_model_len
    join = operator.add if body.add_special_tokens is False else tokenizer.join_pair
    num_special = len(join([], []))
    pairs = _pair([len(text) for text in ids], num_first)
    num_tokens = [body.count_kept(num_special + one + two, room) for one, two in pairs]
    what = f"a pair of {sent.first} and {sent.second}"
    for count in num_tokens:
        check_embedded_tokens(count, call.info.max_model_len, sent.second, what)
    call.bounds.check_prompt_tokens(sum(num_tokens), sent.second, "pair")
    joined: list[list[int]] = []
    num_joined = 0
    # No token that is cut from a single text would be kept in a pair.
    for first, second in _pair([body.truncate(text, room) for text in ids], num_first):
        joined.append(body.truncate(join(first, second), room))
        num_joined += len(joined[-1])
        if num_joined > _IDS_AT_ONCE:
            num_joined = 0
            await asyncio.sleep(0)
    return joined


def _pair(parts: Sequence[T], num_first: int) -> Iterator[tuple[T, T]]:
    """Pairs the first parts with the others. A single first part is paired with each of the others."""
    first, second = parts[:num_first], parts[num_first:]
    return zip([*first] * (len(second) // len(first)), second, strict=True)


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
    num_lanes = _count_lanes_of(call, len(inputs))
    requests = (
        call.engine_request(index, token_ids, NOT_SAMPLED, pooling) for index, token_ids in enumerate(inputs)
    )
    sent: list[UnrecordedRequest] = []

    async def compute(one: EmbeddedInput) -> None:
        sent.append(generator.usage.open(one, spending.open()))
        async with aclosing(generator.client.generate(one.request)) as deltas:
            async for arrived in deltas:
                for delta in arrived:
                    assert delta.embedding is not None, "the only delta has the embedding"
                    one.embedding = encode(delta.embedding)
        if not is_background:
            generator.metrics.count_finished(FinishReason.STOP, time.perf_counter() - started_at)

    async with call.meter.hold(sum(map(len, inputs)), 0, num_lanes, param="input") as spending:
        with call.naming_adapters():
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


class ClassObject(TypedDict):
    """The class of one input. label: the most probable one. probs: one for each label, in order. num_classes: how many
    labels the head has.
    """

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationUsage(EmbeddingUsage):
    completion_tokens: int
    prompt_tokens_details: None


class ClassList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassObject]
    usage: ClassificationUsage


class ScoreObject(TypedDict):
    """The score of one pair of texts: from -1 to 1, or from 0 to 1 if an adapter's head computes it."""

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
    """One document. index: its position in the request. relevance_score: as for `ScoreObject`."""

    index: int
    relevance_score: float
    document: NotRequired[RerankedText]


class RerankedList(TypedDict):
    """The documents, the nearest first."""

    id: str
    model: str
    results: list[RerankedDocument]
    usage: EmbeddingUsage


def score_labels(logits: bytes, activation: str) -> list[float]:
    """Returns the score of each label. logits: float32 in the byte order of the machine."""
    values = np.frombuffer(logits, np.float32).astype(np.float64)
    if activation == "softmax":
        values = np.exp(values - values.max())
        values /= values.sum()
    elif activation == "sigmoid":
        # A form that does not overflow.
        values = np.exp(-np.logaddexp(0.0, -values))
    scores: list[float] = values.tolist()
    return scores


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


@router.post("/classify", response_model=ClassList, include_in_schema=False)
@router.post(
    "/v1/classify",
    response_model=ClassList,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(ClassifyRequest, model="my-classifier", input=["a text", "another text"]),
)
async def classify(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Classifies texts with the head of an adapter."""
    call = await InferenceCall.open(request, key, services)
    body = await call.read(ClassifyRequest.read_body, call.bounds.completion_json)

    async def compute() -> list[bytes]:
        classifier = _find_classifier(call.model)
        inputs = await _make_inputs(call, body, _SentInputs(body.inputs), _CLASSIFY)
        classified = await compute_embeddings(call, inputs, _CLASSIFY, bytes)
        num_tokens = sum(map(len, inputs))
        activation = "none" if body.use_activation is False else classifier.activation

        def write() -> dict[str, Any]:
            answer = _envelope("classify", call.model, num_tokens)
            answer["usage"] |= {"completion_tokens": 0, "prompt_tokens_details": None}
            return answer | {
                "object": "list",
                "created": int(time.time()),
                "data": [
                    _write_class(index, cast(bytes, one.embedding), classifier, activation)
                    for index, one in enumerate(classified)
                ],
            }

        return await _write_answer(call, write, len(inputs))

    return await _respond(call, body, compute)


def _find_classifier(model: ServedModel) -> Classifier:
    if model.classifier is None:
        raise BadRequest(
            f"`{model.asked_for}` has no head that classifies texts; name an adapter that was trained with "
            "task_type SEQ_CLS.",
            "model",
        )
    return model.classifier


def _write_class(index: int, logits: bytes, classifier: Classifier, activation: str) -> ClassObject:
    best = int(np.frombuffer(logits, np.float32).argmax())
    scores = score_labels(logits, activation)
    return {
        "index": index,
        "label": classifier.labels[best],
        "probs": scores,
        "num_classes": len(scores),
    }


@router.post(
    "/v1/score",
    response_model=ScoreList,
    responses=ANSWER_ERRORS,
    openapi_extra=json_body(
        ScoreRequest, model="default", text_1="a question", text_2=["a text", "another text"]
    ),
)
async def score(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Compares texts by the cosine of their embeddings, or by the head of an adapter."""
    call = await InferenceCall.open(request, key, services)
    sent = await call.read(ScoreRequest.read_body, call.bounds.completion_json)

    def write(scores: list[float], num_tokens: int) -> dict[str, Any]:
        return _envelope("score", call.model, num_tokens) | {
            "object": "list",
            "created": int(time.time()),
            "data": [
                {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
            ],
        }

    texts = _SentInputs([*sent.text_1, *sent.text_2], len(sent.text_1), "text_1", "text_2")
    return await _answer_scores(call, sent, texts, write)


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
    """Orders documents by their scores with a query, the highest first. See `score`."""
    call = await InferenceCall.open(request, key, services)
    sent = await call.read(RerankRequest.read_body, call.bounds.completion_json)
    texts = [document.text for document in sent.documents]

    def write(scores: list[float], num_tokens: int) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": index, "relevance_score": scores[index], "document": {"text": texts[index]}}
            for index in order[: sent.top_n or None]
        ]
        if sent.return_documents is False:
            results = [{"index": one["index"], "relevance_score": one["relevance_score"]} for one in results]
        return _envelope("rerank", call.model, num_tokens) | {"results": results}

    return await _answer_scores(call, sent, _SentInputs([sent.query, *texts], 1, "query", "documents"), write)


def _envelope(prefix: str, model: ServedModel, num_tokens: int) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "model": model.asked_for,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


# Comparing the embeddings of 4,096 inputs and listing the scores takes up to 20 ms.
_MAX_INPUTS_ON_LOOP = 256

_CLASSIFY = Pooling(PoolingKind.CLASSIFY, normalize=False)

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
        pooling = _choose_pooling(call, body)
        sent = _SentInputs(body.inputs)
        inputs = await _make_inputs(call, body, sent, pooling, is_base64=body.is_base64)
        embedded = await compute_embeddings(call, inputs, pooling, encode)
        num_tokens = sum(map(len, inputs))
        return await _write_answer(call, partial(write, call.model, embedded, num_tokens), len(inputs))

    return await _respond(call, body, compute)


async def _answer_scores(
    call: InferenceCall,
    fields: ScoreFields,
    sent: _SentInputs,
    write: Callable[[list[float], int], dict[str, Any]],
) -> Response:
    """Scores pairs of texts, and answers with what `write` makes of the scores and the number of tokens."""
    num_first = sent.num_first
    body = fields.embedding_request(cast(list[str], sent.given))

    async def compute() -> list[bytes]:
        classifier = call.model.classifier
        if classifier is not None and len(classifier.labels) != 1:
            raise BadRequest(
                f"`{call.model.asked_for}` has a head for {len(classifier.labels)} labels, and a score needs a head "
                "for one label. Send the texts to /v1/classify.",
                "model",
            )
        pooling = _choose_pooling(call, body) if classifier is None else _CLASSIFY
        is_paired = classifier is not None
        inputs = await _make_inputs(call, body, sent, pooling, is_base64=True, is_paired=is_paired)
        try:
            found = await compute_embeddings(call, inputs, pooling, bytes)
        except RequestRefused as error:
            if error.param == "input":
                error.param = sent.second
            raise

        def finish() -> dict[str, Any]:
            if classifier is None:
                scores = compare_embeddings(found[:num_first], found[num_first:])
            else:
                scores = [score_labels(cast(bytes, one.embedding), classifier.activation)[0] for one in found]
            return write(scores, sum(map(len, inputs)))

        return await _write_answer(call, finish, len(inputs))

    return await _respond(call, body, compute)


def _choose_pooling(call: InferenceCall, body: EmbeddingRequest) -> Pooling:
    kind = PoolingKind(body.pooling or call.services.settings.embedding_pooling)
    return Pooling(kind, body.dimensions, body.is_normalized)


async def _write_answer(
    call: InferenceCall, write: Callable[[], dict[str, Any]], num_inputs: int
) -> list[bytes]:
    answer = write() if num_inputs <= _MAX_INPUTS_ON_LOOP else await tenant_thread(call.tenant, write)
    return await write_json(answer, call.tenant, call.services.cpu_slots)


async def _respond(
    call: InferenceCall, body: ModelFields, compute: Callable[[], Coroutine[Any, Any, list[bytes]]]
) -> Response:
    async def answer() -> Response:
        return PartedResponse(await call.until_gone(compute()), call.model.headers)

    return await call.answer_with(body, answer)
