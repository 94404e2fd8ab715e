from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from slora_api.schemas import ChatRequest, CompletionRequest

COMPLETION = {"model": "m", "prompt": "p"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refusal(schema: type[BaseModel], body: Any) -> dict[str, Any]:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    return dict(caught.value.errors()[0])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_a_text_token_ids_or_a_list_of_either(prompt: Any, prompts: Any) -> None:
    assert list(CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompts) == prompts


@pytest.mark.parametrize(
    "prompt", [None, 3, [], [[]], ["a", 1], [[1], "a"], [["a"]], [1.5], [True], {"a": 1}, [[[1]]]]
)
def test_any_other_prompt_is_refused_with_one_message_that_names_it(prompt: Any) -> None:
    error = refusal(CompletionRequest, {"model": "m", "prompt": prompt})
    assert error["ctx"]["param"] == "prompt"


NEUTRAL_COMPLETION = {
    "n": 1, "best_of": 1, "echo": False, "suffix": None, "frequency_penalty": 0, "presence_penalty": 0.0,
    "logit_bias": {}, "logprobs": None, "user": "somebody", "seed": None, "stop": None,
}  # fmt: skip
NEUTRAL_CHAT = {
    "n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"],
    "parallel_tool_calls": True, "functions": None, "reasoning_effort": None, "store": False, "metadata": {},
    "service_tier": "auto", "frequency_penalty": 0, "logprobs": False, "top_logprobs": None, "audio": None,
    "web_search_options": None,
}  # fmt: skip


def test_unsupported_fields_with_values_that_change_nothing_are_accepted() -> None:
    assert CompletionRequest.model_validate(COMPLETION | NEUTRAL_COMPLETION).prompt == "p"
    assert ChatRequest.model_validate(CHAT | NEUTRAL_CHAT).messages[0].content == "hi"


@pytest.mark.parametrize(
    ("schema", "field", "value"),
    [
        (ChatRequest, "store", 1),
        (CompletionRequest, "suffix", "end"),
        (CompletionRequest, "cache_salt", "mine"),
        (ChatRequest, "tools", [{"type": "function"}]),
        (ChatRequest, "tool_choice", "required"),
        (ChatRequest, "response_format", {"type": "json_object"}),
        (ChatRequest, "reasoning_effort", "high"),
        (ChatRequest, "service_tier", "priority"),
        (ChatRequest, "store", True),
        (ChatRequest, "audio", {"voice": "a"}),
        (ChatRequest, "modalities", ["text", "audio"]),
        (ChatRequest, "modalities", []),
        (ChatRequest, "modalities", "text"),
        (ChatRequest, "web_search_options", {}),
        (ChatRequest, "web_search_options", False),
        (ChatRequest, "web_search_options", "{accepted}"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_with_its_name_and_value(
    schema: type[BaseModel], field: str, value: Any
) -> None:
    body = (COMPLETION if schema is CompletionRequest else CHAT) | {field: value}
    error = refusal(schema, body)
    assert error["type"] == "unsupported_parameter" and error["ctx"]["param"] == field
    assert f"`{field}` is not supported by this server with the value {value!r}; omit it" in error["msg"]


@pytest.mark.parametrize(
    "value",
    [
        "x" * 4_000_000,
        ["x" * 1_000_000] * 64,
        {"x" * 100_000: [{"y": 10**60}] * 10_000},
        [[[[]]]] * 10_000,
        [{f"{key:0200}": "\U0010ffff" * 200 for key in range(64)}] * 64,
    ],
)
def test_a_refusal_shows_a_large_value_in_short(value: Any) -> None:
    error = refusal(ChatRequest, CHAT | {"web_search_options": value})
    assert "..." in error["msg"] and len(error["msg"]) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 1.5), ("priority", True), ("priority", "1"), ("deadline_ms", 0.5), ("deadline_ms", True)],
)
def test_a_non_integer_priority_or_deadline_is_refused_by_name(field: str, value: Any) -> None:
    for schema, body in ((CompletionRequest, COMPLETION), (ChatRequest, CHAT)):
        assert refusal(schema, body | {field: value})["loc"] == (field,)


def test_an_unknown_field_is_refused() -> None:
    error = refusal(CompletionRequest, COMPLETION | {"temprature": 1})
    assert error["type"] == "extra_forbidden" and error["loc"] == ("temprature",)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", "5"), ("max_tokens", 5.5), ("max_tokens", True), ("temperature", "hot"), ("stream", 1),
     ("stop", [1]), ("stop_token_ids", [1.5]), ("stop_token_ids", ["1"]), ("seed", "x"), ("ignore_eos", "yes"),
     ("n", True), ("best_of", "2"), ("min_p", "0"), ("min_tokens", 1.5), ("presence_penalty", "1")],
)  # fmt: skip
def test_values_are_not_converted_from_other_types(field: str, value: Any) -> None:
    assert field in refusal(CompletionRequest, COMPLETION | {field: value})["loc"]


@pytest.mark.parametrize(
    "bias", [[1], "x", {"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"9" * 10: 1}, {"²": 1}]
)
def test_a_bias_is_for_token_ids(bias: Any) -> None:
    assert refusal(ChatRequest, CHAT | {"logit_bias": bias})["ctx"]["param"] == "logit_bias"


def test_the_keys_of_a_bias_are_numbers() -> None:
    assert ChatRequest.model_validate(CHAT | {"logit_bias": {"5": 1, "007": -2.5}}).logit_bias == {
        5: 1,
        7: -2.5,
    }
    assert "logit_bias" in refusal(ChatRequest, CHAT | {"logit_bias": {"5": "1"}})["loc"]


def test_stream_options_without_stream_are_refused() -> None:
    error = refusal(ChatRequest, CHAT | {"stream_options": {"include_usage": True}})
    assert error["ctx"]["param"] == "stream_options"
    assert ChatRequest.model_validate(
        CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    ).include_usage


def test_top_logprobs_without_logprobs_are_refused() -> None:
    assert refusal(ChatRequest, CHAT | {"top_logprobs": 2})["ctx"]["param"] == "top_logprobs"


def test_two_limits_on_the_answer_that_differ_are_refused() -> None:
    assert (
        refusal(ChatRequest, CHAT | {"max_tokens": 2, "max_completion_tokens": 3})["ctx"]["param"]
        == "max_tokens"
    )
    ChatRequest.model_validate(CHAT | {"max_tokens": 2, "max_completion_tokens": 2})


def test_text_parts_of_a_message_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = CHAT | {"messages": [{"role": "user", "content": content}]}
    assert ChatRequest.model_validate(body).messages[0].content == "ab"


def test_a_part_that_is_not_text_is_refused_by_its_type() -> None:
    content = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    error = refusal(ChatRequest, CHAT | {"messages": [{"role": "user", "content": content}]})
    assert "'image_url'" in error["msg"]


def test_the_developer_role_is_an_alias_of_system() -> None:
    body = CHAT | {"messages": [{"role": "developer", "content": "be kind", "name": "boss"}]}
    assert ChatRequest.model_validate(body).messages[0].for_template() == {
        "role": "system",
        "content": "be kind",
        "name": "boss",
    }


@pytest.mark.parametrize("messages", [[], None, "hi", [{"role": "tool", "content": "x"}], [{"role": "user"}]])
def test_malformed_messages_are_refused(messages: Any) -> None:
    assert refusal(ChatRequest, {"model": "m", "messages": messages})["loc"][0] == "messages"
