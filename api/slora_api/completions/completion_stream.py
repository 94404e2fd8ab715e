"""Streams the answers to the prompts of a request as the engine's tokens arrive.

Each prompt has one stream, and the streams of a request are merged into one. Closing a stream early, or cancelling a
task that waits for the stream, aborts the engine request of that stream.

This module does not depend on JSON.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Self

from slora.client.client import EngineClient
from slora.core.request import TokenDelta
from slora.text.answer import Answer, CompletionDelta
from slora_api.completions.inference_call import InferenceCall
from slora_api.completions.prompt_echo import TOKENS_AT_ONCE
from slora_api.usage.usage_recorder import OpenRequest

# The maximum number of lists of deltas per stream that wait for a slow reader. If this many lists wait, no further list
# is taken from the engine.
_QUEUE_LISTS = 16


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
                    if shown[-1].tokens:
                        # Let other tasks run. The next deltas may already be ready, and the reader would write them
                        # without yielding to the event loop.
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
    sent: dict[int, OpenRequest] = {}

    def open_usage(answer: Answer) -> None:
        sent[answer.index] = generator.usage.open(answer, spending.open())

    async with call.meter.hold(
        call.num_prompt_tokens, answer_tokens, len(answers), width, width_param
    ) as spending:
        streams = [stream_completion(generator.client, answer, open_usage) for answer in answers]
        seen_first = is_background
        async with aclosing(streams[0] if len(streams) == 1 else MergedStreams(streams)) as deltas:
            async for arrived in deltas:
                if not seen_first:
                    seen_first = True
                    generator.metrics.first_token(time.perf_counter() - started_at)
                if not is_background:
                    for delta in arrived:
                        if delta.finish_reason is not None:
                            seconds = time.perf_counter() - started_at
                            generator.metrics.finished(delta.finish_reason, seconds)
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
