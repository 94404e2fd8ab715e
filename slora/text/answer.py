"""The tokens of one request become its answer, piece by piece and whole: one collector for `LLM`, `AsyncLLM`, the API.

Stop strings are matched here, outside the engine: whoever feeds an `Answer` ends the engine's work on a choice as soon
as a delta of it has a finish_reason. Knows no engine and no HTTP.
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
    """One answer to a prompt. `token_ids` includes the token that stopped it; `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt with its answers, as many as SamplingParams.n; with best_of, the likeliest first.

    text, token_ids, finish_reason and logprobs are the first answer's. prompt_logprobs: None unless asked for.
    num_cached_tokens: of the prompt, whose KV was found in the prefix cache. Two completions that say the same are
    equal, whatever was found.
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
    """What is new in answer `choice` to prompt `index`; the last one of each answer has a finish_reason.

    text may lag behind token_ids: it is given once no later token can change it. prompt_logprobs: of the next tokens of
    the prompt, in deltas of their own, before the answer. num_cached_tokens: of the prompt, told once, with the first
    token of answer 0.
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
    """What one request has produced so far. Without a tokenizer there are tokens but no text.

    request: what the engine is to be asked. It may ask for log-probabilities that the caller did not, to tell which
    answers are the best.
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
        """Whether that choice goes on. Tokens that come later were on their way when a stop string ended it."""
        return self._choices[choice].reason is None

    def is_cut(self, choice: int) -> bool:
        """Whether a stop string ended its text. Tokens may then have been computed whose text is not shown."""
        return self._choices[choice].is_cut

    def take(self, delta: TokenDelta) -> CompletionDelta:
        """Takes the next tokens in. With a finish_reason, no more of that choice may come: the engine is to end it."""
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
    """reason: why it is over; None while it goes on."""

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
        """Of all its tokens together."""
        return sum(entry.logprob for entry in self._logprobs)

    def take(self, delta: TokenDelta) -> str:
        """The text that is now certain."""
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
        # The token that stopped the answer is computed and counted, but is no part of its text.
        num_shown = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        text = self._detokenizer.push(delta.token_ids[:num_shown])
        if delta.finish_reason is not None:
            text += self._detokenizer.flush()
        return text


async def stream_answer(
    deltas: AsyncGenerator[TokenDelta, None], answer: Answer, end_choice: Callable[[str, int], None]
) -> AsyncGenerator[CompletionDelta, None]:
    """The answer as the engine's `deltas` come in.

    `end_choice`, the engine's, is called with request id and index when a stop string ends one choice and others go
    on. The deltas are closed, which aborts the request, when nothing more is wanted, and when this iterator is closed
    or cancelled.
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
    """The best are chosen by the log-probabilities of their tokens, wanted or not."""
    wanted = sampling.num_choices > sampling.n and sampling.logprobs is None
    return replace(sampling, logprobs=0) if wanted else sampling
