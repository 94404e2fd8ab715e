"""Streams the answers to the prompts of a request as the engine's tokens arrive.

Each prompt has one stream, and the streams of a request are merged into one. Closing a stream early, or cancelling a
task that waits for the stream, aborts the engine request of that stream.

This module does not depend on HTTP or JSON.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from slora.client.client import EngineClient
from slora.core.request import TokenDelta
from slora.text.answer import Answer, CompletionDelta, stream_answer

__all__ = ["TOKENS_AT_ONCE", "merge_streams", "stream_completion"]

_T = TypeVar("_T")

# The maximum number of lists of deltas per stream that wait for a slow reader. If this many lists wait, no further list
# is taken from the engine.
_QUEUE_LISTS = 16
# The maximum number of tokens in one delta with log-probabilities. With 20 alternatives for each token, 64 tokens would
# block the event loop for 7 ms: 4 ms for looking up the texts, and 3 ms for writing the JSON.
TOKENS_AT_ONCE = 32


async def stream_completion(
    client: EngineClient, answer: Answer
) -> AsyncGenerator[list[CompletionDelta], None]:
    """Streams the answers to one prompt in lists of deltas, which are never empty. The last delta of each answer has a
    finish_reason. A delta with log-probabilities has a list of its own.

    Raises the errors of `EngineClient.generate`.
    """
    tokens = client.generate(answer.request)
    if answer.request.sampling.logprobs is not None:
        tokens = _split_long(tokens)
    async with aclosing(stream_answer(tokens, answer, client.end_choice)) as deltas:
        async for arrived in deltas:
            # Deltas with log-probabilities of the prompt are not passed on, because `answer` has collected them.
            if shown := [delta for delta in arrived if not delta.prompt_logprobs]:
                yield shown
            if shown and shown[-1].tokens:
                # Let other tasks run. The next deltas may already be ready, and the reader would write them without
                # yielding to the event loop.
                await asyncio.sleep(0)


async def _split_long(
    deltas: AsyncGenerator[list[TokenDelta], None],
) -> AsyncGenerator[list[TokenDelta], None]:
    """Splits deltas of more than `TOKENS_AT_ONCE` tokens and yields each part in a list of its own. A beam search
    returns a whole answer in one delta.
    """
    async with aclosing(deltas):
        async for arrived in deltas:
            for delta in arrived:
                for part in _split(delta):
                    yield [part]


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


@dataclass(frozen=True, slots=True)
class _Ended:
    """Marks the end of a stream. error: the exception that ended it, if it failed."""

    error: Exception | None = None


async def _pump(stream: AsyncGenerator[list[_T], None], queue: asyncio.Queue[list[_T] | _Ended]) -> None:
    try:
        async with aclosing(stream):
            async for some in stream:
                await queue.put(some)
    except Exception as error:  # `merge_streams` raises this error.
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())


async def merge_streams(
    streams: Sequence[AsyncGenerator[list[_T], None]],
) -> AsyncGenerator[list[_T], None]:
    """Merges several streams into one, which yields the lists in the order in which they arrive. If a stream fails,
    closes the other streams and raises the error.
    """
    queue: asyncio.Queue[list[_T] | _Ended] = asyncio.Queue(maxsize=_QUEUE_LISTS * len(streams))
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, list):
                yield item
                # Let other requests run, because the next lists may already be ready.
                await asyncio.sleep(0)
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
