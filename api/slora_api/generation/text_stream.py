"""Converts the engine's token deltas to streams of text, in which each delta of text carries its tokens.

Each prompt has one stream, and the streams of a request are merged into one. Closing a stream early, or cancelling a
task that waits for it, aborts its request in the engine.

This module knows no HTTP and no JSON.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from slora.engine.client import EngineClient
from slora.request import EngineRequest, FinishReason, TokenLogprobs
from slora.text.answer import Answer, CompletionDelta, stream_answer
from slora.text.tokenizer import Tokenizer
from slora_api.generation.prompt_echo import PromptEcho, ScoredToken, TokenText, echo_tokens, score_tokens

__all__ = ["TextDelta", "merge_streams", "stream_text"]

# Deltas per stream that may wait for a slow reader. Beyond this, no further delta is taken from the engine.
_QUEUE_DELTAS = 16
# Most tokens of one delta. Writing a chunk of this many with the 20 most probable tokens of each takes 3 ms.
_TOKENS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The new part of the answer `index`.

    num_tokens: all tokens computed, including those whose text is not shown.
    tokens: the tokens whose text is new; empty unless log-probabilities are needed.
    logprob: the sum of the tokens' log-probabilities; 0 unless they are needed.
    scores: the prompt's log-probabilities, in the first delta of each answer, if they were requested.
    num_cached: tokens of the prompt that were found in the prefix cache, reported once.
    """

    index: int
    text: str
    num_tokens: int
    tokens: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None
    logprob: float = 0.0
    scores: tuple[tuple[ScoredToken, ...] | None, ...] = ()
    num_cached: int = 0


class _HeldTokens:
    """Holds each token back until the text at its start is certain, so a token that a stop string cuts off is never
    shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._widths = tokenizer.start_measuring()
        self._unmeasured: deque[tuple[int, TokenLogprobs]] = deque()
        self._held: deque[tuple[int, TokenText]] = (
            deque()
        )  # each with the character position at which it starts in the text
        self._measured_chars = 0
        self._certain_chars = 0

    def push(self, delta: CompletionDelta, num_shown: int) -> None:
        if delta.logprobs is None:
            return
        shown = delta.token_ids[:num_shown]
        self._unmeasured.extend(zip(shown, delta.logprobs[:num_shown], strict=True))
        self._hold(self._widths.push(shown))

    def release(self, text: str, *, everything: bool) -> tuple[TokenText, ...]:
        self._certain_chars += len(text)
        if everything:
            self._hold(self._widths.finish())
        released = []
        while self._held and (everything or self._held[0][0] < self._certain_chars):
            released.append(self._held.popleft()[1])
        return tuple(released)

    def _hold(self, widths: Sequence[int]) -> None:
        for width in widths:
            token_id, logprobs = self._unmeasured.popleft()
            top = tuple((self._tokenizer.token_text(other), logprob) for other, logprob in logprobs.top)
            token = TokenText(self._tokenizer.token_text(token_id), logprobs.logprob, top, width)
            self._held.append((self._measured_chars, token))
            self._measured_chars += width


async def stream_text(
    client: EngineClient,
    tokenizer: Tokenizer,
    request: EngineRequest,
    index: int = 0,
    echo: PromptEcho | None = None,
) -> AsyncGenerator[TextDelta, None]:
    """Streams the answers to one request. The first answer has the index `index`. The last delta of each has a
    finish_reason.

    Raises what `EngineClient.generate` raises.
    """
    answer = Answer(request, tokenizer, index)
    held_tokens = [_HeldTokens(tokenizer) for _ in range(request.sampling.num_choices)]
    answered = stream_answer(client.generate(answer.request), answer, client.end_choice)
    prompt = _PromptSoFar(tokenizer, request, echo) if echo is not None else None
    async with aclosing(answered) as deltas:
        async for delta in deltas:
            if prompt is not None and delta.prompt_logprobs:
                prompt.scores.extend(delta.prompt_logprobs)
                continue
            if prompt is not None and not prompt.was_told(delta.choice):
                told = await prompt.tell(index, delta.choice)
                if prompt.echo.alone:
                    told = replace(told, num_cached=delta.num_cached_tokens)
                for part in _divide(told):
                    yield part
                    await asyncio.sleep(0)
            if prompt is not None and prompt.echo.alone:
                if prompt.was_told_to_all:
                    return
                continue
            is_cut, held = answer.is_cut(delta.choice), held_tokens[delta.choice]
            # The token that ends an answer is computed and counted, but is not part of the text.
            num_shown = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP and not is_cut)
            if len(delta.token_ids) > _TOKENS_AT_ONCE:  # beam search returns each answer in one piece
                await asyncio.to_thread(held.push, delta, num_shown)
            else:
                held.push(delta, num_shown)
            tokens = held.release(delta.text, everything=delta.finish_reason is not None and not is_cut)
            logprob = sum(entry.logprob for entry in delta.logprobs or ())
            new = TextDelta(
                index + delta.choice, delta.text, len(delta.token_ids), tokens, delta.finish_reason, logprob,
                num_cached=delta.num_cached_tokens,
            )  # fmt: skip
            for part in _divide(new):
                yield part
                if part.tokens:
                    # The next deltas may be ready already, and the reader writes each of them without yielding to the
                    # event loop.
                    await asyncio.sleep(0)


def _divide(delta: TextDelta) -> Iterator[TextDelta]:
    """Splits a delta into parts with a bounded number of tokens, each with its text. Values reported once are in the
    first.
    """
    if len(delta.tokens) <= _TOKENS_AT_ONCE:
        yield delta
        return
    start_char = 0
    for start in range(0, len(delta.tokens), _TOKENS_AT_ONCE):
        tokens = delta.tokens[start : start + _TOKENS_AT_ONCE]
        is_first, is_last = start == 0, start + _TOKENS_AT_ONCE >= len(delta.tokens)
        end_char = len(delta.text) if is_last else start_char + sum(token.width for token in tokens)
        reason = delta.finish_reason if is_last else None
        part = TextDelta(delta.index, delta.text[start_char:end_char], 0, tokens, reason)
        if is_first:
            part = replace(
                part,
                num_tokens=delta.num_tokens,
                logprob=delta.logprob,
                scores=delta.scores,
                num_cached=delta.num_cached,
            )
        yield part
        start_char = end_char


class _PromptSoFar:
    """Collects what the engine reports about the prompt, and puts it before each answer once."""

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest, echo: PromptEcho) -> None:
        self.echo = echo
        self.scores: list[TokenLogprobs | None] = []
        self._tokenizer = tokenizer
        self._request = request
        self._first: TextDelta | None = None
        self._told: set[int] = set()

    def was_told(self, choice: int) -> bool:
        return choice in self._told

    @property
    def was_told_to_all(self) -> bool:
        return len(self._told) == self._request.sampling.num_choices

    async def tell(self, index: int, choice: int) -> TextDelta:
        self._told.add(choice)
        if self._first is None:
            # On a thread, because a long prompt is processed token by token.
            self._first = await asyncio.to_thread(self._read)
        return replace(self._first, index=index + choice)

    def _read(self) -> TextDelta:
        echo, about = self.echo, (self._tokenizer, self._request.prompt_token_ids, self.scores)
        return TextDelta(
            0,
            echo.text or "",
            0,
            echo_tokens(*about, echo.logprobs) if echo.logprobs is not None else (),
            FinishReason.LENGTH if echo.alone else None,
            scores=score_tokens(*about, echo.scores) if echo.scores is not None else (),
        )


@dataclass(frozen=True, slots=True)
class _Ended:
    """Marks the end of a stream. error: the exception that ended it, if it failed."""

    error: Exception | None = None


_Queue = asyncio.Queue[TextDelta | _Ended]


async def _pump(stream: AsyncGenerator[TextDelta, None], queue: _Queue) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put(delta)
    except Exception as error:  # the reader of the queue raises it
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())


async def merge_streams(
    streams: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[TextDelta, None]:
    """Merges several streams in order of arrival. If one stream fails, all end with its error."""
    queue: _Queue = asyncio.Queue(maxsize=_QUEUE_DELTAS * len(streams))
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, TextDelta):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
