"""Computes the answers to a request, and sends them to the client as one JSON body or as server-sent events.

The way back from the engine is a chain of generators: the engine's stream, the answer to one prompt
(`stream_completion`), the request with its admission (`compute_answers`), and the events (`write_events`). The streams
of several prompts are merged. Closing a stream early, or cancelling a task that waits for it, aborts the engine
requests.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any, Self

from slora.client.client import EngineClient
from slora.core.request import TokenDelta
from slora.text.answer import Answer, Completion, CompletionDelta
from slora_api.chat.answer_reader import ReasoningCounter
from slora_api.completions.answer_format import AnswerFormat, AnswerUsage
from slora_api.completions.answer_objects import timing_headers, timing_object
from slora_api.completions.inference_call import InferenceCall
from slora_api.completions.prompt_echo import TOKENS_AT_ONCE, PromptEchoes
from slora_api.completions.prompt_tokenizer import encode_chat, render_chat
from slora_api.completions.schemas import AnswerFields, ConversationFields
from slora_api.core.fair_slots import FairSlots
from slora_api.core.threads import tenant_thread
from slora_api.http.json_slices import PartedResponse, write_json
from slora_api.http.sse import EventStream
from slora_api.usage.usage_recorder import UnrecordedRequest

# Reading the tool calls of this many characters takes at most 3 ms.
_INLINE_CHARS = 1 << 11
# Events are written together once they have this many bytes. The last event may exceed this size.
_EVENT_BYTES = 1 << 16
# The maximum number of lists of deltas per stream that wait for a slow reader. If this many lists wait, no further list
# is taken from the engine.
_QUEUE_LISTS = 16

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

    return await call.answer_with(body, partial(_answer, call, body, prepare))


async def _answer(
    call: InferenceCall, body: AnswerFields, prepare: Callable[[], Coroutine[Any, Any, AnswerFormat]]
) -> AnswerResponse:
    shape = await call.until_gone(prepare())
    is_read = call.syntax is not None and not call.answers[0].request.sampling.use_beam_search
    usage = AnswerUsage(call.num_prompt_tokens, ReasoningCounter.of(call.syntax if is_read else None))
    deltas = compute_answers(call)
    if not body.stream:
        completions = await call.until_gone(_collect(deltas, call.answers, call.echoes, usage))
        writing = write_answer(shape, completions, usage, call.tenant, call.services.cpu_slots)
        parts = await call.until_gone(writing)
        return PartedResponse(parts, call.model.headers | timing_headers(call.answers))
    events = write_events(deltas, shape, usage, call.answers, call.echoes)
    # Not a function in this one, because the two would hold each other, and the request, until a collection.
    again = partial(_answer_again, call, body, prepare)
    return EventStream(events, shape.failure, call.model.headers, shape.keep_alive, again)


async def _answer_again(
    call: InferenceCall,
    body: AnswerFields,
    prepare: Callable[[], Coroutine[Any, Any, AnswerFormat]],
    error: Exception,
) -> EventStream:
    await call.find_model_again(body, error)
    again = await _answer(call, body, prepare)
    assert isinstance(again, EventStream), "the request has not changed"
    return again


async def count_chat_tokens(call: InferenceCall, body: ConversationFields) -> int:
    """Returns how many tokens the prompt of a conversation has. Counts a request without tokens."""
    await call.meter.count_request()
    await call.find_model(body.model)

    async def encode() -> list[int]:
        field = body.messages_field
        text, _ = await render_chat(call, body.chat_messages, body.shown_tools, body, field)
        return await encode_chat(call, text, body, field)

    return len(await call.until_gone(encode()))


async def write_answer(
    shape: AnswerFormat, completions: Sequence[Completion], usage: AnswerUsage, tenant: str, slots: FairSlots
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


async def _collect(
    deltas: _Deltas, answers: Sequence[Answer], echoes: PromptEchoes | None, usage: AnswerUsage
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
    usage: AnswerUsage,
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
        if len(events) >= _EVENT_BYTES:
            await asyncio.sleep(0)


def _make_closing(shape: AnswerFormat, usage: AnswerUsage, answers: Sequence[Answer]) -> Iterator[bytes]:
    usage.timing = timing_object(answers)
    yield from shape.closing(usage)


def _make_events(
    arrived: Sequence[CompletionDelta], shape: AnswerFormat, usage: AnswerUsage, *, opens: bool
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


async def stream_completion(
    client: EngineClient, answer: Answer, on_send: Callable[[Answer], None] = lambda answer: None
) -> AsyncGenerator[list[CompletionDelta], None]:
    """Streams the answers to one prompt in lists of deltas, which are never empty. The last delta of each answer has a
    finish_reason. on_send: called immediately before the request is sent to the engine.

    A delta with log-probabilities has a list of its own, and at most `TOKENS_AT_ONCE` tokens. A beam search returns a
    whole answer in one delta.

    Raises the errors of `EngineClient.generate`.
    """
    on_send(answer)
    is_split = answer.request.sampling.logprobs is not None
    async with aclosing(client.generate(answer.request)) as tokens:
        async for arrived in tokens:
            parts = ([part] for delta in arrived for part in _split(delta)) if is_split else (arrived,)
            for part in parts:
                taken = answer.take_list(part, client.end_choice)
                # Deltas with log-probabilities of the prompt are not passed on, because `answer` has collected them.
                if shown := [delta for delta in taken if not delta.prompt_logprobs]:
                    yield shown
                    if is_split:
                        # Let other tasks run. Otherwise the reader would write all parts without yielding to the event
                        # loop. Before the next list, the engine's stream yields to it.
                        await asyncio.sleep(0)
                if answer.is_over:
                    return


async def compute_answers(call: InferenceCall) -> AsyncGenerator[list[CompletionDelta], None]:
    """Fills the answers of a request and streams the deltas as they arrive, in lists that are never empty. Closing the
    stream early aborts the engine requests of all answers.

    The stream ends when the usage of all engine requests is durable and the answers have their timing.

    Raises the errors of the meter, the engine and the usage journal. After an error, no engine request is
    left running.
    """
    generator, answers = call.services.generator, call.answers
    generator.usage.check()
    started_at = time.perf_counter()
    is_background = call.background_id is not None
    width, width_param = answers[0].request.sampling.width, answers[0].request.sampling.width_param
    answer_tokens = sum(width * (answer.request.sampling.max_tokens or 0) for answer in answers)
    sent: dict[int, UnrecordedRequest] = {}

    def open_usage(answer: Answer) -> None:
        sent[answer.index] = generator.usage.open(answer, spending.open())

    with call.naming_adapters():
        async with call.meter.hold(
            call.num_prompt_tokens, answer_tokens, len(answers), width, width_param
        ) as spending:
            streams = [stream_completion(generator.client, answer, open_usage) for answer in answers]
            seen_first = is_background
            async with aclosing(streams[0] if len(streams) == 1 else MergedStreams(streams)) as deltas:
                async for arrived in deltas:
                    if not seen_first:
                        seen_first = True
                        generator.metrics.observe_first_token(time.perf_counter() - started_at)
                    if not is_background:
                        for delta in arrived:
                            if delta.finish_reason is not None:
                                seconds = time.perf_counter() - started_at
                                generator.metrics.count_finished(delta.finish_reason, seconds)
                    yield arrived
            await generator.usage.wait(list(sent.values()))
    for answer in answers:
        answer.timing = sent[answer.index].timing


def _split(delta: TokenDelta) -> Iterator[TokenDelta]:
    if len(delta.token_ids) <= TOKENS_AT_ONCE:
        yield delta
        return
    for start in range(0, len(delta.token_ids), TOKENS_AT_ONCE):
        end = start + TOKENS_AT_ONCE
        yield TokenDelta(
            delta.token_ids[start:end],
            delta.finish_reason if end >= len(delta.token_ids) else None,
            delta.logprobs[start:end] if delta.logprobs is not None else None,
            delta.index,
            num_cached=0 if start else delta.num_cached,
        )


class MergedStreams:
    """Merges several streams into one, which has the lists in the order in which they arrive. If a stream fails, closes
    the other streams and raises the error. Close it with `aclosing`.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[list[CompletionDelta], None]]) -> None:
        # A stream puts its lists, and at its end None or its error.
        self._queue = asyncio.Queue[list[CompletionDelta] | Exception | None](_QUEUE_LISTS * len(streams))
        self._pumps = [asyncio.create_task(self._pump(stream)) for stream in streams]
        self._num_running = len(streams)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[CompletionDelta]:
        # Let other requests run, because the next lists may already be ready.
        await asyncio.sleep(0)
        while self._num_running:
            found = await self._queue.get()
            if isinstance(found, Exception):
                raise found
            if found is not None:
                return found
            self._num_running -= 1
        raise StopAsyncIteration

    async def aclose(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, stream: AsyncGenerator[list[CompletionDelta], None]) -> None:
        ending: Exception | None = None
        try:
            async with aclosing(stream):
                async for deltas in stream:
                    await self._queue.put(deltas)
        except Exception as error:
            ending = error
        await self._queue.put(ending)
