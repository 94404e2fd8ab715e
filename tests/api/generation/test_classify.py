"""/v1/classify, and /v1/score and /v1/rerank of an adapter with a head, in the form of vLLM."""

import json
import tracemalloc
from array import array
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slora.core.request import EngineRequest, FinishReason, PoolingKind, TokenDelta
from slora_api.adapters.command import describe_push
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors
from tests.api.platform import Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine

CLASSIFY = "/v1/classify"
NAMED = {"id2label": {"0": "ham", "1": "spam", "2": "eggs"}}


def add(
    platform: Platform, key: str, name: str, num_labels: int, config: dict[str, Any] | None = None
) -> Any:
    """Uploads an adapter with a head."""
    head = {"base_model.model.score.weight": np.ones((num_labels, SHAPE.hidden_size), np.float32)}
    files = {} if config is None else {"config_dot_json": json.dumps(config)}
    saved = make_config(modules_to_save=["classifier", "score"], task_type="SEQ_CLS")
    answer = platform.upload(key, name, make_members(saved, make_tensors(seed=num_labels) | head, **files))
    return answer


def logits_of(request: EngineRequest) -> list[TokenDelta | Exception]:
    """The logit of each label is the number of tokens with its id, and for one label the number of tokens."""
    assert request.pooling is not None and request.pooling.kind is PoolingKind.CLASSIFY
    text = bytes(request.prompt_token_ids).decode()
    values = [text.count(mark) for mark in "012"] if "|" not in text else [len(text) - 5]
    return [TokenDelta((), FinishReason.STOP, embedding=array("f", values).tobytes())]


@pytest.fixture(autouse=True)
def head(platform: Platform) -> None:
    platform.engine.embeddings = logits_of


def test_texts_are_classified_with_the_names_of_their_labels(platform: Platform, key: str) -> None:
    made = add(platform, key, "mail", 3, NAMED).json()
    assert "config.json (labels)" in made["certificate"]["uses"], made
    assert "a head for 3 labels" in made["certificate"]["uses"]
    assert describe_push(made).endswith('Call /v1/classify with model="mail".')
    answer = post(platform, key, CLASSIFY, {"model": "mail", "input": ["011", "222"]}).json()
    assert answer["id"].startswith("classify-") and (answer["object"], answer["model"]) == ("list", "mail")
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "total_tokens": 6,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    first, second = answer["data"]
    total = exp(1) + exp(2) + 1
    assert first["probs"] == pytest.approx([exp(1) / total, exp(2) / total, 1 / total])
    assert (first["index"], first["label"], first["num_classes"]) == (0, "spam", 3)
    assert (second["index"], second["label"]) == (1, "eggs")
    raw = post(platform, key, "/classify", {"model": "mail", "input": "011", "use_activation": False}).json()
    assert raw["data"][0]["probs"] == [1.0, 2.0, 0.0]
    (engine_request,) = platform.engine.requests[-1:]
    assert engine_request.pooling is not None and not engine_request.pooling.normalize


@pytest.mark.parametrize(
    ("config", "label", "probs"),
    [
        (None, "LABEL_1", None),
        (
            NAMED | {"problem_type": "multi_label_classification"},
            "spam",
            [1 / (1 + exp(-n)) for n in (1, 2, 0)],
        ),
        (NAMED | {"problem_type": "regression"}, "spam", [1.0, 2.0, 0.0]),
    ],
)
def test_config_json_decides_on_labels_and_activation(
    platform: Platform, key: str, config: dict[str, Any] | None, label: str, probs: list[float] | None
) -> None:
    assert add(platform, key, "mail", 3, config).status_code == 201
    (made,) = post(platform, key, CLASSIFY, {"model": "mail", "input": "011"}).json()["data"]
    assert made["label"] == label
    assert made["probs"] == pytest.approx(probs) if probs else sum(made["probs"]) == pytest.approx(1)


def test_a_head_of_one_label_scores_pairs(platform: Platform, key: str) -> None:
    pushed = describe_push(add(platform, key, "judge", 1).json())
    assert pushed.endswith('Call /v1/score, /v1/rerank or /v1/classify with model="judge".')
    body = {"model": "judge", "text_1": "0|", "text_2": ["1", "1111"]}
    made = post(platform, key, "/v1/score", body).json()
    assert [one["score"] for one in made["data"]] == pytest.approx([1 / (1 + exp(2)), 1 / (1 + exp(-1))])
    assert made["usage"]["prompt_tokens"] == 9
    assert [bytes(one.prompt_token_ids) for one in platform.engine.requests[-2:]] == [b"0|1", b"0|1111"]
    ranked = post(
        platform, key, "/v1/rerank", {"model": "judge", "query": "0|", "documents": ["1", "1111"]}
    ).json()
    assert [one["index"] for one in ranked["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"),
    [
        (CLASSIFY, {"model": "base", "input": "a"}, "`base` has no head that classifies texts", "model"),
        (CLASSIFY, {"model": "mail", "input": "x" * 65}, "maximum context length is 64 tokens", "input"),
        (CLASSIFY, {"model": "mail", "input": []}, "input", "input"),
        (CLASSIFY, {"model": "mail", "input": ["a"] * 3000}, "3000 inputs", "input"),
        (CLASSIFY, {"model": "mail"}, "is missing", "input"),
        (CLASSIFY, {"model": "mail", "input": "a", "inputs": 1}, "did you mean `input`", "inputs"),
        ("/v1/score", {"model": "mail", "text_1": "a", "text_2": "b"}, "a head for 3 labels", "model"),
        ("/v1/rerank", {"model": "mail", "query": "a", "documents": ["b"]}, "a head for 3 labels", "model"),
    ],
)
def test_what_cannot_be_classified_is_refused_by_name(
    platform: Platform, key: str, path: str, fields: dict[str, Any], message: str, param: str
) -> None:
    assert add(platform, key, "mail", 3).status_code == 201
    answer = post(platform, key, path, fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert not platform.engine.requests


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": {"0": "ham"}}, "id2label must name the labels 0 to 2"),
        ({"id2label": ["ham", "spam", "eggs"]}, "id2label must name the labels 0 to 2"),
        ({"id2label": {"0": 1, "1": 2, "2": 3}}, "a label of id2label is not a text"),
        ({"id2label": NAMED["id2label"] | {"1": "s" * 513}}, "of 513 characters; accepted are at most 512"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'"),
    ],
)
def test_labels_that_do_not_fit_the_head_are_refused(
    platform: Platform, key: str, config: dict[str, Any], message: str
) -> None:
    answer = add(platform, key, "mail", 3, config)
    assert answer.status_code == 422 and message in answer.text, answer.text


def test_sampling_defaults_cannot_pretend_to_be_a_head(platform: Platform, key: str) -> None:
    defaults = json.dumps({"num_labels": 10**12, "id2label": [1], "top_p": 0.5})
    members = make_members(generation_config_dot_json=defaults)
    assert platform.upload(key, "plain", members).status_code == 201
    answer = post(platform, key, CLASSIFY, {"model": "plain", "input": "a"})
    assert answer.status_code == 400 and "has no head" in answer.json()["error"]["message"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kept", [1, 3, 5, 6, 20])
def test_pairs_are_truncated_as_whole_texts(platform: Platform, key: str, side: str, kept: int) -> None:
    assert add(platform, key, "judge", 1).status_code == 201
    platform.engine.embeddings = lambda _: [TokenDelta((), FinishReason.STOP, embedding=bytes(4))]
    fields = {"truncate_prompt_tokens": kept, "truncation_side": side}
    made = post(
        platform, key, "/v1/score", {"model": "judge", "text_1": "abcd", "text_2": ["wxyz", "", "v"]} | fields
    )
    assert made.status_code == 200, made.text
    expected = [text[-kept:] if side == "left" else text[:kept] for text in ("abcdwxyz", "abcd", "abcdv")]
    assert [bytes(one.prompt_token_ids).decode() for one in platform.engine.requests[-3:]] == expected


def test_pairs_are_joined_only_if_they_fit(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.max_model_len = 20_000
    engine.embeddings = lambda _: [TokenDelta((), FinishReason.STOP, embedding=bytes(4))]
    with running_platform(tmp_path, engine) as platform:
        key = platform.key("acme")
        assert add(platform, key, "judge", 1).status_code == 201
        query, documents = "q" * 19_000, ["d"] * 400
        fields = {"model": "judge", "query": query, "documents": documents}
        tracemalloc.start()
        try:
            long = post(platform, key, "/v1/rerank", fields)
            cut = post(platform, key, "/v1/rerank", fields | {"truncate_prompt_tokens": 16})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (long.status_code, cut.status_code) == (400, 200), cut.text
    assert "`documents` has 7600400 tokens in all its pairs together" in long.text
    assert {bytes(one.prompt_token_ids) for one in engine.requests} == {b"q" * 16}
    assert peak < 30 << 20
