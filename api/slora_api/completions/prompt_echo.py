"""Repeats prompts before their answers, for the field `echo`.

This module does not depend on HTTP or JSON.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from slora.text.answer import AlignedToken, Answer, Completion, CompletionDelta
from slora.text.tokenizer import Tokenizer
from slora_api.completions.completion_stream import TOKENS_AT_ONCE
from slora_api.core.threads import tenant_thread

__all__ = ["PromptEcho", "stream_with_echoes"]


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The text of one prompt. tokens: its tokens, if log-probabilities are listed."""

    text: str
    tokens: tuple[AlignedToken, ...] = ()

    @staticmethod
    async def read(tenant: str, text: str, answer: Answer, tokenizer: Tokenizer) -> "PromptEcho":
        """Returns the echo of the prompt `text`. answer: the answer to the prompt. If log-probabilities were requested,
        the answer must already have the log-probabilities of the prompt.
        """
        if not answer.lists_logprobs:
            return PromptEcho(text)
        # Run on a thread, because a long prompt is processed token by token.
        return PromptEcho(text, await tenant_thread(tenant, _align_prompt, answer, tokenizer))

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


async def stream_with_echoes(
    tenant: str,
    deltas: AsyncGenerator[list[CompletionDelta], None],
    texts: Sequence[str],
    answers: Sequence[Answer],
    tokenizer: Tokenizer,
) -> AsyncGenerator[list[CompletionDelta], None]:
    """Streams the deltas, and puts the text of the prompt before the text of each choice. `texts` and `answers` have
    one entry for each prompt.
    """
    echoes: dict[int, PromptEcho] = {}
    echoed: set[tuple[int, int]] = set()
    async with aclosing(deltas):
        async for arrived in deltas:
            for delta in arrived:
                index, choice = delta.index, delta.choice
                if (index, choice) not in echoed:
                    echoed.add((index, choice))
                    if index not in echoes:
                        echoes[index] = await PromptEcho.read(tenant, texts[index], answers[index], tokenizer)
                    for part in echoes[index].divide(index):
                        yield [replace(part, choice=choice)]
                        await asyncio.sleep(0)
            yield arrived


def _align_prompt(answer: Answer, tokenizer: Tokenizer) -> tuple[AlignedToken, ...]:
    token_ids = answer.request.prompt_token_ids
    aligned = zip(token_ids, answer.prompt_logprobs, tokenizer.measure(token_ids), strict=True)
    return tuple(AlignedToken(*each) for each in aligned)
