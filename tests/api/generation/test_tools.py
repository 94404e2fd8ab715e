"""Tool calls and reasoning through the chat route, over an engine whose text the test chooses."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from slora.core.request import FinishReason, TokenDelta, TokenLogprobs
from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, post, running_platform
from tests.api.scripted_engine import EOS, ScriptedEngine, deltas_of
from tests.support.tool_templates import LLAMA3, MISTRAL, QWEN3, R1

CHAT = "/v1/chat/completions"
# Shows the tools and the format of calls, but no call of an earlier answer.
ONE_WAY = "{{ tools }} Write <tool_call>.{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATES = {
    "qwen": QWEN3,
    "llama": LLAMA3,
    "mistral": MISTRAL,
    "r1": R1,
    "one-way": ONE_WAY,
    "odd": "{{ tools }}{{ messages }}",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
UNENFORCEABLE = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BODY = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ARGUMENTS = '{"city": "Köln"}'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine(max_model_len=4096)
    with running_platform(tmp_path_factory.mktemp("data"), engine) as running:
        key = running.key("acme")
        for name, template in TEMPLATES.items():
            members = make_members() | {"chat_template.jinja": template.encode()}
            assert running.upload(key, name, members).status_code == 201
        yield running


def ask(platform: Platform, key: str, **fields: Any) -> Any:
    return post(platform, key, CHAT, BODY | fields).json()


def stream(platform: Platform, key: str, **fields: Any) -> list[Any]:
    answer = post(platform, key, CHAT, BODY | {"stream": True} | fields)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_call_has_openais_shape(platform: Platform, key: str) -> None:
    platform.says(f"<think>\nHm.\n</think>\n\n{CALL}")
    (choice,) = ask(platform, key)["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant", "content": None, "refusal": None, "reasoning": "Hm.", "reasoning_content": "Hm.",
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "token_ids": None,
    }  # fmt: skip
    assert f"{json.dumps(WEATHER)}\n" in platform.last_prompt()


def test_a_call_is_streamed_by_deltas_as_openai_does(platform: Platform, key: str) -> None:
    platform.says(f"<think>Hm.</think>So:\n{CALL}{CALL}")
    chunks = stream(platform, key)
    choices = [chunk["choices"][0] for chunk in chunks]
    first, *deltas, last = [choice["delta"] for choice in choices]
    assert first == {"role": "assistant", "content": None} and last == {}
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "So:"
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    for index in (0, 1):
        begin, *more = [call for call in calls if call["index"] == index]
        assert begin.pop("id").startswith("call_")
        assert begin == {
            "index": index,
            "type": "function",
            "function": {"name": "get_weather", "arguments": ""},
        }
        assert len(more) > 3 and all(piece.keys() == {"index", "function"} for piece in more)
        assert "".join(piece["function"]["arguments"] for piece in more) == ARGUMENTS


def test_a_call_that_max_tokens_cuts_off_ends_with_length(platform: Platform, key: str) -> None:
    platform.says(CALL[:-25], FinishReason.LENGTH)
    (choice,) = ask(platform, key)["choices"]
    assert choice["finish_reason"] == "length"
    cut = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert ARGUMENTS.startswith(cut) and cut != ARGUMENTS
    assert stream(platform, key)[-1]["choices"][0]["finish_reason"] == "length"


def test_calls_are_kept_if_the_template_cannot_show_them_again(platform: Platform, key: str) -> None:
    platform.says(f"So: {CALL}{CALL}")
    (choice,) = ask(platform, key, model="one-way")["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [ARGUMENTS] * 2
    assert choice["message"]["content"] == "So:" and choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(platform, key, model="one-way")]
    assert len({call["index"] for delta in deltas for call in delta.get("tool_calls", ())}) == 2
    (choice,) = ask(platform, key, model="one-way", parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "rain"}
    messages = [*BODY["messages"], choice["message"], result]
    refused = post(platform, key, CHAT, BODY | {"model": "one-way", "messages": messages})
    assert refused.status_code == 400 and "shows at most 0 of them" in refused.json()["error"]["message"]


def test_the_choice_none_hides_the_tools_and_calls_nothing(platform: Platform, key: str) -> None:
    platform.says(CALL)
    (choice,) = ask(platform, key, tool_choice="none")["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert "get_weather" not in platform.last_prompt()


def test_each_choice_has_its_own_calls(platform: Platform, key: str) -> None:
    texts = [CALL.encode(), b"No call."]
    answers = [
        TokenDelta((token,), FinishReason.STOP if token == 256 else None, index=index)
        for index, text in enumerate(texts)
        for token in (*text, 256)
    ]
    platform.engine.answers = [answers]
    first, second = ask(platform, key, n=2)["choices"]
    assert first["finish_reason"] == "tool_calls" and second["finish_reason"] == "stop"
    assert second["message"]["content"] == "No call." and "tool_calls" not in second["message"]
    ends = [chunk["choices"][0] for chunk in stream(platform, key, n=2)]
    assert {end["index"]: end["finish_reason"] for end in ends if end["finish_reason"]} == {
        0: "tool_calls",
        1: "stop",
    }


def test_a_long_answer_is_read_like_a_short_one(platform: Platform, key: str) -> None:
    arguments = json.dumps({"city": [{"name": "Köln"}] * 2000}, ensure_ascii=False)
    text = CALL.replace(ARGUMENTS, arguments)
    platform.engine.answers = [[TokenDelta((*text.encode(), EOS), FinishReason.STOP)]]
    (call,) = ask(platform, key)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments and len(arguments) > 1 << 14
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(platform, key)]
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
    assert "".join(pieces) == arguments


def test_all_tokens_of_a_call_have_log_probabilities(platform: Platform, key: str) -> None:
    entry = TokenLogprobs(-1.0, ())
    tokens = [*CALL.encode()]
    platform.engine.answers = [
        [TokenDelta((token,), None, (entry,)) for token in tokens]
        + [TokenDelta((256,), FinishReason.STOP, (entry,))]
    ]
    (choice,) = ask(platform, key, logprobs=True)["choices"]
    assert len(choice["logprobs"]["content"]) == len(tokens)
    listed = [chunk["choices"][0]["logprobs"] for chunk in stream(platform, key, logprobs=True)]
    assert sum(len(some["content"]) for some in listed if some) == len(tokens)


@pytest.mark.parametrize(
    ("model", "text", "thoughts", "content"),
    [
        ("r1", "Hm.\n</think>\n\nHi", "Hm.", "Hi"),
        ("qwen", "<think>\nHm.\n</think>\n\nHi", "Hm.", "Hi"),
        ("qwen", "Hi </think>", None, "Hi </think>"),
        ("r1", "Hm.", "Hm.", None),
        ("base", "<think>Hm.</think>Hi", None, "<think>Hm.</think>Hi"),
    ],
)
def test_reasoning_is_a_field_of_its_own(
    platform: Platform, key: str, model: str, text: str, thoughts: str | None, content: str | None
) -> None:
    platform.says(text)
    message = ask(platform, key, model=model, tools=None)["choices"][0]["message"]
    assert message.get("reasoning") == message.get("reasoning_content") == thoughts
    assert message["content"] == content
    hidden = ask(platform, key, model=model, tools=None, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning" not in hidden and hidden["content"] == content
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in stream(platform, key, model=model, include_reasoning=False, tools=None)
    ]
    assert not any("reasoning" in delta or "reasoning_content" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("model", "effort", "is_off"),
    [("qwen", "none", True), ("qwen", "high", False), ("base", "none", False), ("r1", "medium", False)],
)
def test_an_effort_of_reasoning_switches_the_chat_template(
    platform: Platform, key: str, model: str, effort: str, is_off: bool
) -> None:
    platform.says("Hi")
    ask(platform, key, model=model, tools=None, reasoning_effort=effort)
    assert platform.last_prompt().endswith("</think>\n\n") == is_off


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model": "r1", "reasoning_effort": "none"},
            "`reasoning_effort` is 'none', but the chat template of the model 'r1' has no variable that sets",
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "which sets `enable_thinking` to false, and `chat_template_kwargs` sets it to another value",
        ),
        ({"reasoning_effort": "some"}, "'none', 'minimal', 'low'"),
    ],
)
def test_an_effort_that_would_be_ignored_is_refused(
    platform: Platform, key: str, fields: dict[str, Any], message: str
) -> None:
    error = ask(platform, key, **{"tools": None} | fields)["error"]
    assert message in error["message"] and error["param"] == "reasoning_effort"
    assert not platform.engine.requests


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("base", {}, "`tools` is set, but the chat template of the model 'base' does not show tools"),
        ("odd", {}, "does not know the format in which the model 'odd' writes tool calls"),
        (
            "qwen",
            {"guided_regex": "a+"},
            "guided_regex asks for the form regex, which leaves no room for tool calls",
        ),
        ("qwen", {"tool_choice": "required", "tools": [UNENFORCEABLE]}, "tools can't be enforced"),
    ],
)
def test_tools_that_cannot_work_are_refused_with_the_model_and_the_remedy(
    platform: Platform, key: str, model: str, fields: dict[str, Any], message: str
) -> None:
    error = ask(platform, key, model=model, **fields)["error"]
    assert message in error["message"] and error["type"] == "invalid_request_error"
    assert not platform.engine.requests


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_required_call_is_held_to_a_grammar_and_ends_as_in_openais_api(
    platform: Platform, key: str, choice: Any, reason: str
) -> None:
    platform.says(CALL)
    (made,) = ask(platform, key, tool_choice=choice)["choices"]
    assert made["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert made["finish_reason"] == reason
    form = platform.engine.requests[-1].sampling.structured_output
    assert form is not None and "get_weather" in form.text and "thought" in form.text
    assert ("call)*" in form.text) == (choice == "required")
    ask(
        platform, key, tool_choice=choice, response_format={"type": "json_object"}
    )  # has no content of that form
    assert platform.engine.requests[-1].sampling.structured_output == form


def test_strict_tools_are_held_to_a_grammar_that_allows_text(platform: Platform, key: str) -> None:
    platform.says("Just text.")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    assert ask(platform, key, tools=[strict])["choices"][0]["message"]["content"] == "Just text."
    form = platform.engine.requests[-1].sampling.structured_output
    assert form is not None and "TEXT" in form.text
    ask(platform, key)
    assert platform.engine.requests[-1].sampling.structured_output is None


def test_json_may_follow_reasoning_or_be_replaced_by_a_call(platform: Platform, key: str) -> None:
    platform.says('<think>Hm.</think>{"a": 1}')
    form = {"type": "json_object"}
    message = ask(platform, key, response_format=form)["choices"][0]["message"]
    assert message["reasoning"] == "Hm." and message["content"] == '{"a": 1}'
    platform.says(CALL)
    assert "tool_calls" in ask(platform, key, response_format=form)["choices"][0]["message"]


def test_a_form_that_is_not_json_leaves_no_room_for_reasoning(platform: Platform, key: str) -> None:
    platform.says("aaa")
    message = ask(platform, key, model="r1", tools=None, guided_regex="a+")["choices"][0]["message"]
    assert message["content"] == "aaa" and "reasoning" not in message


def test_a_model_whose_template_shows_one_call_makes_one(platform: Platform, key: str) -> None:
    call = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
    platform.says(f"{call}; {call}")
    message = ask(platform, key, model="llama")["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    twice = message | {
        "tool_calls": [call | {"id": call_id} for call in message["tool_calls"] for call_id in "ab"]
    }
    results = [{"role": "tool", "tool_call_id": call_id, "content": "20"} for call_id in "ab"]
    error = ask(platform, key, model="llama", messages=[*BODY["messages"], twice, *results])["error"]
    assert "a message with 2 tool calls" in error["message"] and "shows at most 1" in error["message"]


def test_a_format_that_the_operator_sets_is_used_where_a_template_shows_none(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    engine = ScriptedEngine([deltas_of(CALL.encode(), FinishReason.STOP)], max_model_len=4096)
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "none"}
    with running_platform(tmp_path_factory.mktemp("set"), engine, **settings) as platform:
        key = platform.key("acme")
        for name in ("odd", "llama", "qwen"):
            platform.upload(key, name, make_members() | {"chat_template.jinja": TEMPLATES[name].encode()})
        assert ask(platform, key, model="odd")["choices"][0]["finish_reason"] == "tool_calls"
        assert ask(platform, key, model="llama")["choices"][0]["message"]["content"] == CALL
        engine.answers = [deltas_of(b"<think>a</think>b", FinishReason.STOP)]
        assert ask(platform, key)["choices"][0]["message"]["content"] == "<think>a</think>b"


class GetWeather(BaseModel):
    """The weather."""

    city: str


def test_the_openai_package_streams_and_parses_calls_over_several_turns(platform: Platform, key: str) -> None:
    client = platform.sdk(key)
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    platform.says(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}")
    with client.chat.completions.stream(model="qwen", messages=messages, tools=tools) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        answer = events.get_final_completion().choices[0]
    assert [event.parsed_arguments for event in done] == [GetWeather(city="Köln")] * 2
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me see."
    assert answer.message.tool_calls is not None
    messages.append(answer.message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
        for call in answer.message.tool_calls
    ]
    platform.says("It is warm.")
    last = client.chat.completions.create(model="qwen", messages=messages, tools=tools).choices[0].message
    assert last.content == "It is warm." and last.tool_calls is None
    said = "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nLet me see." + f"\n{CALL}" * 2 + "<|im_end|>\n"
    assert said + "<|im_start|>tool\n20 degrees<|im_end|>\n" * 2 in platform.last_prompt()


def test_ids_of_other_servers_are_shortened_for_mistrals_templates(platform: Platform, key: str) -> None:
    platform.says('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln"}}]')
    message = ask(platform, key, model="mistral")["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    results = {"role": "tool", "tool_call_id": call_id, "content": "20"}
    ask(platform, key, model="mistral", messages=[*BODY["messages"], message, results])
    calls = platform.last_prompt().partition("[TOOL_CALLS]")[2]
    (made,) = json.loads(calls.partition("<eos>")[0])
    assert len(made["id"]) == 9 and f'"call_id": "{made["id"]}"' in calls
