"""OpenAI's other forms of tools: custom tools, a choice among some tools, and the older functions."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.support.tool_templates import HERMES

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BODY = {"model": "caller", "messages": [{"role": "user", "content": "hi"}]}
CODE = 'print("a\\n")'


def written(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def custom(name: str = "run", **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, "description": "Runs code.", **fields}}


def function(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("data"), ScriptedEngine(max_model_len=4096)) as running:
        members = make_members() | {"chat_template.jinja": HERMES.encode()}
        assert running.upload(running.key("acme"), "caller", members).status_code == 201
        yield running


def ask(platform: Platform, key: str, **fields: Any) -> Any:
    answer = post(platform, key, CHAT, BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def stream(platform: Platform, key: str, **fields: Any) -> list[Any]:
    lines = post(platform, key, CHAT, BODY | {"stream": True} | fields).text.split("\n\n")
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]


def test_the_call_of_a_custom_tool_has_a_text_as_its_input(platform: Platform, key: str) -> None:
    platform.says("So:" + written("run", {"input": CODE}) + written("f", {"a": 1}))
    tools = [custom(), function("f")]
    choice = ask(platform, key, tools=tools)
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["custom"]) == ("custom", {"name": "run", "input": CODE})
    assert (second["type"], json.loads(second["function"]["arguments"])) == ("function", {"a": 1})
    assert choice["finish_reason"] == "tool_calls" and "function" not in first
    deltas = [
        one["delta"]["tool_calls"][0]
        for one in stream(platform, key, tools=tools)
        if "tool_calls" in one["delta"]
    ]
    (streamed,) = (one for one in deltas if one["index"] == 0)
    assert (streamed["type"], streamed["custom"]) == ("custom", {"name": "run", "input": CODE})
    assert "".join(one["function"]["arguments"] for one in deltas if one["index"] == 1) == '{"a": 1}'
    assert (
        '"name": "run", "description": "Runs code.", "parameters": {"type": "object"'
        in platform.last_prompt()
    )
    messages = [*BODY["messages"], choice["message"]]
    messages += [{"role": "tool", "tool_call_id": one["id"], "content": "1"} for one in (first, second)]
    ask(platform, key, tools=tools, messages=messages)
    assert json.dumps({"input": CODE}) in platform.last_prompt()


@pytest.mark.parametrize("arguments", [{"other": 1}, {"input": 3}])
def test_the_input_of_a_custom_tool_is_never_lost(platform: Platform, key: str, arguments: Any) -> None:
    platform.says(written("run", arguments))
    (call,) = ask(platform, key, tools=[custom()])["message"]["tool_calls"]
    assert call["custom"]["input"] == json.dumps(arguments)


def test_a_custom_tool_can_be_forced_and_its_input_held_to_an_expression(
    platform: Platform, key: str
) -> None:
    platform.says(written("run", {"input": "12"}))
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    choice = {"type": "custom", "custom": {"name": "run"}}
    answer = ask(platform, key, tools=[custom(format=form)], tool_choice=choice)
    assert answer["finish_reason"] == "stop"
    grammar = platform.engine.requests[0].sampling.structured_output
    assert grammar is not None and "^(?:[0-9]+)$" in grammar.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_lark_grammar_of_a_custom_tool_is_enforced_unless_it_is_recursive(
    platform: Platform, key: str, path: str
) -> None:
    platform.says(written("run", {"input": "go north"}))

    def post_grammar(definition: str) -> Any:
        grammar = {"syntax": "lark", "definition": definition}
        if path == CHAT:
            tool = custom(format={"type": "grammar", "grammar": grammar})
            return post(platform, key, path, BODY | {"tools": [tool]})
        tool = {"type": "custom", "name": "run", "format": {"type": "grammar", **grammar}}
        answer = post(platform, key, path, {"model": "caller", "input": "hi", "tools": [tool]})
        assert not answer.is_success or answer.json()["tools"][0]["format"] == tool["format"]
        return answer

    answer = post_grammar('start: "go" WAY\nWAY: " north" | " south"')
    assert answer.status_code == 200, answer.text
    form = platform.engine.requests[0].sampling.structured_output
    assert form is not None and "^(?:go(?: north| south))$" in form.text
    refused = post_grammar('start: "(" start? ")"')
    assert refused.status_code == 400 and "refers to itself" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"].startswith("tools.0.format")


def test_custom_tools_of_the_responses_api(platform: Platform, key: str) -> None:
    platform.says(written("run", {"input": CODE}))
    client = platform.sdk(key)
    tool: Any = {"type": "custom", "name": "run", "description": "Runs code.", "format": {"type": "text"}}
    items: Any = [{"role": "user", "content": "hi"}]
    answer = client.responses.create(model="caller", input=items, tools=[tool])
    (item,) = answer.output
    assert item.type == "custom_tool_call" and (item.name, item.input) == ("run", CODE)
    with client.responses.stream(model="caller", input=items, tools=[tool]) as events:
        kinds = {event.type: event for event in events}
        final = events.get_final_response()
    assert kinds["response.custom_tool_call_input.done"].input == CODE
    assert final.output[0].type == "custom_tool_call" and final.output[0].input == CODE
    told = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    client.responses.create(
        model="caller",
        input=[*items, *answer.output, told],
        tools=[tool],
        tool_choice={"type": "custom", "name": "run"},
    )
    assert json.dumps({"input": CODE}) in platform.last_prompt() and "done" in platform.last_prompt()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(("mode", "is_forced"), [("auto", False), ("required", True)])
def test_only_the_allowed_tools_are_shown_and_called(
    platform: Platform, key: str, path: str, mode: str, is_forced: bool
) -> None:
    platform.says(written("f", {}))
    if path == CHAT:
        tools = [function("f"), function("g"), custom("h")]
        named = [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "h"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        answer = post(platform, key, path, BODY | {"tools": tools, "tool_choice": choice})
    else:
        tools = [{"type": "function", "name": name} for name in "fg"] + [{"type": "custom", "name": "h"}]
        named = [{"type": "function", "name": "f"}, {"type": "custom", "name": "h"}]
        choice = {"type": "allowed_tools", "mode": mode, "tools": named}
        answer = post(
            platform, key, path, {"model": "caller", "input": "hi", "tools": tools, "tool_choice": choice}
        )
        assert answer.json()["tool_choice"] == choice
    assert answer.status_code == 200, answer.text
    prompt = platform.last_prompt()
    assert '"f"' in prompt and '"h"' in prompt and '"g"' not in prompt
    assert (platform.engine.requests[0].sampling.structured_output is not None) == is_forced


def test_the_older_functions_are_answered_in_their_form(platform: Platform, key: str) -> None:
    platform.says(written("f", {"a": 1}) + written("f", {"a": 2}))
    functions = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    choice = ask(platform, key, functions=functions)
    called = {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (called, "function_call")
    assert "tool_calls" not in choice["message"]
    *parts, last = stream(platform, key, functions=functions)
    deltas = [one["delta"]["function_call"] for one in parts if "function_call" in one["delta"]]
    assert deltas[0] == {"name": "f", "arguments": ""} and last["finish_reason"] == "function_call"
    assert "".join(one["arguments"] for one in deltas) == '{"a": 1}'
    forced = ask(platform, key, functions=functions, function_call={"name": "f"})
    assert forced["finish_reason"] == "stop" and forced["message"]["function_call"] == called
    assert platform.engine.requests[-1].sampling.structured_output is not None
    told = {"role": "function", "name": "f", "content": "20"}
    ask(platform, key, functions=functions, messages=[*BODY["messages"], choice["message"], told])
    assert '{"a": 1}' in platform.last_prompt() and "20" in platform.last_prompt()
    ask(platform, key, functions=functions, function_call="none")
    assert '"f"' not in platform.last_prompt()


def test_the_openai_package_counts_the_tokens_of_a_response(platform: Platform, key: str) -> None:
    platform.says("Hi")
    client = platform.sdk(key)
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    counted = client.responses.input_tokens.count(
        model="caller", input="hi", instructions="Be brief.", tools=[tool]
    )
    client.responses.create(model="caller", input="hi", instructions="Be brief.", tools=[tool])
    assert counted.input_tokens == len(platform.engine.requests[-1].prompt_token_ids)
    assert counted.object == "response.input_tokens" and len(platform.engine.requests) == 1
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="nope", input="hi")
