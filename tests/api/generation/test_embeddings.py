"""/v1/embeddings, over an engine whose vectors the test chooses."""

import base64
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slora.core.errors import StepFailed
from slora.core.request import NOT_SAMPLED, EngineRequest, Pooling, PoolingKind
from slora_api.embeddings.routes import count_lanes
from tests.adapters.hand_made import SHAPE
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of, embed
from tests.api.served import ask_and_leave, wait_until

PATH = "/v1/embeddings"
TEXT = {"model": "base", "input": "hello"}
H = SHAPE.hidden_size


def vector_of(text: str, size: int = H) -> list[float]:
    """The scripted vector, as float32 numbers."""
    return list(array("f", (text.encode()[0] / 256 + place / 3 for place in range(size))))


def test_an_answer_has_openais_shape(platform: Platform, key: str) -> None:
    answer = post(platform, key, PATH, TEXT)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector_of("h")}],
        "model": "base",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    (request,) = platform.engine.requests
    assert request.sampling == NOT_SAMPLED and request.pooling == Pooling()


@pytest.mark.parametrize(
    ("given", "token_ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_inputs_are_texts_or_token_ids(
    platform: Platform, key: str, given: Any, token_ids: list[list[int]]
) -> None:
    answer = post(platform, key, PATH, {"model": "base", "input": given}).json()
    assert [request.prompt_token_ids for request in platform.engine.requests] == token_ids
    assert answer["usage"]["total_tokens"] == sum(map(len, token_ids))
    assert [one["index"] for one in answer["data"]] == list(range(len(token_ids)))


@pytest.mark.parametrize(
    ("fields", "pooling"),
    [
        ({}, Pooling()),
        ({"pooling": "mean"}, Pooling(PoolingKind.MEAN)),
        ({"pooling": "last", "dimensions": 3}, Pooling(dimensions=3)),
        ({"dimensions": H, "normalize": False}, Pooling(dimensions=H, normalize=False)),
        ({"use_activation": False}, Pooling(normalize=False)),
        ({"normalize": True, "use_activation": True, "dimensions": None}, Pooling()),
        ({"embed_dtype": "float32", "endianness": "little", "user": "u", "priority": 3}, Pooling()),
    ],
)
def test_fields_reach_the_engine(
    platform: Platform, key: str, fields: dict[str, Any], pooling: Pooling
) -> None:
    answer = post(platform, key, PATH, TEXT | fields)
    assert answer.status_code == 200, answer.text
    assert platform.engine.requests[-1].pooling == pooling
    assert platform.engine.requests[-1].priority == fields.get("priority", 0)
    assert len(answer.json()["data"][0]["embedding"]) == (pooling.dimensions or H)


def test_the_operator_sets_the_default_pooling(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine(), embedding_pooling="mean") as platform:
        key = platform.key("acme")
        for fields, kind in (({}, PoolingKind.MEAN), ({"pooling": "last"}, PoolingKind.LAST)):
            post(platform, key, PATH, TEXT | fields)
            pooling = platform.engine.requests[-1].pooling
            assert pooling is not None and pooling.kind is kind


# The server's context is 64 tokens, and its vectors have 24 components.
BAD = [
    ({"input": []}, "input", "not empty"),
    ({"input": [""]}, "input", "the input is empty; it needs at least one token"),
    ({"input": [1, "a"]}, "input", "a list of token ids"),
    ({"input": [[1], "a"]}, "input", "a list of token ids"),
    ({"input": {"a": 1}}, "input", "a list of token ids"),
    ({"input": "\ud800"}, "input", "lone surrogate"),
    (
        {"input": [257]},
        "input",
        "input has token id 257, which is out of vocabulary; this model's ids are 0 to 256",
    ),
    ({"input": [[1], [-1]]}, "input", "input has token id -1"),
    ({"input": [7] * 65}, "input", "input has 65 tokens"),
    ({"input": "x" * 100_000}, "input", "100000 characters"),
    ({"input": ["a"] * 2049}, "input", "`input` has 2049 inputs; this server accepts at most 2048"),
    ({"dimensions": 0}, "dimensions", "dimensions is 0; it must be at least 1"),
    ({"dimensions": 25}, "dimensions", "dimensions is 25; this model's embeddings have 24 (hidden_size)"),
    ({"dimensions": 10**30}, "dimensions", "dimensions"),
    ({"encoding_format": "float16"}, "encoding_format", "'float' or 'base64'"),
    ({"pooling": "max"}, "pooling", "'last' or 'mean'"),
    ({"normalize": 1}, "normalize", "boolean"),
    ({"normalize": True, "use_activation": False}, "normalize", "contradict each other"),
    ({"embed_dtype": "float16"}, "embed_dtype", "not supported"),
    ({"priority": 5000}, "priority", "from -1000 to 1000"),
    ({"prompt": "a"}, "prompt", "prompt"),
    ({"max_tokens": 3}, "max_tokens", "max_tokens"),
    ({"stream": True}, "stream", "stream"),
    ({"model": "base\ud800"}, "model", "surrogate"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_by_the_name_of_its_field(
    platform: Platform, key: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    content = json.dumps(TEXT | fields)
    answer = platform.api(key).post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and reason in error["message"], error
    assert not platform.engine.requests


def test_missing_fields_and_unknown_models_are_named(platform: Platform, key: str) -> None:
    for body, status, param in (
        ({"model": "base"}, 400, "input"),
        ({"input": "a"}, 400, "model"),
        ({"model": "nonesuch", "input": "a"}, 404, None),
    ):
        answer = post(platform, key, PATH, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_embeddings_too_large_for_one_answer_are_refused_before_they_are_computed(
    platform: Platform, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora_api.http.request_bounds.MAX_EMBEDDING_BYTES", 3000)
    body = {"model": "base", "input": ["a"] * 10}
    refused = post(platform, key, PATH, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    message = refused.json()["error"]["message"]
    assert "10 inputs, whose embeddings of 24 components take up to 6000 bytes" in message
    assert "at most 3000" in message and "`encoding_format: base64`" in message
    assert not platform.engine.requests
    for fields in ({"encoding_format": "base64"}, {"dimensions": 12}):
        assert post(platform, key, PATH, body | fields).status_code == 200


def test_an_adapter_answers_by_its_name_and_its_alias_and_as_default(platform: Platform) -> None:
    key = platform.key("owner", "mine")
    version = platform.upload(key, "mine").json()["version"]
    for model in ("mine", "mine@latest", f"mine@{version}", "default"):
        answer = post(platform, key, PATH, TEXT | {"model": model})
        assert answer.json()["model"] == model
        assert answer.headers["x-slora-adapter"] == f"mine@{version}"
        assert [one.tenant for one in platform.engine.requests[-1].versions] == [platform.tenant_id("owner")]
    answer = post(
        platform, key, PATH, TEXT | {"model": "base", "adapters": [{"name": "mine", "weight": 0.5}]}
    )
    assert answer.headers["x-slora-adapter"] == f"mine@{version}"
    assert [weight for _, weight in platform.engine.requests[-1].adapters] == [0.5]
    assert post(platform, platform.key("other"), PATH, TEXT | {"model": "mine"}).status_code == 404


def test_one_input_that_fails_ends_the_whole_request(platform: Platform, key: str) -> None:
    platform.engine.embeddings = lambda request: (
        [StepFailed("given up")] if request.prompt_token_ids == [98] else embed(request)
    )
    answer = post(platform, key, PATH, {"model": "base", "input": ["a", "b", *"cdef"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "step_failed")
    wait_until(lambda: platform.services.generator.limiter.num_generations == 0)


def test_a_client_that_disconnects_aborts_its_inputs(platform: Platform, key: str) -> None:
    platform.engine.embeddings, platform.engine.hang = lambda request: [], True
    body = {"model": "base", "input": ["a"] * 100}
    ask_and_leave(platform.api(key), PATH, lambda: len(platform.engine.hung) == 64, json=body)
    wait_until(lambda: len(platform.engine.aborted) == 64)
    assert len(platform.engine.requests) == 64
    wait_until(lambda: platform.services.generator.limiter.num_generations == 0)


def test_the_largest_list_holds_no_more_permits_than_lanes(platform: Platform, key: str) -> None:
    running, most = platform.services.generator.limiter, 0

    def count(request: EngineRequest) -> None:
        nonlocal most
        most = max(most, running.num_generations)

    platform.engine.on_request = count
    texts = [f"{chr(97 + n % 26)}{n}" for n in range(2048)]
    answer = post(platform, key, PATH, {"model": "base", "input": texts, "dimensions": 2})
    assert answer.status_code == 200
    data = answer.json()["data"]
    assert [one["embedding"] for one in data] == [vector_of(text, 2) for text in texts]
    assert len(platform.engine.requests) == 2048 and most == 64


def test_an_honest_tenant_is_answered_while_another_one_sends_the_largest_list(platform: Platform) -> None:
    """The hostile request waits in the engine, and has 1,984 inputs more."""
    key, honest = platform.key("hostile"), platform.key("honest")
    hostile = platform.tenant_id("hostile")
    platform.engine.embeddings = lambda request: [] if request.tenant == hostile else embed(request)
    platform.engine.hang = True
    body = {"model": "base", "input": ["a"] * 2048}
    ask_and_leave(platform.api(key), PATH, lambda: len(platform.engine.hung) == 64, json=body)
    platform.engine.hang = False
    assert post(platform, honest, PATH, TEXT).status_code == 200
    assert sum(one.tenant == hostile for one in platform.engine.requests) == 64


def set_quota(platform: Platform, tenant: str, **limits: int) -> None:
    assert platform.api(ADMIN_KEY).patch(f"/admin/tenants/{tenant}/quota", json=limits).status_code == 200


def test_quotas_charge_the_tokens_of_all_inputs_and_one_request(platform: Platform) -> None:
    key = platform.key("metered")
    set_quota(platform, "metered", tokens_per_minute=20, requests_per_minute=10, concurrent_answers=2)
    first = post(platform, key, PATH, {"model": "base", "input": ["hello", "you", "a"]})
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-limit-tokens"] == "20"
    used = platform.api(ADMIN_KEY).get("/admin/tenants/metered/quota").json()["used"]
    assert (used["requests_per_minute"], used["tokens_per_minute"], used["concurrent_answers"]) == (1, 9, 0)
    second = post(platform, key, PATH, {"model": "base", "input": "x" * 12})
    assert second.status_code == 429 and second.headers["x-ratelimit-remaining-requests"] == "9"
    third = post(platform, key, PATH, {"model": "base", "input": "x" * 21})
    assert third.status_code == 429
    message = third.json()["error"]["message"]
    assert "needs up to 21 tokens (its inputs)" in message and "fewer or shorter inputs" in message


def test_the_usage_journal_has_a_record_of_each_input(platform: Platform) -> None:
    key = platform.key("billed")
    post(platform, key, PATH, {"model": "base", "input": ["hello", "you"]})
    asked = {one.request_id for one in platform.engine.requests}
    wait_until(lambda: asked <= set(platform.engine.acknowledged))
    assert len(asked) == 2


def test_a_list_for_which_the_tenant_has_no_room_is_refused_before_it_is_tokenized(
    platform: Platform,
) -> None:
    """Born from a bug: it was refused after that, so a flood of such lists kept the tenant's threads busy."""
    key = platform.key("full")
    set_quota(platform, "full", concurrent_answers=3, requests_per_minute=5)
    # Only the tokenizer finds the text that has no token.
    texts = ["a"] * 99 + [""]
    ways = ((PATH, {"input": texts}), ("/v1/score", {"text_1": "a", "text_2": texts}))
    for path, body in ways:
        assert post(platform, key, path, {"model": "base"} | body).status_code == 400
    platform.engine.hang, platform.engine.answers = True, ([],)
    chat = {"model": "base", "messages": [{"role": "user", "content": "a"}]}

    def ask_while_full() -> bool:
        if len(platform.engine.hung) != 1:
            return False
        for path, body in ways * 3:
            refused = post(platform, key, path, {"model": "base"} | body)
            assert refused.status_code == 429, refused.text
            assert "1 answers in progress, and the limit is 3" in refused.json()["error"]["message"]
        return True

    ask_and_leave(platform.api(key), "/v1/chat/completions", ask_while_full, json=chat)


def test_a_model_that_cannot_embed_is_refused_by_name(tmp_path: Path) -> None:
    class Headless(ScriptedEngine):
        @property
        def info(self) -> Any:
            return replace(super().info, can_embed=False)

    with running_platform(tmp_path, Headless([deltas_of(b"Hi!")])) as platform:
        answer = post(platform, platform.key("acme"), PATH, TEXT)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
        assert "computes no embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_the_openai_package_reads_all_formats(
    platform: Platform, key: str, encoding_format: str | None
) -> None:
    """Without a format, the package asks for base64 and decodes it."""
    client = platform.sdk(key)
    fields: dict[str, Any] = {} if encoding_format is None else {"encoding_format": encoding_format}
    answer = client.embeddings.create(model="base", input=["hello", "you"], dimensions=4, **fields)
    assert answer.usage.total_tokens == 8 and [one.index for one in answer.data] == [0, 1]
    found = answer.data[1].embedding
    if isinstance(found, str):
        found = list(array("f", base64.b64decode(found)))
    assert found == pytest.approx(vector_of("y", 4), abs=1e-7)


def test_lanes_are_bounded_by_inputs_permits_and_quota() -> None:
    assert [count_lanes(*case) for case in ((1, 256, None), (2048, 256, None), (2048, 8, None))] == [1, 64, 8]
    assert [count_lanes(*case) for case in ((2048, 256, 3), (10, 256, 0))] == [3, 1]
