"""Collects the tokens of one request into its answer. `LLM`, `AsyncLLM` and the API use the same collector.

Stop strings are matched here, outside the engine. When a delta of a choice has a finish_reason, the caller must end
that choice in the engine. This module uses neither the engine nor HTTP.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from slora.request import EngineRequest, FinishReason, TokenDelta, TokenLogprobs
from slora.sampling_params import SamplingParams
from slora.text.detokenizer import Detokenizer
from slora.text.stop_matcher import StopString
from slora.text.tokenizer import Tokenizer

__all__ = ["Answer", "Choice", "Completion", "CompletionDelta", "stream_answer"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. `token_ids` includes the stop token; `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt with its `n` answers. With best_of, they are sorted by log-probability, the most probable one first.

    text, token_ids, finish_reason, logprobs: those of the first answer.
    prompt_logprobs: None unless requested.
    num_cached_tokens: number of prompt tokens whose KV was found in the prefix cache. It is ignored when two
    completions are compared.
    """

    prompt_token_ids: list[int]
    choices: tuple[Choice, ...]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = field(default=0, compare=False)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The new part of answer `choice` to prompt `index`. The last delta of each answer has a finish_reason.

    text: text that no later token can change; it may lag behind token_ids.
    prompt_logprobs: of the next prompt tokens. They come in deltas of their own, before the answer.
    num_cached_tokens: number of cached prompt tokens, sent once, with the first token of answer 0.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0


class Answer:
    """The state of one request's answer. Without a tokenizer it has tokens but no text.

    request: the request to send to the engine. It may ask for logprobs that the caller did not request, which best_of
    needs to rank the answers.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None, index: int = 0) -> None:
        self.index = index
        self._sampling = request.sampling
        self.request = replace(request, sampling=_with_logprobs(request.sampling))
        sampling = request.sampling
        self._scores: list[TokenLogprobs | None] = []
        self._num_cached = 0
        stops = [StopString(text) for text in sampling.stop]
        self._choices = [
            _ChoiceSoFar(
                Detokenizer(tokenizer, stops, sampling.min_tokens) if tokenizer is not None else None
            )
            for _ in range(sampling.num_choices)
        ]

    @property
    def is_over(self) -> bool:
        return all(choice.reason is not None for choice in self._choices)

    def wants(self, choice: int) -> bool:
        """Whether the choice is unfinished. Tokens may still arrive after a stop string has ended it."""
        return self._choices[choice].reason is None

    def is_cut(self, choice: int) -> bool:
        """Whether a stop string ended the text. The text of later tokens is not shown."""
        return self._choices[choice].is_cut

    def take(self, delta: TokenDelta) -> CompletionDelta:
        """Adds the next tokens. If the result has a finish_reason, the caller must end this choice in the engine."""
        choice = self._choices[delta.index]
        text = choice.take(delta)
        self._scores.extend(delta.prompt_logprobs)
        self._num_cached += delta.num_cached
        return CompletionDelta(
            self.index,
            text,
            delta.token_ids,
            choice.reason,
            delta.logprobs,
            delta.index,
            delta.prompt_logprobs,
            delta.num_cached,
        )

    def completion(self) -> Completion:
        kept = self._choices
        if len(kept) > self._sampling.n:
            kept = sorted(kept, key=lambda choice: choice.logprob, reverse=True)[: self._sampling.n]
        with_logprobs = self._sampling.logprobs is not None
        choices = tuple(choice.finished(with_logprobs=with_logprobs) for choice in kept)
        scores = self._scores if self._sampling.prompt_logprobs is not None else None
        return Completion(self.request.prompt_token_ids, choices, scores, self._num_cached)


class _ChoiceSoFar:
    """The state of one choice. reason: why the choice ended; None while it is unfinished."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.reason: FinishReason | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._detokenizer = detokenizer

    @property
    def is_cut(self) -> bool:
        return self._detokenizer is not None and self._detokenizer.stopped

    @property
    def logprob(self) -> float:
        """The sum over all tokens."""
        return sum(entry.logprob for entry in self._logprobs)

    def take(self, delta: TokenDelta) -> str:
        """Adds a delta and returns the text that no later token can change."""
        assert self.reason is None, "a choice that is over spoke again"
        text = self._read(delta)
        self.reason = FinishReason.STOP if self.is_cut else delta.finish_reason
        self._text.append(text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs or ())
        return text

    def finished(self, *, with_logprobs: bool) -> Choice:
        assert self.reason is not None, "a choice that goes on has no final answer yet"
        logprobs = self._logprobs if with_logprobs else None
        return Choice("".join(self._text), self._token_ids, self.reason, logprobs)

    def _read(self, delta: TokenDelta) -> str:
        if self._detokenizer is None:
            return ""
        # The stop token is computed and counted, but it is not part of the text.
        num_shown = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        text = self._detokenizer.push(delta.token_ids[:num_shown])
        if delta.finish_reason is not None:
            text += self._detokenizer.flush()
        return text


async def stream_answer(
    deltas: AsyncGenerator[TokenDelta, None], answer: Answer, end_choice: Callable[[str, int], None]
) -> AsyncGenerator[CompletionDelta, None]:
    """Yields the answer as the engine's `deltas` arrive.

    end_choice: called with request id and choice index when a stop string ends one choice while others continue.

    When the answer is complete, or when this iterator is closed or cancelled, the deltas are closed. That aborts the
    request.
    """
    async with aclosing(deltas):
        async for delta in deltas:
            new = answer.take(delta)
            if new.finish_reason is not None and delta.finish_reason is None and not answer.is_over:
                end_choice(answer.request.request_id, delta.index)
            yield new
            if answer.is_over:
                return


def _with_logprobs(sampling: SamplingParams) -> SamplingParams:
    """Requests logprobs if best_of needs them to rank the answers."""
    wanted = sampling.num_choices > sampling.n and sampling.logprobs is None
    return replace(sampling, logprobs=0) if wanted else sampling
