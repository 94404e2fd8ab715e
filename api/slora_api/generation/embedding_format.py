"""Formats embeddings as the JSON of OpenAI's API. This module does not depend on HTTP."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Literal

from typing_extensions import TypedDict

from slora_api.generation.json_slices import LongList

__all__ = ["EmbeddingList", "encode_embedding", "format_embeddings"]


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
    model: str, embeddings: Sequence[str | LongList | None], num_tokens: int
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
