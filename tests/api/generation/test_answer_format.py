"""The events of a stream, whose constant parts are encoded only once."""

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slora.core.request import FinishReason
from slora.text.answer import CompletionDelta
from slora_api.completions.answer_format import AnswerUsage, ChatFormat, CompletionFormat, LogprobsFormat
from slora_api.completions.schemas import ChatRequest, CompletionRequest, GenerationFields
from tests.api.scripted_engine import byte_tokenizer

LOGPROBS = LogprobsFormat(byte_tokenizer())
USAGE = AnswerUsage(prompt_tokens=2, completion_tokens=1, cached_tokens=1)
PROMPT = [1, 2]

# All characters but lone surrogates: quotes, backslashes, control characters and line separators included.
texts = st.text() | st.text('"\\/\n\r\x00\x1f\x7f\x85\u2028\u2029{}[],:')
reasons = st.sampled_from([None, *FinishReason])
options = st.fixed_dictionaries(
    {},
    optional={
        "return_token_ids": st.booleans(),
        "service_tier": st.just("auto"),
        "stream_options": st.fixed_dictionaries(
            {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
        ),
    },
)


def read_events(events: Iterable[bytes]) -> list[Any]:
    """Divides the events as a client does that ends a line at every line separator of Unicode."""
    lines = b"".join(events).decode().splitlines()
    assert set(lines[1::2]) <= {""} and len(lines) % 2 == 0
    return [json.loads(line.removeprefix("data: ")) for line in lines[::2]]


def expected_chunk(fields: GenerationFields, seen: Any, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The chunk as a whole. `seen` gives its id and time."""
    chunk = {"object": kind, "model": fields.model, "choices": [choice]}
    chunk |= {"id": seen["id"], "created": seen["created"]}
    if fields.service_tier is not None:
        chunk["service_tier"] = "default"
    if fields.include_usage:
        chunk["usage"] = USAGE.to_json() if fields.continuous_usage else None
    return chunk


@given(texts, texts, reasons, options)
def test_the_event_of_a_completion_is_its_chunk_as_json(
    model: str, text: str, reason: FinishReason | None, sent: dict[str, Any]
) -> None:
    fields = CompletionRequest.model_validate({"model": model, "prompt": "a", "stream": True, **sent})
    shape = CompletionFormat(model, fields, LOGPROBS, [PROMPT])
    (seen,) = read_events(shape.events(CompletionDelta(0, text, (7,), reason), USAGE) or [b"data: {}\n\n"])
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    if fields.return_token_ids:
        choice |= {"token_ids": [7], "prompt_token_ids": PROMPT}
    is_shown = text or reason is not None or fields.return_token_ids
    assert seen == (expected_chunk(fields, seen, "text_completion", choice) if is_shown else {})


@given(texts, texts, options)
def test_the_events_of_a_chat_are_its_chunks_as_json(model: str, text: str, sent: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}]
    fields = ChatRequest.model_validate({"model": model, "messages": messages, "stream": True, **sent})
    shape = ChatFormat(model, fields, LOGPROBS, PROMPT)
    delta = CompletionDelta(0, text, (7,), FinishReason.STOP)
    first, *middle, last = read_events([*shape.opening(USAGE), *shape.events(delta, USAGE)])

    def expected(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return expected_chunk(fields, last, "chat.completion.chunk", choice)

    opening = expected({"role": "assistant", "content": ""})
    ids = {"token_ids": [7]} if fields.return_token_ids else {}
    assert first == opening | ({"prompt_token_ids": PROMPT} if ids else {})
    assert middle == ([expected({"content": text}, **ids)] if text or ids else [])
    assert last == expected({}, "stop")
