"""Anthropic's Messages API over a tenant's models: requests, answers, streams and errors in its form."""

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from slora.core.errors import StepFailed
from slora.core.request import FinishReason, TokenDelta
from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, post
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.support.tool_templates import HERMES, QWEN3, R1

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hello"}
BODY = {"model": "base", "max_tokens": 50, "messages": [USER]}
TOOL = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine(max_model_len=2048))


@pytest.fixture
def platform(shared: Platform) -> Platform:
    shared.engine.reset(deltas_of(b"Hi!", FinishReason.STOP))
    return shared


@pytest.fixture(scope="module")
def key(shared: Platform) -> str:
    key = shared.key("acme")
    for name, template in (("caller", HERMES), ("qwen", QWEN3), ("r1", R1)):
        shared.engine.reset(deltas_of(b"Hi!"))
        members = make_members() | {"chat_template.jinja": template.encode()}
        assert shared.upload(key, name, members).status_code == 201
    return key


def ask(platform: Platform, key: str, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    """Sends the request as Anthropic's clients do."""
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    headers["content-type"] = "application/json"
    body = BODY if path == MESSAGES else {name: BODY[name] for name in ("model", "messages")}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60, verify=False) as client:
        return client.post(f"{path}?beta=true", content=json.dumps(body | fields))


def stream(platform: Platform, key: str, **fields: Any) -> list[dict[str, Any]]:
    """Returns the events. Their names are their types."""
    answer = ask(platform, key, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    events = []
    for part in answer.text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_an_answer_is_a_message(platform: Platform, key: str) -> None:
    answer = ask(platform, key)
    made = answer.json()
    assert (
        made.pop("id").startswith("msg_") and answer.headers["request-id"] == answer.headers["x-request-id"]
    )
    assert made == {
        "type": "message",
        "role": "assistant",
        "model": "base",
        "content": [{"type": "text", "text": "Hi!", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 11,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
            "service_tier": "standard",
        },
    }


def test_a_stream_has_anthropics_events(platform: Platform, key: str) -> None:
    platform.engine.answers = [[TokenDelta((65,), num_cached=6), TokenDelta((66, 256), FinishReason.STOP)]]
    start, block, first, second, stop, end, last = stream(platform, key)
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 5
    assert start["message"]["usage"]["cache_read_input_tokens"] == 6
    assert (block["type"], block["index"], block["content_block"]["text"]) == ("content_block_start", 0, "")
    assert [first["delta"], second["delta"]] == [{"type": "text_delta", "text": text} for text in "AB"]
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 3 and last == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("fields", "reason", "shown", "sequence", "text"),
    [
        ({}, FinishReason.STOP, "end_turn", None, "one two three"),
        ({"stop_sequences": ["zz", "two"]}, FinishReason.STOP, "stop_sequence", "two", "one "),
        ({"max_tokens": 13}, FinishReason.LENGTH, "max_tokens", None, "one two three"),
        ({"max_tokens": 64_000}, FinishReason.LENGTH, "model_context_window_exceeded", None, "one two three"),
    ],
)
def test_the_stop_reason_says_why_an_answer_ended(
    platform: Platform,
    key: str,
    fields: dict[str, Any],
    reason: FinishReason,
    shown: str,
    sequence: str | None,
    text: str,
) -> None:
    platform.says("one two three", reason)
    whole = ask(platform, key, **fields).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (shown, sequence)
    assert whole["content"][0]["text"] == text
    end = stream(platform, key, **fields)[-2]
    assert end["delta"] == {"stop_reason": shown, "stop_sequence": sequence}
    asked = platform.engine.requests[0].sampling.max_tokens
    assert asked == min(fields.get("max_tokens", 50), 2048 - 11)


def test_reasoning_text_and_calls_are_blocks(platform: Platform, key: str) -> None:
    platform.says(f"<think>Hm.</think>Look:{CALL}{CALL}")
    made = ask(platform, key, model="qwen", tools=[TOOL], thinking={"type": "adaptive"}).json()
    thinking, text, *calls = made["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert (text["text"], made["stop_reason"], len(calls)) == ("Look:", "tool_use", 2)
    assert all(call["id"].startswith("toolu_") and call["input"] == {"city": "Ulm"} for call in calls)
    events = stream(platform, key, model="qwen", tools=[TOOL])
    blocks: list[list[Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (name,) = event["delta"].keys() - {"type"}
            blocks[-1][1] += event["delta"][name]
    arguments = '{"city": "Ulm"}'
    assert blocks == [
        ["thinking", "Hm."],
        ["text", "Look:"],
        ["tool_use", arguments],
        ["tool_use", arguments],
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", {}),
        ('{"a": "\\ud800"}', {"a": "\ud800"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(
    platform: Platform, key: str, arguments: str, expected: Any
) -> None:
    platform.says(f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}')
    (call,) = ask(platform, key, model="caller", tools=[TOOL]).json()["content"]
    assert call["input"] == expected


def test_a_conversation_with_tools_is_shown_to_the_model(platform: Platform, key: str) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "hi", **cached}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look:", "citations": None},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "Ulm"},
                    "caller": None,
                },
                {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no city", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "20", **cached}],
                },
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "user", "content": "Well?"},
    ]
    system = [{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Be kind."}]
    fields = {"model": "qwen", "messages": turns, "system": system, "tools": [TOOL | cached]}
    answer = ask(platform, key, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slora-ignored"] == "messages.redacted_thinking"
    prompt = platform.last_prompt()
    for part in (
        "system\nBe brief.\nBe kind.<",
        "user\n<reminder>\nhi<",
        "<think>\nHm.\n</think>\n\nLook:",
        '{"name": "get_weather", "arguments": {"city": "Ulm"}}',
        "Error: no city",
        "tool\n20<",
        "user\nAnd?\nWell?<",
    ):
        assert part in prompt, part
    counted = ask(platform, key, COUNT, **fields).json()
    assert counted == {"input_tokens": len(platform.engine.requests[-1].prompt_token_ids)}


def test_an_answer_continues_the_last_turn_of_the_assistant(platform: Platform, key: str) -> None:
    ask(platform, key, messages=[USER, {"role": "assistant", "content": '{"a":'}])
    assert platform.last_prompt() == '[user]hello[assistant]{"a":'


@pytest.mark.parametrize(
    ("choice", "is_forced", "max_calls"),
    [
        ({"type": "auto"}, False, None),
        ({"type": "any"}, True, None),
        ({"type": "any", "disable_parallel_tool_use": True}, True, 1),
        ({"type": "tool", "name": "get_weather"}, True, None),
        ({"type": "none"}, False, None),
    ],
)
def test_a_tool_choice_is_honoured(
    platform: Platform, key: str, choice: dict[str, Any], is_forced: bool, max_calls: int | None
) -> None:
    platform.says(CALL * 2)
    made = ask(platform, key, model="caller", tools=[TOOL], tool_choice=choice).json()
    assert (platform.engine.requests[0].sampling.structured_output is not None) == is_forced
    assert ("get_weather" in platform.last_prompt()) == (choice["type"] != "none")
    if choice["type"] != "none":
        assert made["stop_reason"] == "tool_use" and len(made["content"]) == (max_calls or 2)


@pytest.mark.parametrize(
    ("model", "thinking", "is_off", "is_shown", "ignored"),
    [
        ("qwen", None, False, True, None),
        ("qwen", {"type": "disabled"}, True, False, None),
        ("qwen", {"type": "adaptive"}, False, True, None),
        ("r1", {"type": "disabled"}, False, False, "thinking"),
        ("base", {"type": "adaptive"}, False, False, "thinking"),
    ],
)
def test_thinking_switches_the_reasoning(
    platform: Platform, key: str, model: str, thinking: Any, is_off: bool, is_shown: bool, ignored: str | None
) -> None:
    platform.says("<think>Hm.</think>Hi" if model == "qwen" else "Hm.</think>Hi" if model == "r1" else "Hi")
    answer = ask(platform, key, model=model, thinking=thinking)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-slora-ignored") == ignored
    assert platform.last_prompt().endswith("<think>\n\n</think>\n\n") == is_off
    kinds = [block["type"] for block in answer.json()["content"]]
    assert kinds == (["thinking", "text"] if is_shown else ["text"])


def test_fields_of_coding_agents_are_accepted(platform: Platform, key: str) -> None:
    tools = [
        TOOL | {"name": f"mcp__server__{'x' * 90}_{at}", "eager_input_streaming": True} for at in range(100)
    ]
    answer = ask(
        platform,
        key,
        model="caller",
        tools=tools,
        metadata={"user_id": "u" * 600},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        thinking={"type": "enabled", "budget_tokens": 31_999},
        output_config={"effort": "high"},
        service_tier="auto",
        betas=["a"],
        mcp_servers=[],
        container=None,
        temperature=1,
        max_tokens=32_000,
    )
    # The prompt is too long for this model. Nothing else is wrong.
    assert answer.json()["error"]["message"].startswith("prompt is too long: "), answer.text
    few = ask(platform, key, model="caller", tools=tools[:2], metadata={"user_id": "u" * 600}, betas=["a"])
    assert few.status_code == 200 and few.headers["x-slora-ignored"] == "betas"


def test_an_output_format_is_enforced(platform: Platform, key: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    platform.says('{"a": 1}')
    for fields in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        assert ask(platform, key, **fields).status_code == 200
        form = platform.engine.requests[-1].sampling.structured_output
        assert form is not None and json.loads(form.text) == schema


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_token": 3}, "did you mean `max_tokens`?", "max_token"),
    ({"max_tokens": 0}, "greater than or equal to 1", "max_tokens"),
    ({"messages": []}, "it is empty; send at least one entry.", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'", "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]},
     "is missing", "messages.0.content.0.text.text"),
    ({"messages": [{"role": "user", "content": [3]}]}, "a block must be an object", "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
     "has the role `user`, which cannot have a block of the type 'tool_use'", "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
     "which matches no unanswered tool call", "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate", "messages.0.content.0.text.text"),
    ({"system": [{"type": "image"}]}, "'image'", "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`tools.0` has the type", "tools"),
    ({"tools": [TOOL | {"name": "a b"}]}, "letters, digits", "tools.0.name"),
    ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "of the type 'object'", "tools.0.input_schema"),
    ({"tools": [TOOL]}, "does not show tools to the model", "tools"),
    ({"tool_choice": {"type": "any"}}, "only allowed when `tools` are sent", "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "must have `name`", "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "is not supported", "mcp_servers"),
    ({"thread": {"id": "x"}}, "Send the whole conversation", "thread"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "param"), REFUSED)
def test_what_cannot_be_served_is_refused_in_anthropics_form(
    platform: Platform, key: str, fields: dict[str, Any], message: str, param: str
) -> None:
    for path in (
        (MESSAGES, COUNT) if "max_tokens" not in fields and "max_token" not in fields else (MESSAGES,)
    ):
        answer = ask(platform, key, path, **fields)
        error = answer.json()
        shown = (answer.status_code, error["type"], error["error"]["type"], error["error"]["param"])
        assert shown == (400, "error", "invalid_request_error", param)
        assert message in error["error"]["message"]
        assert error["request_id"] == answer.headers["request-id"]
    assert not platform.engine.requests


def test_errors_have_anthropics_types(platform: Platform, key: str) -> None:
    def kind(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["type"]

    assert kind(ask(platform, "wrong")) == (401, "authentication_error")
    assert kind(ask(platform, key, model="nope")) == (404, "not_found_error")
    assert kind(ask(platform, key, "/v1/messages/batches")) == (404, "not_found_error")
    assert kind(ask(platform, key, messages=[{"role": "user", "content": "x" * (5 << 20)}])) == (
        413,
        "request_too_large",
    )
    platform.engine.ready = False
    assert kind(ask(platform, key)) == (503, "overloaded_error")
    platform.engine.ready = True
    platform.engine.answers = [[StepFailed("a step failed")]]
    assert kind(ask(platform, key)) == (503, "overloaded_error")
    platform.engine.answers = [[TokenDelta((65,)), StepFailed("a step failed")]]
    *_, last = stream(platform, key)
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


def test_a_late_first_token_is_preceded_by_pings(
    platform: Platform, key: str, hold_heads: Callable[..., None]
) -> None:
    hold_heads()
    platform.engine.gate = gate = threading.Event()
    with httpx.stream(
        "POST", platform.url + MESSAGES, json=BODY | {"stream": True}, headers={"x-api-key": key}
    ) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(3)] == ["event: ping", 'data: {"type":"ping"}', ""]
        gate.set()
        assert list(lines)[-2] == 'data: {"type":"message_stop"}'


def test_the_key_may_be_sent_in_either_header_but_only_there(platform: Platform, key: str) -> None:
    assert post(platform, key, MESSAGES, BODY).status_code == 200
    for path, body in (("/v1/chat/completions", BODY), ("/v1/completions", {"model": "base", "prompt": "a"})):
        refused = httpx.post(platform.url + path, json=body, headers={"x-api-key": key})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_tenant_finds_only_its_own_models(platform: Platform, key: str) -> None:
    other = platform.key("other")
    assert ask(platform, key, model="caller").json()["model"] == "caller"
    assert ask(platform, other, model="caller").status_code == 404
    mine = platform.key("acme", "caller")
    assert ask(platform, mine, model="default").headers["x-slora-adapter"] == "caller@1"
