"""Repeats prompts before their answers, for the field `echo`.

This module does not depend on HTTP or JSON.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slora.text.answer import AlignedToken, Answer, Completion, CompletionDelta
from slora.text.tokenizer import Tokenizer
from slora_api.core.threads import tenant_thread

# The maximum number of tokens in one delta with log-probabilities. With 20 alternatives for each token, 64 tokens would
# block the event loop for 7 ms: 4 ms for looking up the texts, and 3 ms for writing the JSON.
TOKENS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The text of one prompt. tokens: its tokens, if log-probabilities are listed."""

    text: str
    tokens: tuple[AlignedToken, ...] = ()

    @staticmethod
    async def read(text: str, answer: Answer, tokenizer: Tokenizer) -> "PromptEcho":
        """Returns the echo of the prompt `text`. answer: the answer to the prompt. If log-probabilities were requested,
        the answer must already have the log-probabilities of the prompt.
        """
        if not answer.lists_logprobs:
            return PromptEcho(text)
        # Run on a thread, because a long prompt is processed token by token.
        return PromptEcho(text, await tenant_thread(answer.request.tenant, _align_prompt, answer, tokenizer))

    def prepend_to(self, completion: Completion) -> Completion:
        choices = [
            replace(choice, text=self.text + choice.text, tokens=self.tokens + choice.tokens)
            for choice in completion.choices
        ]
        return replace(completion, choices=tuple(choices))

    def divide(self, index: int) -> Iterator[CompletionDelta]:
        """Yields the echo in deltas of a bounded number of tokens, each with its text."""
        start_char = 0
        for start in range(0, max(1, len(self.tokens)), TOKENS_AT_ONCE):
            tokens = self.tokens[start : start + TOKENS_AT_ONCE]
            is_last = start + TOKENS_AT_ONCE >= len(self.tokens)
            end_char = len(self.text) if is_last else start_char + sum(token.width for token in tokens)
            yield CompletionDelta(index, self.text[start_char:end_char], (), tokens=tokens)
            start_char = end_char


class PromptEchoes:
    """Repeats the prompts of a request before its answers. `texts` and `answers` have one entry for each prompt."""

    def __init__(self, texts: Sequence[str], answers: Sequence[Answer], tokenizer: Tokenizer) -> None:
        self._texts = texts
        self._answers = answers
        self._tokenizer = tokenizer
        self._echoes: dict[int, PromptEcho] = {}
        # Prompt and choice of each answer that has its echo.
        self._echoed: set[tuple[int, int]] = set()

    async def parts_before(self, delta: CompletionDelta) -> Iterator[CompletionDelta]:
        """Returns the parts of the echo that precede the delta; none unless it is the first one of its choice."""
        if (delta.index, delta.choice) in self._echoed:
            return iter(())
        self._echoed.add((delta.index, delta.choice))
        echo = await self._read(delta.index)
        return (replace(part, choice=delta.choice) for part in echo.divide(delta.index))

    async def prepend_to(self, completions: Sequence[Completion]) -> list[Completion]:
        return [(await self._read(index)).prepend_to(one) for index, one in enumerate(completions)]

    async def _read(self, index: int) -> PromptEcho:
        echo = self._echoes.get(index)
        if echo is None:
            echo = self._echoes[index] = await PromptEcho.read(
                self._texts[index], self._answers[index], self._tokenizer
            )
        return echo


def _align_prompt(answer: Answer, tokenizer: Tokenizer) -> tuple[AlignedToken, ...]:
    token_ids = answer.request.prompt_token_ids
    aligned = zip(token_ids, answer.prompt_logprobs, tokenizer.measure(token_ids), strict=True)
    return tuple(AlignedToken(*each) for each in aligned)
