"""Sends the answers to a request to the client, either as one JSON body or as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any

from slora.text.answer import Answer, Completion, CompletionDelta
from slora_api.chat.reasoning_counter import ReasoningCounter
from slora_api.completions.answer_format import AnswerFormat, Usage
from slora_api.completions.answer_timing import timing_headers, timing_object
from slora_api.completions.completion_stream import compute_answers
from slora_api.completions.inference_call import InferenceCall
from slora_api.completions.prompt_echo import PromptEchoes
from slora_api.completions.prompt_tokenizer import encode_chat, render_chat
from slora_api.completions.prompts import ConversationRequest
from slora_api.completions.schemas import AnswerFields
from slora_api.core.fair_slots import FairSlots
from slora_api.core.threads import tenant_thread
from slora_api.http.json_slices import write_json
from slora_api.http.parted_response import PartedResponse
from slora_api.http.sse import EventStream, hold_head

# Reading the tool calls of this many characters takes at most 3 ms.
_INLINE_CHARS = 1 << 11
# Events are written together once they have this many bytes. The last event may exceed this size.
_EVENT_BYTES = 1 << 16

# An answer as one body, or as a stream of events.
AnswerResponse = PartedResponse | EventStream

_Deltas = AsyncGenerator[list[CompletionDelta], None]
_Events = AsyncGenerator[bytes, None]


async def answer_call(
    call: InferenceCall, body: AnswerFields, prepare: Callable[[], Coroutine[Any, Any, AnswerFormat]]
) -> AnswerResponse:
    """Finds the model, makes the prompts, and answers them. Returns the response that sends the answers to the client.

    prepare: adds the answers to the call, and returns their format. It may be called twice, see `answer_with`.

    Raises ClientGone and the errors of `compute_answers`.
    """

    async def answer() -> AnswerResponse:
        shape = await call.until_gone(prepare())
        is_read = call.syntax is not None and not call.answers[0].request.sampling.use_beam_search
        usage = Usage(call.num_prompt_tokens, ReasoningCounter.of(call.syntax if is_read else None))
        deltas = compute_answers(call)
        if not body.stream:
            completions = await call.until_gone(_complete(deltas, call.answers, call.echoes, usage))
            writing = write_answer(shape, completions, usage, call.tenant, call.services.cpu_slots)
            parts = await call.until_gone(writing)
            return PartedResponse(parts, call.model.headers | timing_headers(call.answers))
        events = write_events(deltas, shape, usage, call.answers, call.echoes)
        first = await call.until_gone(hold_head(events))
        return EventStream(first, events, shape.failure, call.model.headers, shape.keep_alive)

    return await call.answer_with(body, answer)


async def count_chat_tokens(call: InferenceCall, body: ConversationRequest) -> int:
    """Returns how many tokens the prompt of a conversation has. Counts a request without tokens."""
    await call.meter.count_request()
    await call.find_model(body.model)

    async def encode() -> list[int]:
        field = body.messages_field
        text, _ = await render_chat(call, body.chat_messages, body.shown_tools, body, field)
        return await encode_chat(call, text, body, field)

    return len(await call.until_gone(encode()))


async def write_answer(
    shape: AnswerFormat, completions: Sequence[Completion], usage: Usage, tenant: str, slots: FairSlots
) -> list[bytes]:
    """Returns the body of the answer in parts. A long text is searched for tool calls on a thread, because 530 KB of
    short calls take 0.7 s. The search takes a slot of the tenant.
    """
    num_chars = sum(len(choice.text) for completion in completions for choice in completion.choices)
    if not shape.reads_text or num_chars <= _INLINE_CHARS:
        body = shape.whole(completions, usage)
    else:
        async with slots.hold(tenant, ends_request=True):
            body = await tenant_thread(tenant, shape.whole, completions, usage)
    return await write_json(body, tenant, slots)


async def _complete(
    deltas: _Deltas, answers: Sequence[Answer], echoes: PromptEchoes | None, usage: Usage
) -> list[Completion]:
    """Returns the completions in the order of the prompts. All computed tokens are added to `usage`."""
    async with aclosing(deltas):
        async for arrived in deltas:
            for delta in arrived:
                usage.add(delta)
    completions = [answer.completion() for answer in answers]
    return completions if echoes is None else await echoes.prepend_to(completions)


async def write_events(
    deltas: _Deltas,
    shape: AnswerFormat,
    usage: Usage,
    answers: Sequence[Answer],
    echoes: PromptEchoes | None = None,
) -> _Events:
    """Yields the events of a stream in writes of a bounded size.

    The events of the last deltas are sent together with the end of the stream. By then, the usage is durable and
    `deltas` has released the permits of the request.
    """
    opened, last = False, list[CompletionDelta]()
    num_unfinished = sum(answer.request.sampling.num_choices for answer in answers)
    async with aclosing(deltas):
        async for arrived in deltas:
            if echoes is not None:
                for delta in arrived:
                    for part in await echoes.parts_before(delta):
                        for events in _join(_make_events([part], shape, usage, opens=not opened)):
                            yield events
                        opened = True
                        await asyncio.sleep(0)
            num_unfinished -= sum(delta.finish_reason is not None for delta in arrived)
            if not num_unfinished:
                last += arrived
                continue
            for events in _join(_make_events(arrived, shape, usage, opens=not opened)):
                yield events
                if len(events) >= _EVENT_BYTES:
                    await asyncio.sleep(0)
            opened = True
    ending = _make_events(last, shape, usage, opens=not opened)
    for events in _join(chain(ending, _make_closing(shape, usage, answers))):
        yield events
        await asyncio.sleep(0)


def _make_closing(shape: AnswerFormat, usage: Usage, answers: Sequence[Answer]) -> Iterator[bytes]:
    usage.timing = timing_object(answers)
    yield from shape.closing(usage)


def _make_events(
    arrived: Sequence[CompletionDelta], shape: AnswerFormat, usage: Usage, *, opens: bool
) -> Iterator[bytes]:
    if opens:
        yield from shape.opening(usage)
    for delta in arrived:
        usage.add(delta)
        yield from shape.events(delta, usage)


def _join(parts: Iterable[bytes]) -> Iterator[bytes]:
    joined = b""
    for part in parts:
        joined += part
        if len(joined) >= _EVENT_BYTES:
            yield joined
            joined = b""
    if joined:
        yield joined
