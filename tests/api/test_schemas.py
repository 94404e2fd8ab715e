from itertools import product
from typing import Any, get_type_hints

import pytest
from openai.types import chat, completion_create_params
from pydantic import BaseModel, ValidationError

from slora_api.completions.schemas import ChatMessage, ChatRequest, CompletionRequest
from slora_api.http.field_types import IgnoredFields
from slora_api.http.unsupported import IGNORED_HINTS

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


# Field -> values that are refused wherever a request has the field, and never converted from another type.
BAD: dict[str, list[Any]] = {
    "prompt": [None, 3, [], [[]], ["a", 1], [[1], "a"], [["a"]], [1.5], [True], {"a": 1}, [[[1]]]],
    "messages": [[], None, "hi", [{"role": "tool", "content": "x"}], [{"role": "user"}],
                 [{"role": "user", "content": None}]],
    "metadata": [{"k" * 65: "v"}, {"k": "v" * 513}, {str(at): "" for at in range(17)}, {"k": 1}, {"k": "\ud800"}, []],
    "logit_bias": [[1], "x", {"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"9" * 10: 1}, {"²": 1}, {"5": "1"}],
    "priority": [1.5, True, "1"], "deadline_ms": [0.5, True], "max_tokens": ["5", 5.5, True], "temperature": ["hot"],
    "stream": [1], "stop": [[1]], "stop_token_ids": [[1.5], ["1"]], "seed": ["x"], "ignore_eos": ["yes"], "n": [True],
    "best_of": ["2"], "min_p": ["0"], "min_tokens": [1.5], "presence_penalty": ["1"],
    "top_logprobs": [2],  # without logprobs
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str) -> None:
    schemas = [
        one for one in ((CompletionRequest, COMPLETION), (ChatRequest, CHAT)) if field in one[0].model_fields
    ]
    assert schemas
    for (schema, body), value in product(schemas, BAD[field]):
        error = refusal(schema, body | {field: value})
        assert (error.get("ctx", {}).get("param") or error["loc"][0]) == field, (schema, value)


# Values of OpenAI's and vLLM's fields that ask for nothing, such as their documented defaults.
NEUTRAL = {
    "n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
    "logit_bias": {}, "stop": [], "stream": False, "use_beam_search": False, "length_penalty": 1.0, "top_k": -1,
    "stop_token_ids": [], "min_tokens": 0, "ignore_eos": False, "priority": 0, "echo": False,
    "response_format": {"type": "text"}, "store": False, "metadata": {"k" * 64: "v" * 512}, "service_tier": "auto",
    "prompt_cache_options": {}, "prompt_cache_retention": "in_memory",
    "include_stop_str_in_output": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "truncation_side": "left", "watermarking": False, "thinking_token_budget": -1,
    "return_token_ids": False, "return_tokens_as_token_ids": False, "return_token_offsets": False,
    "return_mm_kwargs": True, "routed_experts_prompt_start": 0, "stream_interval": 1, "vllm_xargs": {},
    "kv_transfer_params": {}, "ec_transfer_params": {}, "logits_processors": [],
    "user": "somebody", "safety_identifier": "hashed", "prompt_cache_key": "key",
}  # fmt: skip
NEUTRAL_COMPLETION = NEUTRAL | {
    "suffix": "",
    "prompt_embeds": [],
    "add_special_tokens": True,
    "max_tokens": 16,
}
NEUTRAL_CHAT = NEUTRAL | {
    "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
    "functions": [], "function_call": "none", "modalities": ["text"], "verbosity": "medium",
    "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "documents": [],
    "chat_template_kwargs": {}, "media_io_kwargs": {}, "mm_processor_kwargs": {}, "include_reasoning": True,
    "return_prompt_text": False,
}  # fmt: skip
REQUIRED = {"model", "prompt", "messages"}


@pytest.mark.parametrize(
    ("schema", "body", "neutral"),
    [(CompletionRequest, COMPLETION, NEUTRAL_COMPLETION), (ChatRequest, CHAT, NEUTRAL_CHAT)],
)
def test_null_and_values_that_ask_for_nothing_never_refuse_a_request(
    schema: type[BaseModel], body: dict[str, Any], neutral: dict[str, Any]
) -> None:
    schema.model_validate(body | neutral)
    schema.model_validate(body | dict.fromkeys(schema.model_fields.keys() - REQUIRED))


def test_every_field_of_the_openai_package_is_known() -> None:
    for schema, params in (
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, chat.completion_create_params.CompletionCreateParamsBase),
        (ChatMessage, chat.ChatCompletionAssistantMessageParam),
    ):
        assert get_type_hints(params).keys() <= schema.model_fields.keys() | IGNORED_HINTS.keys()
    assert chat.ChatCompletionMessage.model_fields.keys() <= ChatMessage.model_fields.keys()


def test_the_document_lists_the_accepted_values_of_an_unsupported_field() -> None:
    fields = ChatRequest.model_json_schema()["properties"]
    assert fields["modalities"]["enum"] == [["text"], None]
    assert fields["documents"]["enum"] == [[], None, "", {}]
    assert fields["documents"]["description"].startswith("Not supported")
    assert fields["verbosity"]["description"].startswith("Ignored")


@pytest.mark.parametrize(
    ("schema", "field", "value"),
    [
        (ChatRequest, "store", 1),
        (CompletionRequest, "suffix", "end"),
        (CompletionRequest, "cache_salt", "mine"),
        (ChatRequest, "truncate_prompt_tokens", 5),
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
    assert error["type"] == "unsupported_parameter" and error["loc"] == (field,)
    spelled = str(value).lower() if isinstance(value, bool) else repr(value)
    assert error["msg"].startswith(f"is not supported by this server with the value {spelled}; omit it")


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


def test_the_keys_of_a_bias_are_numbers() -> None:
    error = refusal(ChatRequest, CHAT | {"logit_bias": {"one": 1, "2": 1, "three": 1}})
    assert "['one', 'three']" in error["msg"]
    bias = ChatRequest.model_validate(CHAT | {"logit_bias": {"5": 1, "007": -2.5}}).logit_bias
    assert bias == {5: 1, 7: -2.5}


def test_two_limits_on_the_answer_that_differ_are_refused() -> None:
    error = refusal(ChatRequest, CHAT | {"max_tokens": 2, "max_completion_tokens": 3})
    assert error["ctx"]["param"] == "max_tokens"
    ChatRequest.model_validate(CHAT | {"max_tokens": 2, "max_completion_tokens": 2})


# The fields of a message as servers and packages send them.
SENT_BACK = {
    "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "reasoning": None,
    "reasoning_content": None, "provider_specific_fields": {"refusal": None},
}  # fmt: skip


@pytest.mark.parametrize("content", ["Hi!", None])
def test_an_answer_is_accepted_as_a_message_with_all_its_fields(content: str | None) -> None:
    answer = {"role": "assistant", "content": content, **SENT_BACK}
    parsed = ChatRequest.model_validate({"model": "m", "messages": [answer]})
    assert parsed.messages[0].for_template() == {"role": "assistant", "content": content or ""}
    without = {"role": "assistant", **SENT_BACK, "tool_calls": []}
    assert ChatRequest.model_validate({"model": "m", "messages": [without]}).messages[0].content == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"refusal": "No."}, "only a message of the assistant"),
        ({"function_call": {"name": "f", "arguments": ""}}, "only a message of the assistant"),
        ({"role": "assistant", "content": None, "audio": {"id": "1"}}, "without a transcript"),
        ({"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "'image_url'"),
    ],
)
def test_a_message_that_the_model_cannot_be_shown_is_refused(fields: dict[str, Any], words: str) -> None:
    message = {"role": "user", "content": "a"} | fields
    assert words in refusal(ChatRequest, CHAT | {"messages": [message]})["msg"]


# What OpenAI's answers, other servers and packages add to a message. The model sees the text in the second place.
ODD_ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"content": "a", "parsed": {"b": 1}}, "a"),
    ({"content": "a", "annotations": [{"type": "url_citation", "url_citation": {}}]}, "a"),
    ({"content": "a", "citations": None, "annotations": [], "logprobs": {}, "id": "", "vendor": []}, "a"),
    ({"content": "a", "cache_control": {"type": "ephemeral"}, "reasoning_details": [{"text": "b"}]}, "a"),
    ({"content": None, "refusal": "No."}, "No."),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, "a"),
    ({"content": [{"type": "text", "text": "a", "citations": None}, {"type": "text", "text": "b"}]}, "ab"),
    ({"content": None, "audio": {"id": "1", "data": "x", "expires_at": 1, "transcript": "Hm."}}, "Hm."),
]


@pytest.mark.parametrize(("answer", "text"), ODD_ANSWERS)
def test_an_answer_of_any_server_is_accepted_as_a_message(answer: dict[str, Any], text: str) -> None:
    parsed = ChatRequest.model_validate({"model": "m", "messages": [{"role": "assistant", **answer}]})
    assert parsed.messages[0].for_template() == {"role": "assistant", "content": text}


def test_calls_of_functions_and_custom_tools_are_shown_as_tool_calls() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "run", "input": 'say "a"'}, "function": None}
    messages = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    legacy, result, called, _ = ChatRequest.model_validate({"model": "m", "messages": messages}).messages
    (call,) = legacy.for_template()["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    assert result.for_template() == {
        "role": "tool", "content": "1", "name": "f", "tool_call_id": call["id"],
    }  # fmt: skip
    (call,) = called.for_template()["tool_calls"]
    assert call == {
        "id": "c", "type": "function", "function": {"name": "run", "arguments": '{"input": "say \\"a\\""}'},
    }  # fmt: skip


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_an_unknown_field_that_asks_for_nothing_is_accepted_anywhere(value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "unknown": value}, "unknown": value}
    part = {"type": "text", "text": "a", "unknown": value}
    message = {"role": "user", "content": [part], "unknown": value}
    options = {"include_usage": True, "unknown": value}
    body = {"stream": True, "stream_options": options, "tools": [tool], "unknown": value}
    ChatRequest.model_validate({"model": "m", "messages": [message], **body})


@pytest.mark.parametrize("value", [0, False, " ", "x", [None], {"a": None}])
def test_an_unknown_field_that_asks_for_something_is_refused(value: Any) -> None:
    for schema, body in ((CompletionRequest, COMPLETION), (ChatRequest, CHAT)):
        error = refusal(schema, body | {"temperture": value})
        assert error["type"] == "extra_forbidden" and error["loc"] == ("temperture",)


def test_ignored_names_are_safe_in_a_header() -> None:
    ignored = IgnoredFields(ignores_unknown=True)
    unknown = {"a\r\nx-evil: 1": 1, "\ud800": 2, "é": 3, "x" * 65: 4, "fine.name": 5}
    ChatRequest.model_validate(CHAT | unknown | {f"n{at}": 1 for at in range(40)}, context=ignored)
    assert ignored.listed == f"?, fine.name, {', '.join(f'n{at}' for at in range(27))}, ..."


def test_the_developer_role_is_an_alias_of_system() -> None:
    body = CHAT | {"messages": [{"role": "developer", "content": "be kind", "name": "boss"}]}
    shown = ChatRequest.model_validate(body).messages[0].for_template()
    assert shown == {"role": "system", "content": "be kind", "name": "boss"}
