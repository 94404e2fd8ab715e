"""Formats embeddings as the JSON of OpenAI's API. This module does not depend on HTTP."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Literal, NotRequired, cast

import numpy as np
from typing_extensions import TypedDict

from slora_api.embeddings.embedding_run import EmbeddedInput
from slora_api.http.json_slices import LongList


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
