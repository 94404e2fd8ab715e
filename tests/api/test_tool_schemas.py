"""Tools, choices of tools, and the calls in a conversation are checked as OpenAI checks them."""

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from slora_api.chat.tool_schemas import MAX_TOOLS
from slora_api.completions.schemas import ChatRequest, TokenizeRequest
from slora_api.core.errors import describe_error

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [USER], **fields})


def refusal(**fields: Any) -> tuple[str, str]:
    """The message and the param of the error that a client gets."""
    with pytest.raises(ValidationError) as caught:
        chat(**fields)
    error = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors(include_url=False)]
    described = describe_error(RequestValidationError(error)).body["error"]
    return described["message"], described["param"]


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def custom(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f", **fields}}


def lark(definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def call(call_id: str = "1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def asked(*ids: str, content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [call(one) for one in ids]}


def told(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "20 degrees"}


def test_tools_reach_the_template_as_they_are_without_strict() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    request = chat(tools=[strict, tool(), tool(name="g", parameters={})], tool_choice="auto")
    assert [one.for_template() for one in request.shown_tools] == [
        WEATHER,
        tool(),
        tool(name="g", parameters={}),
    ]
    assert TokenizeRequest.model_validate({"messages": [USER], "tools": [WEATHER]}).shown_tools


def test_a_choice_forces_one_of_its_tools() -> None:
    tools = [WEATHER, tool()]
    chosen = {
        choice: chat(tools=tools, tool_choice=choice).forced_tools for choice in ("auto", "none", "required")
    }
    assert {choice: len(forced) for choice, forced in chosen.items()} == {"auto": 0, "none": 0, "required": 2}
    (named,) = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}}).forced_tools
    assert named.function.name == "f"
    (whole,) = chat(tools=tools, tool_choice=WEATHER).forced_tools  # only its name counts
    assert whole.function.name == "get_weather"


NAMED = {"type": "function", "function": {"name": "f"}}
# Field -> a bad value, a part of the message, and the param.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool(), tool()]}, "`tools.1.function.name` is 'f', which an earlier tool already has", "tools"),
    ({"tools": [tool(name="a" * 65)]}, "it has 65 characters, and at most 64", "tools.0.function.name"),
    ({"tools": [tool(name="a b")]}, "it is 'a b'; the name of a function has letters", "tools.0.function.name"),
    ({"tools": [tool(parameters=[])]}, "should be an object", "tools.0.function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "has the type 'string'", "tools.0.function.parameters"),
    ({"tools": [tool(parameters={"properties": []})]}, "`properties` are []", "tools.0.function.parameters"),
    ({"tools": [tool(parameters=deep(40))]}, "more than 64 levels deep", "tools.0.function.parameters"),
    ({"tools": [tool(parameters={"x-guidance": {}})]}, "key 'x-guidance'", "tools.0.function.parameters"),
    ({"chat_template_kwargs": deep(40)}, "more than 64 levels deep", "chat_template_kwargs"),
    ({"tools": [tool(parameters={"a": "\ud800"})]}, "U+D800", "tools.0.function.parameters"),
    ({"tools": [tool(name=f"f{at}") for at in range(MAX_TOOLS + 1)]}, "has 129 tools; at most 128", "tools"),
    ({"tools": [{"type": "mcp", "server_url": "x"}]}, "'function' or 'custom'", "tools.0.type"),
    ({"tools": [custom(name="a b")]}, "letters, digits", "tools.0.name"),
    ({"tools": [custom(format=lark("start: start"))]}, "which refers to itself", "tools.0.format.grammar.grammar"),
    ({"tools": [custom(format=lark("start:" + " " * 4090)), custom(format=lark("b"))]},
     "`tools` has 4097 characters of Lark grammars; at most 4096", "tools"),
    ({"tools": [tool(colour=1)]}, "not a parameter", "tools.0.function.colour"),
    ({"tools": "f"}, "valid list", "tools"),
    ({"tool_choice": "auto"}, "only allowed when `tools` are sent", "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": NAMED}, "names the function 'f', which is not in `tools`", "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "`tool_choice` is 'any'; it must be 'auto'", "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "'allowed_tools'", "tool_choice"),
    ({"tools": [tool()], "tool_choice": allowed("auto")}, "must be 'auto'", "tool_choice"),
    ({"tools": [tool()], "tool_choice": allowed("auto", "f", "g")}, "names the function 'g'", "tool_choice"),
    ({"functions": [{"name": "f"}], "tools": [tool()]}, "send only `tools`", "functions"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "one of them: ['f']", "function_call"),
    ({"function_call": "auto"}, "only allowed when `functions` are sent", "function_call"),
    ({"messages": [told("1")]}, "`messages.0.tool_call_id` is '1', which matches no unanswered tool call", "messages"),
    ({"messages": [USER, asked("1"), told("2")]}, "assistant message; these do: ['1']", "messages"),
    ({"messages": [USER, asked("1"), told("1"), told("1")]}, "`messages.3.tool_call_id` is '1'", "messages"),
    ({"messages": [USER, asked("1", "2"), told("2"), USER]}, "no tool result for the calls ['1']", "messages"),
    ({"messages": [USER, asked("1", "1")]}, "`messages.1.tool_calls` has the id '1' twice", "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "must have `tool_call_id` with the role", "messages.0"),
    ({"messages": [{**USER, "tool_call_id": "1"}]}, "must have `tool_call_id` with the role", "messages.0"),
    ({"messages": [{**told("1"), "content": None}]}, "required unless the role is `assistant`", "messages.0.content"),
    ({"messages": [{**USER, "tool_calls": [call()]}]}, "has the role `user`", "messages.0"),
    ({"messages": [{**asked(), "tool_calls": [{"id": "1"}]}]}, "is missing", "messages.0.tool_calls.0.function"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "param"), BAD)
def test_bad_tools_are_refused_with_field_value_and_limit(
    fields: dict[str, Any], message: str, param: str
) -> None:
    shown, named = refusal(**fields)
    assert message in shown and named == param


def test_a_conversation_with_results_in_any_order_is_accepted() -> None:
    messages = [
        USER,
        asked("1", "2", content="Let me see."),
        told("2"),
        told("1"),
        asked("1"),
        told("1"),
        USER,
    ]
    assert [one.for_template() for one in chat(messages=messages).messages] == [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("1"), call("2")]},
        told("2"),
        told("1"),
        {"role": "assistant", "content": "", "tool_calls": [call("1")]},
        told("1"),
        USER,
    ]


def test_what_packages_add_to_a_call_has_no_effect() -> None:
    sent = {**call(), "index": 0, "provider_specific_fields": {}}
    sent["function"] = {**sent["function"], "parsed_arguments": {"a": 1}}
    message = {"role": "assistant", "content": None, "tool_calls": [sent]}
    assert chat(messages=[message, told("1")]).messages[0].for_template()["tool_calls"] == [call()]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_reaches_the_template(name: str) -> None:
    (message,) = chat(messages=[{"role": "assistant", "content": "a", name: "Hm."}]).messages
    shown = {"role": "assistant", "content": "a", "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert message.for_template() == shown and message.num_chars == 4
