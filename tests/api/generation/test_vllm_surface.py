"""Fields and routes that clients of vLLM's server use, in vLLM's form."""

import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from slora.request import FinishReason, TokenDelta, TokenLogprobs
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import EOS, ScriptedEngine, deltas_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": "base", "prompt": "hello"}
MESSAGES = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}
BOTH = pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
RENDERED = list(b"[user]hello")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("data"), ScriptedEngine()) as running:
        yield running


@pytest.fixture
def platform(shared: Platform) -> Platform:
    """The shared server, with its scripted engine reset."""
    shared.engine.answers, shared.engine.ready = [deltas_of(b"Hi!", FinishReason.STOP)], True
    shared.engine.requests.clear()
    return shared


@pytest.fixture(scope="module")
def key(shared: Platform) -> str:
    return shared.key("acme")


def stream(platform: Platform, key: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    *parts, done, end = post(platform, key, path, body | {"stream": True}).text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@BOTH
def test_continuous_usage_is_the_usage_so_far_in_every_chunk(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(platform, key, path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    opening = [0] if path == CHAT else []
    assert counts == [*opening, 1, 2, 3, 4, 4]
    assert chunks[-1]["choices"] == [] and all(chunk["choices"] for chunk in chunks[:-1])


@BOTH
def test_a_request_id_is_the_end_of_the_answers_id(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    assert post(platform, key, path, body | {"request_id": "mine"}).json()["id"].endswith("-mine")


def test_the_service_tier_is_echoed_if_it_was_sent(platform: Platform, key: str) -> None:
    answer = post(platform, key, CHAT, MESSAGES | {"service_tier": "auto", "metadata": {"a": "b"}}).json()
    assert answer["service_tier"] == "default"
    chunks = stream(platform, key, CHAT, MESSAGES | {"service_tier": "default"})
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert "service_tier" not in post(platform, key, CHAT, MESSAGES).json()


def test_the_token_ids_of_a_completion_are_with_each_choice(platform: Platform, key: str) -> None:
    body = PROMPT | {"return_token_ids": True}
    (choice,) = post(platform, key, COMPLETIONS, body).json()["choices"]
    assert choice["prompt_token_ids"] == list(b"hello")
    assert choice["token_ids"] == [*b"Hi!", EOS]
    choices = [chunk["choices"][0] for chunk in stream(platform, key, COMPLETIONS, body)]
    assert [token for one in choices for token in one["token_ids"]] == [*b"Hi!", EOS]
    assert [one.get("prompt_token_ids") for one in choices] == [list(b"hello"), None, None, None]


def test_the_token_ids_of_a_chat_are_with_the_choice_and_those_of_the_prompt_beside_it(
    platform: Platform, key: str
) -> None:
    body = MESSAGES | {"return_token_ids": True}
    answer = post(platform, key, CHAT, body).json()
    assert answer["prompt_token_ids"] == RENDERED
    assert answer["choices"][0]["token_ids"] == [*b"Hi!", EOS]
    chunks = stream(platform, key, CHAT, body)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [RENDERED] + [None] * (len(chunks) - 1)
    found = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert found == [*b"Hi!", EOS]


def test_tokens_of_log_probabilities_may_be_shown_as_ids(platform: Platform, key: str) -> None:
    entry = TokenLogprobs(-0.5, ((72, -0.5), (73, -1.0)))
    platform.engine.answers = [[TokenDelta((72,), FinishReason.LENGTH, (entry,))]]
    shown = {"return_tokens_as_token_ids": True}
    old = post(platform, key, COMPLETIONS, PROMPT | shown | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert old["tokens"] == ["token_id:72"] and old["top_logprobs"] == [
        {"token_id:72": -0.5, "token_id:73": -1.0}
    ]
    new = post(platform, key, CHAT, MESSAGES | shown | {"logprobs": True, "top_logprobs": 2}).json()
    assert new["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:72"


def test_health_and_ping_say_whether_a_request_would_be_answered(platform: Platform) -> None:
    for path in ("/health", "/ping"):
        platform.engine.ready = True
        assert httpx.get(platform.url + path).json() == {"status": "ready"}
        platform.engine.ready = False
        assert httpx.get(platform.url + path).status_code == 503


def test_the_version_is_that_of_the_package(platform: Platform) -> None:
    assert httpx.get(platform.url + "/version").json() == {"version": importlib.metadata.version("slora")}


def test_the_load_is_the_number_of_answers_in_progress(platform: Platform) -> None:
    with platform.services.generator.limiter.admit_generation("acme", 3), platform.client(ADMIN_KEY) as admin:
        assert admin.get("/load").json() == {"server_load": 3}
