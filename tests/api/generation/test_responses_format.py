"""The events of /v1/responses add up to the whole answer, however its text is divided into deltas."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from slora.core.request import FinishReason, TokenLogprobs
from slora.core.sampling_params import SamplingParams
from slora.text.answer import AlignedToken, Choice, Completion, CompletionDelta
from slora_api.chat.answer_reader import AnswerSyntax, ReasoningCounter
from slora_api.chat.call_format import CALL_FORMATS
from slora_api.completions.answer_format import AnswerUsage, LogprobsFormat
from slora_api.http.json_slices import slice_ascii
from slora_api.responses.responses_format import ResponsesFormat
from slora_api.responses.responses_request import ResponsesRequest
from tests.api.scripted_engine import byte_tokenizer

Json = dict[str, Any]
SYNTAX = AnswerSyntax(
    thinks=True, calls=CALL_FORMATS["hermes"], tool_names=frozenset({"f"}), max_calls=2, names_tool=False
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln"}}\n</tool_call>'
LOGPROBS = ["message.output_text.logprobs"]
TOKENIZER = byte_tokenizer()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# Fields that differ between two answers to one request.
OWN = ("id", "call_id", "item_id", "created_at", "completed_at")

TEXTS = {
    "nothing": "",
    "text": ' Hé 😀\u2028"\\\n',
    "reasoning, text and calls": f"<think>\nHm.\n\n</think>\n\nLet me see. \n{CALL}\n{CALL} \nB ",
    "text around a call that is left out": f"A {CALL}{CALL} B {CALL} C",
    "reasoning that is cut off": "<think>Hm.\n",
    "a call that is cut off": f"So: {CALL[:-25]}",
    "no call": "<tool_call>no JSON</tool_call> x",
}


def make_format(syntax: AnswerSyntax | None = SYNTAX, **fields: Any) -> ResponsesFormat:
    body = ResponsesRequest.model_validate({"model": "m", "input": "hi", "stream": True, **fields})
    logprobs = LogprobsFormat(TOKENIZER, body.num_top_logprobs)
    return ResponsesFormat("m", body, SamplingParams(), logprobs, syntax)


def tokens_of(text: str) -> tuple[AlignedToken, ...]:
    """One token for each character, whose id is the character's place."""
    return tuple(AlignedToken(at % 256, TokenLogprobs(-float(at), ()), 1) for at in range(len(text)))


def read_events(events: Iterable[bytes]) -> list[Json]:
    found = []
    for event in b"".join(events).decode("ascii").removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(
    shape: ResponsesFormat, text: str, cuts: Sequence[int], reason: FinishReason, *, with_tokens: bool
) -> list[Json]:
    usage = AnswerUsage(3, ReasoningCounter(SYNTAX))
    tokens = tokens_of(text) if with_tokens else ()
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    parts = [*shape.opening(usage)]
    for start, end in pairwise(places):
        is_last = end == len(text) and start == places[-2]
        delta = CompletionDelta(
            0, text[start:end], (7,), reason if is_last else None, tokens=tokens[start:end]
        )
        usage.add(delta)
        parts += shape.events(delta, usage)
        if is_last:
            break
    return read_events([*parts, *shape.closing(usage)])


def whole(shape: ResponsesFormat, text: str, reason: FinishReason, *, with_tokens: bool) -> Json:
    choice = Choice(text, [7], reason, None, tokens_of(text) if with_tokens else ())
    body: Json = json.loads(b"".join(slice_ascii(shape.whole([Completion([1], (choice,))], AnswerUsage(3)))))
    return body


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name not in OWN}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def joined(events: Sequence[Json], index: int, kind: str) -> str:
    return "".join(
        event["delta"] for event in events if event["type"] == kind and event["output_index"] == index
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("has_syntax", [True, False])
@pytest.mark.parametrize("reason", FinishReason)
def test_a_stream_of_characters_adds_up_to_the_whole_answer(
    text: str, has_syntax: bool, reason: FinishReason
) -> None:
    check_sum(text, range(len(text)), reason, has_syntax=has_syntax, with_tokens=True)


@given(
    st.sampled_from([*TEXTS.values()]),
    st.lists(st.integers(0, 200)),
    st.sampled_from(FinishReason),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_answer_however_it_is_divided(
    text: str, cuts: list[int], reason: FinishReason, with_tokens: bool
) -> None:
    check_sum(text, cuts, reason, has_syntax=True, with_tokens=with_tokens)


def check_sum(
    text: str, cuts: Sequence[int], reason: FinishReason, *, has_syntax: bool, with_tokens: bool
) -> None:
    syntax = SYNTAX if has_syntax else None
    include = LOGPROBS if with_tokens else None
    events = stream(make_format(syntax, include=include), text, cuts, reason, with_tokens=with_tokens)
    expected = whole(make_format(syntax, include=include), text, reason, with_tokens=with_tokens)
    Response.model_validate(expected)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ended = events[-1]["response"]
    assert events[-1]["type"] == f"response.{expected['status']}"
    assert without_ids(ended | {"usage": None}) == without_ids(expected | {"usage": None})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ended["output"]
    for index, item in enumerate(done):
        of_item = [event for event in events if event.get("output_index") == index]
        assert {event["item_id"] for event in of_item if "item_id" in event} == {item["id"]}
        kinds = [event["type"] for event in of_item]
        assert kinds[0] == "response.output_item.added" and kinds[-1] == "response.output_item.done"
        if item["type"] == "function_call":
            assert joined(events, index, "response.function_call_arguments.delta") == item["arguments"]
            assert of_item[-2]["arguments"] == item["arguments"]
            continue
        assert kinds[1] == "response.content_part.added" and kinds[-2] == "response.content_part.done"
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        (part,) = item["content"]
        assert joined(events, index, f"response.{kind}.delta") == part["text"] == of_item[-3]["text"]
        assert of_item[-2]["part"] == part
        if kind == "output_text":
            listed = [
                one for event in of_item if event["type"].endswith("text.delta") for one in event["logprobs"]
            ]
            assert listed == part["logprobs"] == of_item[-3]["logprobs"]
            # One token for each character: those of the content, and no others.
            places = [round(-one["logprob"]) for one in listed]
            assert "".join(text[place] for place in places) == (part["text"] if with_tokens else "")


@pytest.mark.parametrize(
    "text", ["<think>Hm.", "<think>\nHm.</think>\n\nHi", " <think></think>", "<think>a</thi</think>"]
)
def test_the_tokens_of_reasoning_are_counted_up_to_its_end(text: str) -> None:
    counter = ReasoningCounter(SYNTAX)
    counted = sum(
        counter.add(0, 1, character, is_last=at == len(text) - 1) for at, character in enumerate(text)
    )
    end = text.find("</think>")
    assert counted == (len(text) if end < 0 else end + len("</think>"))


def test_each_choice_has_its_own_reasoning() -> None:
    counter = ReasoningCounter(SYNTAX)
    counted = [0, 0]
    for at, character in enumerate("<think>a</think>b"):
        counted[0] += counter.add(0, 1, character, is_last=at == 16)
        counted[1] += counter.add(1, 1, "x", is_last=at == 16)
    assert counted == [16, 0]


def test_the_events_that_repeat_a_long_text_are_made_in_short_parts() -> None:
    """Other requests are served between the parts."""
    instructions = "é" * 100_000
    shape = make_format(instructions=instructions, include=LOGPROBS)
    usage = AnswerUsage(3)
    opening = [*shape.opening(usage)]
    assert max(map(len, opening)) < 1 << 18
    text = "ö" * 64
    for _ in range(100):
        delta = CompletionDelta(0, text, (7,), tokens=tokens_of(text))
        assert sum(map(len, shape.events(delta, usage))) < 1 << 16
    last = [*shape.events(CompletionDelta(0, "", (7,), FinishReason.STOP), usage), *shape.closing(usage)]
    assert max(map(len, last)) < 1 << 18 and sum(map(len, last)) > 1 << 19
    ended = read_events(last)[-1]["response"]
    assert (
        ended["instructions"] == instructions and len(ended["output"][0]["content"][0]["logprobs"]) == 6_400
    )
