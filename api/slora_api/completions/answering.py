"""Sends the answers to a request to the client, either as one JSON body or as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import chain

from fastapi import Request

from slora.text.answer import Answer, Completion, CompletionDelta
from slora_api.completions.answer_format import AnswerFormat, Usage
from slora_api.completions.answer_timing import timing_headers, timing_object
from slora_api.completions.generation import Generator
from slora_api.completions.prompt_echo import PromptEchoes
from slora_api.completions.schemas import AnswerFields
from slora_api.core.fair_slots import FairSlots
from slora_api.core.threads import tenant_thread
from slora_api.http.json_slices import write_json
from slora_api.http.parted_response import PartedResponse
from slora_api.http.sse import EventStream, hold_head, unless_disconnected
from slora_api.quotas.quota_meter import RequestMeter

# Reading the tool calls of this many characters takes at most 3 ms.
_INLINE_CHARS = 1 << 11
# Events are written together once they have this many bytes. The last event may exceed this size.
_EVENT_BYTES = 1 << 16

# An answer as one body, or as a stream of events.
AnswerResponse = PartedResponse | EventStream

_Deltas = AsyncGenerator[list[CompletionDelta], None]
_Events = AsyncGenerator[bytes, None]


async def answer_request(
    request: Request,
    fields: AnswerFields,
    generator: Generator,
    meter: RequestMeter,
    answers: Sequence[Answer],
    usage: Usage,
    shape: AnswerFormat,
    *,
    echoes: Sequence[str] = (),
    headers: dict[str, str],
    writing: FairSlots,
) -> AnswerResponse:
    """Computes `answers`, one for each prompt. Returns the response that sends them to the client.

    usage: grows with the answers.
    echoes: the texts of the prompts, if the answers repeat them.
    writing: slots for writing long answers.

    Raises TenantBusy if too many answers of the tenant wait for a slot. Also raises ClientGone and the errors of
    `Generator.run`.
    """
    deltas = generator.run(answers, meter)
    repeated = PromptEchoes(echoes, answers, generator.tokenizer) if echoes else None
    tenant = answers[0].request.tenant
    if not fields.stream:
        work = _complete(deltas, answers, repeated, usage)
        completions = await unless_disconnected(request.receive, work)
        write = _write_answer(shape, completions, usage, tenant, writing)
        body = await unless_disconnected(request.receive, write)
        return PartedResponse(body, headers | timing_headers(answers))
    events = _events(deltas, shape, usage, answers, repeated)
    first = await unless_disconnected(request.receive, hold_head(events))
    return EventStream(first, events, shape.failure, headers, shape.keep_alive)


async def _write_answer(
    shape: AnswerFormat, completions: Sequence[Completion], usage: Usage, tenant: str, writing: FairSlots
) -> list[bytes]:
    """Returns the body of the answer in parts. A long text is searched for tool calls on a thread, because 530 KB of
    short calls take 0.7 s. The search takes a slot of the tenant.
    """
    num_chars = sum(len(choice.text) for completion in completions for choice in completion.choices)
    if not shape.reads_text or num_chars <= _INLINE_CHARS:
        body = shape.whole(completions, usage)
    else:
        async with writing.hold(tenant):
            body = await tenant_thread(tenant, shape.whole, completions, usage)
    return await write_json(body, tenant, writing)


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


async def _events(
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
