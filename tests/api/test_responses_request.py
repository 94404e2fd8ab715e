"""Requests to /v1/responses become chats, and what cannot be served is refused with the field and the remedy."""

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from slora_api.chat.tool_schemas import MAX_TOOLS
from slora_api.core.errors import describe_error
from slora_api.http.field_types import IgnoredFields
from slora_api.responses.responses_request import ResponsesRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
NESTED = {"type": "function", "function": {"name": "f"}}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": "hi", **fields})


def refusal(**fields: Any) -> tuple[str, str | None, str | None]:
    """The message, the param and the code of the error that a client gets."""
    with pytest.raises(ValidationError) as caught:
        request(**fields)
    error = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors(include_url=False)]
    described = describe_error(RequestValidationError(error)).body["error"]
    return described["message"], described["param"], described["code"]


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in request(input=list(items), **fields).chat_messages]


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def thought(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part], "status": "completed"}


def call(call_id: str) -> dict[str, Any]:
    own = {"id": "fc_1", "status": "completed", "parsed_arguments": None}
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **own}


def told(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "20"}


def asked(*ids: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": "{}"}
    return [{"id": one, "type": "function", "function": function} for one in ids]


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": "20", "tool_call_id": call_id}


def test_the_items_of_one_turn_are_one_message() -> None:
    turn = {"role": "assistant", "content": "So:", "reasoning": "Hm.", "reasoning_content": "Hm."}
    answer = [thought("Hm."), said("So:"), call("1"), call("2")]
    assert messages(USER, *answer, told("2"), told("1"), said("Warm."), USER) == [
        USER,
        turn | {"tool_calls": asked("1", "2")},
        result("2"),
        result("1"),
        {"role": "assistant", "content": "Warm."},
        USER,
    ]


def test_calls_that_follow_results_are_a_turn_of_their_own() -> None:
    empty = {"role": "assistant", "content": ""}
    assert messages(call("1"), told("1"), call("2"), told("2")) == [
        empty | {"tool_calls": asked("1")},
        result("1"),
        empty | {"tool_calls": asked("2")},
        result("2"),
    ]


def test_texts_of_the_assistant_without_a_call_between_them_stay_apart() -> None:
    assert messages(said("a"), said("b")) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    thinking = {"role": "assistant", "content": "b", "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert messages(said("a"), thought("Hm."), said("b"))[1] == thinking
    one_turn = messages(said("a"), call("1"), said("b"), told("1"))
    assert one_turn[0]["content"] == "ab" and len(one_turn) == 2


def test_parts_are_joined_and_a_summary_replaces_missing_reasoning() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert messages({"role": "developer", "content": parts})[0] == {"role": "system", "content": "ab"}
    assert messages(call("1"), {**told("1"), "output": parts})[1] == result("1") | {"content": "ab"}
    assert messages(summary, said("x"))[0]["reasoning"] == "Hm."


def test_items_of_openais_answers_are_accepted_and_what_the_model_cannot_see_is_named() -> None:
    refusal_part = {"type": "refusal", "refusal": "No."}
    cited = {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation"}], "citations": None}
    hidden = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x", "status": None}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}}
    ran = {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "9",
        "name": "run",
        "input": "ls",
        "status": "completed",
    }
    called = {**call("1"), "namespace": "n", "caller": {"type": "program", "caller_id": "p"}, "async": True}
    output = {"type": "custom_tool_call_output", "call_id": "9", "output": "x"}
    answer = {**said(""), "content": [cited, refusal_part], "phase": "final_answer", "unknown": None}
    ignored = IgnoredFields()
    items = [USER, hidden, search, called, ran, told("1"), output, answer]
    made = ResponsesRequest.model_validate({"model": "m", "input": items}, context=ignored).chat_messages
    assert [message.role for message in made] == ["user", "assistant", "tool", "tool", "assistant"]
    assert made[1].for_template()["tool_calls"][1]["function"] == {
        "name": "run",
        "arguments": '{"input": "ls"}',
    }
    assert made[-1].content == "aNo."
    assert list(ignored.names) == ["input.encrypted_content", "input.web_search_call"]


def test_tools_reach_the_template_in_the_shape_of_a_chat() -> None:
    described = {**TOOL, "description": "The weather.", "strict": True}
    (tool,) = request(tools=[described]).shown_tools
    function = {"name": "f", "description": "The weather.", "parameters": {"type": "object"}}
    assert tool.for_template() == {"type": "function", "function": function} and tool.function.strict
    assert request(tools=[TOOL], tool_choice="none").shown_tools == []
    assert request(tools=[TOOL], tool_choice={"type": "function", "name": "f"}).names_tool
    assert len(request(tools=[TOOL], tool_choice="required").forced_tools) == 1
    assert request(tools=[TOOL]).forced_tools == []


NEUTRAL: dict[str, list[Any]] = {
    "store": [False],
    "background": [False],
    "truncation": ["disabled"],
    "tool_choice": ["auto", "none"],
    "tools": [[]],
    "include": [[], ["reasoning.encrypted_content"], ["file_search_call.results"]],
    "text": [{}, {"format": {"type": "text"}}, {"verbosity": "medium"}],
    "reasoning": [{}, {"effort": None, "summary": "auto"}, {"effort": "medium"}],
    "service_tier": ["auto", "default"],
    "metadata": [{}],
    "top_logprobs": [0],
    "temperature": [1.0],
    "parallel_tool_calls": [True, False],
    "max_tool_calls": [3],
    "context_management": [[]],
    "include_reasoning": [True],
    "enable_response_messages": [False],
    "return_weight_versions": [False],
    "mm_payload": ["tensors"],
}


def test_null_and_default_values_never_refuse_a_request() -> None:
    for name in ResponsesRequest.model_fields:
        if name not in ("model", "input"):
            request(**{name: None})
    for name, values in NEUTRAL.items():
        for value in values:
            request(**{name: value})


LONG_GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start:".ljust(5000)}
# Fields -> a part of the message, the param, the code.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "stores nothing: send the whole conversation", "previous_response_id"),
    ({"store": True}, "stores nothing: send the whole conversation", "store"),
    ({"background": True}, "Send `stream: true`", "background"),
    ({"prompt": {"id": "pmpt_1"}}, "Send the texts in `instructions`", "prompt"),
    ({"truncation": "auto"}, "Leave out the oldest items", "truncation"),
    ({"service_tier": "flex"}, "not supported by this server with the value 'flex'", "service_tier"),
    ({"reasoning": {"effort": "some"}}, "should be 'none', 'minimal'", "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "has the reasoning itself", "reasoning.summary"),
    ({"max_tokens": 5}, "Send `max_output_tokens`.", "max_tokens"),
    ({"n": 2}, "An answer has one choice", "n"),
    ({"nonsense": 1}, "is not a parameter that this server knows", "nonsense"),
    ({"input": None}, "must be a text, or a list of items", "input"),
    ({"input": []}, "must be a text, or a list of items that is not empty", "input"),
    ({"input": "\ud800"}, "lone surrogate", "input"),
    ({"input": [USER, {"type": "item_reference", "id": "m"}]}, "so send the item itself", "input.1"),
    ({"input": [{"id": "x"}]}, "it has the type null", "input.0"),
    ({"input": [{"role": "tool", "content": "x"}]}, "should be 'system', 'developer'", "input.0.message.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type 'input_image' is not", "input"),
    ({"input": [{**call("1"), "call_id": None}]}, "valid string", "input.0.function_call.call_id"),
    ({"input": [call("1")]}, "`input` has no result for the calls ['1']; after the calls, add one item", "input"),
    ({"input": [call("1"), call("2"), told("1"), said("a")]}, "no result for the calls ['2']", "input"),
    ({"input": [USER, told("1")]}, "`input.1.call_id` is '1', which matches no unanswered", "input"),
    ({"input": [call("1"), told("2")]}, "these do: ['1']", "input"),
    ({"input": [call("1"), told("1"), told("1")]}, "`input.2.call_id` is '1', which matches no", "input"),
    ({"input": [call("1"), call("1")]}, "`input.1.call_id` is '1', which an earlier call", "input"),
    ({"tools": [{"type": "web_search"}]}, "`tools.0` has the type 'web_search'", "tools"),
    ({"tools": [NESTED]}, "are fields of the tool itself", "tools"),
    ({"tools": [TOOL, TOOL]}, "`tools.1.name` is 'f', which an earlier tool already has", "tools"),
    ({"tools": [TOOL] * (MAX_TOOLS + 1)}, f"at most {MAX_TOOLS}", "tools"),
    # The empty field `custom` is ignored, and must not hide the grammar.
    ({"tools": [{"type": "custom", "name": "f", "custom": {}, "format": LONG_GRAMMAR}]}, "5000 characters of", "tools"),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "of the type 'object'", "tools.0.parameters"),
    ({"tool_choice": "required"}, "only allowed when `tools` are sent", "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "it must be 'auto', 'none', 'required'", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "not in `tools`", "tool_choice"),
    ({"include": ["nonsense"]}, "`include` has 'nonsense', which this server does not know", "include"),
    ({"include": ["reasoning.encrypted_content"], "top_logprobs": 3}, "only allowed with `include", "top_logprobs"),
    ({"top_logprobs": 21}, "less than or equal to 20", "top_logprobs"),
    ({"max_output_tokens": 0}, "greater than or equal to 1", "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "must have `name`", "text.format"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "must have `schema` with", "text.format"),
    ({"text": {"format": {"type": "grammar"}}}, "'json_schema', but it is 'grammar'.", "text.format.type"),
    ({"max_output_tokens": "5"}, "valid integer, but it is '5'.", "max_output_tokens"),
    ({"max_output_tokens": True}, "valid integer, but it is true.", "max_output_tokens"),
    ({"stream_options": {}}, "only allowed with `stream: true`", "stream_options"),
    ({"metadata": {"a": 1}}, "valid string", "metadata.a"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "param"), REFUSED)
def test_what_cannot_be_served_is_refused_with_the_field_and_the_remedy(
    fields: dict[str, Any], message: str, param: str
) -> None:
    found, named, _ = refusal(**fields)
    assert message in found and named == param
