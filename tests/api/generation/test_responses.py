"""/v1/responses over an engine whose text the test chooses, with the openai package as the client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from slora.core.errors import EngineUnavailable
from slora.core.request import FinishReason, TokenDelta, TokenLogprobs
from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, post, running_platform
from tests.api.scripted_engine import EOS, ScriptedEngine
from tests.support.tool_templates import QWEN3

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
BODY = {"model": "qwen", "input": "hi"}


class City(BaseModel):
    name: str


class GetWeather(BaseModel):
    """The weather."""

    city: str


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine(max_model_len=4096)
    with running_platform(tmp_path_factory.mktemp("data"), engine) as running:
        members = make_members() | {"chat_template.jinja": QWEN3.encode()}
        assert running.upload(running.key("acme"), "qwen", members).status_code == 201
        yield running


@pytest.fixture(scope="module")
def client(shared: Platform, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared.url + "/v1", api_key=key, max_retries=0) as made:
        yield made


def test_an_answer_repeats_the_request_and_has_the_values_that_were_used(
    platform: Platform, client: openai.OpenAI
) -> None:
    platform.says("Hi!")
    answer = client.responses.create(
        model="base",
        input="hello",
        instructions="Be brief.",
        max_output_tokens=16,
        metadata={"a": "b"},
        temperature=0.5,
        user="ada",
        safety_identifier="s",
        prompt_cache_key="p",
        store=False,
        truncation="disabled",
        service_tier="auto",
    )
    Response.model_validate(answer.model_dump())
    assert answer.output_text == "Hi!" and answer.status == "completed" and answer.error is None
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == "base"
    assert answer.instructions == "Be brief." and answer.max_output_tokens == 16
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 1.0, {"a": "b"})
    assert (answer.user, answer.safety_identifier, answer.prompt_cache_key) == ("ada", "s", "p")
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert answer.usage is not None and answer.usage.input_tokens == len(platform.last_prompt())
    assert answer.usage.output_tokens == 4 and answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4
    assert platform.last_prompt() == "[system]Be brief.[user]hello"
    sampling = platform.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 16)


def test_the_events_of_a_stream_come_in_openais_order(platform: Platform, client: openai.OpenAI) -> None:
    platform.says(f"<think>\nHm.\n</think>\n\nSo:\n{CALL}")
    events = list(client.responses.create(**BODY, tools=[WEATHER], stream=True))  # type: ignore[call-overload]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    items = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert items == ["reasoning", "message", "function_call"]
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert done.name == "get_weather"
    usage = events[-1].response.usage
    assert usage.output_tokens_details.reasoning_tokens == len("<think>\nHm.\n</think>")


def test_tools_are_called_and_answered_over_several_turns(platform: Platform, client: openai.OpenAI) -> None:
    tools: Any = [
        openai.pydantic_function_tool(GetWeather, name="get_weather")["function"] | {"type": "function"}
    ]
    items: list[Any] = [{"role": "user", "content": "hi"}]
    platform.says(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}")
    answer = client.responses.create(model="qwen", input=items, tools=tools, store=False)
    items += answer.output
    calls = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Köln"}] * 2
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"} for call in calls
    ]
    platform.says("It is warm.")
    with client.responses.stream(model="qwen", input=items, tools=tools) as stream:
        last = stream.get_final_response()
    assert last.output_text == "It is warm."
    said = "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nLet me see." + f"\n{CALL}" * 2 + "<|im_end|>\n"
    assert said + "<|im_start|>tool\n20 degrees<|im_end|>\n" * 2 in platform.last_prompt()
    # Items of the stream helper have further fields.
    client.responses.create(model="qwen", input=[*items, *last.output, *items[:1]], tools=tools)
    assert "It is warm.<|im_end|>\n<|im_start|>user\nhi" in platform.last_prompt()


def test_a_pydantic_model_is_the_form_of_the_answer(platform: Platform, client: openai.OpenAI) -> None:
    platform.says('<think>Hm.</think>{"name": "Ulm"}')
    answer = client.responses.parse(model="qwen", input="hi", text_format=City)
    assert answer.output_parsed == City(name="Ulm")
    form = platform.engine.requests[-1].sampling.structured_output
    assert form is not None and '"name"' in form.text and answer.text is not None
    assert answer.text.format is not None and answer.text.format.type == "json_schema"
    with client.responses.stream(model="qwen", input="hi", text_format=City) as stream:
        done = [event.parsed for event in stream if event.type == "response.output_text.done"]
    assert done == [City(name="Ulm")]
    error = post(platform, client.api_key, PATH, BODY | {"text": {"format": {
        "type": "json_schema", "name": "a", "schema": {"type": "object", "not": {}}}}}).json()["error"]  # fmt: skip
    assert error["param"] == "text.format" and "not" in error["message"]


def test_a_disabled_second_call_is_left_out(platform: Platform, key: str) -> None:
    platform.says(CALL + CALL)
    answer = post(platform, key, PATH, BODY | {"tools": [WEATHER], "parallel_tool_calls": False}).json()
    assert len(answer["output"]) == 1 and answer["parallel_tool_calls"] is False


def test_a_call_that_max_output_tokens_cuts_off_is_incomplete(platform: Platform, key: str) -> None:
    platform.says(CALL[:-25], FinishReason.LENGTH)
    body = BODY | {"tools": [WEATHER], "max_output_tokens": 20}
    answer = post(platform, key, PATH, body).json()
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = answer["output"]
    assert (answer["status"], item["status"]) == ("incomplete", "incomplete")
    events = post(platform, key, PATH, body | {"stream": True}).text
    assert "event: response.incomplete" in events and "response.completed" not in events
    assert "[DONE]" not in events


def test_log_probabilities_are_those_of_the_message(platform: Platform, key: str) -> None:
    text = b"<think>Hm.</think>Hi!"
    entries = [TokenLogprobs(-1.0 - at, ((token, -1.0 - at),)) for at, token in enumerate(text)]
    platform.engine.answers = [
        [TokenDelta((token,), None, (entry,)) for token, entry in zip(text, entries, strict=True)]
        + [TokenDelta((EOS,), FinishReason.STOP, (entries[0],))]
    ]
    body = BODY | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = post(platform, key, PATH, body).json()
    listed = answer["output"][1]["content"][0]["logprobs"]
    assert [one["token"] for one in listed] == ["H", "i", "!"] and answer["top_logprobs"] == 1
    assert [one["top_logprobs"][0]["token"] for one in listed] == ["H", "i", "!"]
    assert listed[0]["logprob"] == entries[18].logprob


def test_an_error_in_the_middle_ends_the_response(platform: Platform, client: openai.OpenAI) -> None:
    platform.engine.answers = [[TokenDelta((65,)), EngineUnavailable("it died")]]
    *_, told, failed = client.responses.create(**BODY, stream=True)  # type: ignore[call-overload]
    assert (told.type, told.code) == ("error", "engine_unavailable") and "it died" in told.message
    assert failed.type == "response.failed" and failed.response.error.code == "server_error"
    assert failed.response.output[0].content[0].text == "A"


def test_what_agents_ask_of_reasoning_is_honoured(platform: Platform, client: openai.OpenAI) -> None:
    platform.says("<think>Hm.</think>Hi")
    answer = client.responses.create(
        model="qwen",
        input="hi",
        store=False,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
    )
    assert answer.reasoning is not None and answer.reasoning.effort == "low"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    again: Any = [{"role": "user", "content": "hi"}, *answer.output, {"role": "user", "content": "more"}]
    client.responses.create(model="qwen", input=again, reasoning={"effort": "none"})
    prompt = platform.last_prompt()
    assert "<think>\nHm.\n</think>" in prompt and prompt.endswith("<think>\n\n</think>\n\n")
    ignoring = client.responses.with_raw_response.create(
        model="base", input="hi", reasoning={"effort": "low"}
    )
    assert ignoring.headers["x-slora-ignored"] == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"input": "x" * 5000}, "`input` has 5000 characters|input has 5", "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens is 5000", "max_output_tokens"),
        ({"input": [{"role": "user", "content": "a"}] * 3000}, "`input` has 3000 items", "input"),
        ({"model": "base", "tools": [WEATHER]}, "does not show tools to the model", "tools"),
        ({"temperature": 3}, "temperature is 3", "temperature"),
        ({"previous_response_id": "resp_1"}, "This server stores nothing", "previous_response_id"),
    ],
)
def test_refusals_name_the_fields_of_this_route(
    platform: Platform, key: str, fields: dict[str, Any], message: str, param: str
) -> None:
    answer = post(platform, key, PATH, BODY | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert any(part in error["message"] for part in message.split("|"))
    assert not platform.engine.requests


@pytest.mark.parametrize("n", ["", [], {}])
def test_an_empty_value_of_a_field_of_chats_has_no_effect(platform: Platform, key: str, n: Any) -> None:
    answer = post(platform, key, PATH, BODY | {"n": n})
    assert answer.status_code == 200, answer.text


def test_the_reasoning_of_a_chat_is_counted_by_the_same_means(
    platform: Platform, client: openai.OpenAI
) -> None:
    platform.says("<think>Hm.</think>Hi")
    messages: Any = [{"role": "user", "content": "hi"}]
    usage = client.chat.completions.create(model="qwen", messages=messages).usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len("<think>Hm.</think>")
    plain = client.chat.completions.create(model="base", messages=messages).usage
    assert plain is not None and plain.completion_tokens_details is None
