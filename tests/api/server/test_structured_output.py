"""Structured output over HTTP: the openai package against a real server with a tiny random model."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.api.served import Served

HELLO = [{"role": "user", "content": "hello"}]


class Point(BaseModel):
    colour: Literal["red", "blue"]
    visible: bool
    labels: list[Literal["a", "b"]]


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.sdk(server.make_key("structured"))


def test_parse_returns_a_pydantic_model(client: openai.OpenAI) -> None:
    """A random model may go on for long, so it gets several seeds to end an answer."""
    for seed in range(20):
        try:
            answer = client.chat.completions.parse(
                model="base", messages=HELLO, response_format=Point, max_tokens=200, seed=seed
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Point)
        return
    pytest.fail("no answer ended")


def test_a_json_object_is_streamed(client: openai.OpenAI) -> None:
    for seed in range(20):
        stream = client.chat.completions.create(
            model="base",
            messages=HELLO,
            response_format={"type": "json_object"},
            max_tokens=200,
            seed=seed,
            stream=True,
            extra_body={"guided_decoding_backend": None},
        )
        text, reason = "", None
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason
        assert text.startswith("{") and reason in ("stop", "length")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
            return
    pytest.fail("no answer ended")


def test_vllms_fields_reach_the_model(client: openai.OpenAI) -> None:
    for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
        answer = client.completions.create(model="base", prompt="hi", max_tokens=5, n=3, extra_body=extra)
        assert {choice.text for choice in answer.choices} <= {"yes", "no"}
        assert all(choice.finish_reason == "stop" for choice in answer.choices)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"guided_json": {"not": {}}}, "not"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_grammar": "start: start"}, "refers to itself without end"),
        ({"guided_json": {"type": "integer", "multipleOf": 999983}}, "CPU time"),
    ],
    ids=["unsupported", "malformed", "endless", "hostile"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_enforced_is_a_400(
    client: openai.OpenAI, extra: dict[str, object], message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="base", messages=HELLO, stream=stream, extra_body=extra)
    assert refused.value.param == next(iter(extra)) and message in refused.value.message
