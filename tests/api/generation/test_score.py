"""/v1/score and /v1/rerank compare texts by the cosine of their embeddings, in vLLM's form."""

from array import array
from math import sqrt
from typing import Any

import pytest

from slora.core.request import EngineRequest, FinishReason, TokenDelta
from tests.api.platform import Platform, post

SCORE, RERANK = "/v1/score", "/v1/rerank"


def embed(request: EngineRequest) -> list[TokenDelta | Exception]:
    """A vector of length 1 in a plane: `0` to `9` are angles from 0 to 90 degrees in steps."""
    part = (request.prompt_token_ids[0] - ord("0")) / 9
    assert request.pooling is not None and request.pooling.normalize
    return [TokenDelta((), FinishReason.STOP, embedding=array("f", [sqrt(1 - part * part), part]).tobytes())]


@pytest.fixture(autouse=True)
def plane(platform: Platform) -> None:
    platform.engine.embeddings = embed


def scores(platform: Platform, key: str, first: Any, second: Any) -> list[float]:
    answer = post(platform, key, SCORE, {"model": "base", "text_1": first, "text_2": second})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    num_texts = sum(len(texts) if isinstance(texts, list) else 1 for texts in (first, second))
    assert made["usage"] == {"prompt_tokens": num_texts, "total_tokens": num_texts}
    assert (made["object"], made["model"], made["id"][:6]) == ("list", "base", "score-")
    assert [one["index"] for one in made["data"]] == list(range(len(made["data"])))
    return [one["score"] for one in made["data"]]


def test_texts_are_scored_pair_by_pair(platform: Platform, key: str) -> None:
    assert scores(platform, key, "0", "0") == [1.0]
    assert scores(platform, key, "0", ["9", "0"]) == [0.0, 1.0]
    assert scores(platform, key, ["9"], ["9", "0"]) == [1.0, 0.0]
    assert scores(platform, key, ["0", "9", "9"], ["0", "9", "0"]) == [1.0, 1.0, 0.0]
    assert scores(platform, key, "9", "3")[0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("path", [RERANK, "/rerank"])
def test_documents_are_ordered_by_their_score(platform: Platform, key: str, path: str) -> None:
    body = {"model": "base", "query": "9", "documents": ["0", {"text": "9"}, "5", "7"]}
    made = post(platform, key, path, body).json()
    assert [one["index"] for one in made["results"]] == [1, 3, 2, 0]
    assert [one["document"]["text"] for one in made["results"]] == ["9", "7", "5", "0"]
    assert made["results"][1]["relevance_score"] == pytest.approx(7 / 9)
    assert made["usage"]["total_tokens"] == 5
    best = post(platform, key, path, body | {"top_n": 1, "return_documents": False}).json()
    assert best["results"] == [{"index": 1, "relevance_score": 1.0}]


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"),
    [
        (SCORE, {"text_1": ["0", "1"], "text_2": ["0"]}, "`text_1` has 2 texts and `text_2` has 1", "text_1"),
        (SCORE, {"text_1": [], "text_2": ["0"]}, "`text_1` has 0 texts", "text_1"),
        (SCORE, {"text_1": "0"}, "is missing", "text_2"),
        (SCORE, {"text_1": "0" * 65, "text_2": "x"}, "text_1 has 65 tokens", "text_1"),
        (SCORE, {"text_1": "0", "text_2": "x" * 9999}, "`text_2` has 9999 characters", "text_2"),
        (RERANK, {"query": "0", "documents": ["0", "1" * 65]}, "documents has 65 tokens", "documents"),
        (SCORE, {"text_1": "0", "text_2": ["0"] * 3000}, "`text_2` has 3000 inputs", "text_2"),
        (RERANK, {"query": "0", "documents": []}, "it is empty; send at least one entry.", "documents"),
        (RERANK, {"query": "0", "documents": ["0"] * 3000}, "`documents` has 3000 inputs", "documents"),
        (RERANK, {"query": "0", "documents": [{"image": "x"}]}, "is missing", "documents.0.text"),
        (RERANK, {"query": "0", "documents": ["0"], "top_k": 1}, "did you mean `top_n`", "top_k"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(
    platform: Platform, key: str, path: str, fields: dict[str, Any], message: str, param: str
) -> None:
    answer = post(platform, key, path, {"model": "base", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and message in error["message"]
    assert not platform.engine.requests
