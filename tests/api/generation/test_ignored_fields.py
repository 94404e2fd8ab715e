"""Fields without an effect: which are accepted, which are refused, and what the answer says about them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slora_api.http.unsupported import IGNORED_HINTS
from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.support.tool_templates import QWEN3

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "base", "messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"model": "base", "prompt": "hello"},
    RESPONSES: {"model": "base", "input": "hello"},
    "/v1/embeddings": {"model": "base", "input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [65]},
}


@pytest.fixture(scope="module")
def shared(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine(max_model_len=256))


@pytest.mark.parametrize("path", BODIES)
def test_a_hint_is_ignored_and_the_answer_names_it(platform: Platform, key: str, path: str) -> None:
    hints = {name: {"a": [1]} for name in IGNORED_HINTS if "." not in name and name != "context_management"}
    answer = post(platform, key, path, BODIES[path] | hints)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slora-ignored"] == ", ".join(hints)
    plain = post(platform, key, path, BODIES[path] | dict.fromkeys(hints) | {"unknown": None})
    assert plain.status_code == 200 and "x-slora-ignored" not in plain.headers


def test_a_stream_names_what_was_ignored(platform: Platform, key: str) -> None:
    body = BODIES[CHAT] | {"stream": True, "verbosity": "low", "prediction": {"type": "content"}}
    assert post(platform, key, CHAT, body).headers["x-slora-ignored"] == "verbosity, prediction"


def test_nested_hints_are_named_by_their_path(platform: Platform, key: str) -> None:
    fields = {"text": {"verbosity": "low"}, "metadata": {"trace": {"id": 1}}}
    answer = post(platform, key, RESPONSES, BODIES[RESPONSES] | fields)
    assert sorted(answer.headers["x-slora-ignored"].split(", ")) == ["metadata", "text.verbosity"]
    assert answer.json()["metadata"] == {}


@pytest.mark.parametrize(
    ("path", "fields", "param", "nearest"),
    [
        (CHAT, {"temperture": 1}, "temperture", "temperature"),
        (CHAT, {"max_token": 3}, "max_token", "max_tokens"),
        (COMPLETIONS, {"promt": "x"}, "promt", "prompt"),
        (RESPONSES, {"instruction": "x"}, "instruction", "instructions"),
        (RESPONSES, {"text": {"formt": {}, "vebosity": 1}}, "text.vebosity", None),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "nme": "b"}]},
            "messages.0.nme",
            "messages.0.name",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a", "zzz": "b"}]}, "messages.0.zzz", None),
        ("/v1/embeddings", {"dimension": 3}, "dimension", "dimensions"),
    ],
)
def test_any_other_unknown_field_is_refused_with_the_nearest_name(
    platform: Platform, key: str, path: str, fields: dict[str, Any], param: str, nearest: str | None
) -> None:
    answer = post(platform, key, path, BODIES[path] | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "unknown_parameter")
    assert (f"did you mean `{nearest}`?" in error["message"]) == (nearest is not None), error
    assert not platform.engine.requests


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"reasoning_effort": "none"}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens, thinking"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "disabled"}}, None),
    ],
)
def test_a_model_that_never_reasons_ignores_the_effort(
    platform: Platform, key: str, fields: dict[str, Any], ignored: str | None
) -> None:
    answer = post(platform, key, CHAT, BODIES[CHAT] | fields)
    assert (answer.status_code, answer.headers.get("x-slora-ignored")) == (200, ignored)


@pytest.mark.parametrize(("switch", "is_off"), [("enabled", False), ("disabled", True)])
def test_thinking_switches_the_template_of_a_model_that_reasons(
    platform: Platform, key: str, switch: str, is_off: bool
) -> None:
    platform.upload(key, "qwen", make_members() | {"chat_template.jinja": QWEN3.encode()})
    body = BODIES[CHAT] | {"model": "qwen", "thinking": {"type": switch}}
    assert "x-slora-ignored" not in post(platform, key, CHAT, body).headers
    assert platform.last_prompt().endswith("</think>\n\n") == is_off


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    data: Path = tmp_path_factory.mktemp("lenient")
    engine = ScriptedEngine([deltas_of(b"Hi!")])
    with running_platform(data, engine, unknown_fields="ignore") as running:
        yield running


def test_an_operator_may_have_unknown_fields_ignored(lenient: Platform) -> None:
    key = lenient.key("acme")
    message = {"role": "user", "content": [{"type": "text", "text": "hello", "gateway": 1}], "from": "me"}
    body = {"model": "base", "messages": [message], "x_gateway": {"a": 1}, "verbosity": "low", "b\nad": 1}
    answer = post(lenient, key, CHAT, body)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-slora-ignored"].split(", ")) == {
        "gateway",
        "from",
        "x_gateway",
        "verbosity",
        "?",
    }
    quoted = post(lenient, key, CHAT, body | {key: 1}).headers["x-slora-ignored"]
    assert key.split("_")[2] not in quoted
    refused = post(lenient, key, CHAT, body | {"web_search_options": {}, "temperature": "hot"})
    assert refused.json()["error"]["param"] == "temperature"
