"""The tokens of one request become its answer, piece by piece and whole: one collector for `LLM`, `AsyncLLM`, the API.

Stop strings are matched here, outside the engine: whoever feeds an `Answer` ends the engine's request as soon as a
delta has a finish_reason. Knows no engine and no HTTP.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from slora.detokenizer import Detokenizer
from slora.request import EngineRequest, FinishReason, TokenDelta, TokenLogprobs
from slora.tokenizer import Tokenizer

__all__ = ["Answer", "Completion", "CompletionDelta", "stream_answer"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `token_ids` includes the token that stopped it; `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What is new in the answer to prompt `index`; the last one of each answer has a finish_reason.

    text may lag behind token_ids: it is given once no later token can change it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Answer:
    """What one request has produced so far. Without a tokenizer there are tokens but no text.

    cut: a stop string ended the text. Tokens may then have been computed whose text is not shown.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.cut = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason = FinishReason.LENGTH
        self._detokenizer = Detokenizer(tokenizer, request.sampling.stop) if tokenizer is not None else None

    def take(self, delta: TokenDelta) -> CompletionDelta:
        """Takes the next tokens in. With a finish_reason nothing more may come: the engine's request is to be ended."""
        text = self._read(delta)
        reason = FinishReason.STOP if self.cut else delta.finish_reason
        self._text.append(text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs or ())
        self._reason = reason or self._reason
        return CompletionDelta(self.index, text, delta.token_ids, reason, delta.logprobs)

    def completion(self) -> Completion:
        return Completion(
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=self._reason,
            prompt_token_ids=self.request.prompt_token_ids,
            logprobs=self._logprobs if self.request.sampling.logprobs is not None else None,
        )

    def _read(self, delta: TokenDelta) -> str:
        """The text that is now certain."""
        if self._detokenizer is None:
            return ""
        # The token that stopped the answer is computed and counted, but is no part of its text.
        num_shown = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        text = self._detokenizer.push(delta.token_ids[:num_shown])
        if delta.finish_reason is not None:
            text += self._detokenizer.flush()
        self.cut = self._detokenizer.stopped
        return text


async def stream_answer(
    deltas: AsyncGenerator[TokenDelta, None], answer: Answer
) -> AsyncGenerator[CompletionDelta, None]:
    """The answer as the engine's `deltas` come in. They are closed, which aborts the request, at a stop string and
    when this iterator is closed or cancelled.
    """
    async with aclosing(deltas):
        async for delta in deltas:
            new = answer.take(delta)
            yield new
            if new.finish_reason is not None:
                return
