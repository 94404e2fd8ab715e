"""Divides the text of an answer among its tokens, for log-probabilities that are listed beside the text."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slora.core.request import TokenLogprobs
from slora.text.incremental_decoder import TokenWidths

__all__ = ["AlignedToken", "TokenAligner"]


@dataclass(frozen=True, slots=True)
class AlignedToken:
    """One token and its part of a text.

    logprobs: None for the first token of a prompt.
    width: number of characters of the text that belong to the token.
    is_first: whether no earlier token has a part of the text. Some tokenizers drop a space there.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    width: int
    is_first: bool = False


class TokenAligner:
    """Aligns the tokens of one answer with its text as both arrive.

    A token is held back until the text at its start is certain. So a token that a stop string cuts off is never
    returned.
    """

    def __init__(self, widths: TokenWidths) -> None:
        self._widths = widths
        self._unmeasured: deque[tuple[int, TokenLogprobs]] = deque()
        # Each token with the character position at which it starts in the text.
        self._held: deque[tuple[int, AlignedToken]] = deque()
        self._measured_chars = 0
        self._certain_chars = 0

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str
    ) -> tuple[AlignedToken, ...]:
        """Adds tokens and text. Returns the tokens whose first character is in the text added so far."""
        self._unmeasured.extend(zip(token_ids, logprobs, strict=True))
        self._measure(self._widths.push(token_ids))
        self._certain_chars += len(text)
        certain = []
        while self._held and self._held[0][0] < self._certain_chars:
            certain.append(self._held.popleft()[1])
        return tuple(certain)

    def flush(self) -> tuple[AlignedToken, ...]:
        """Returns the remaining tokens of an answer that did not end at a stop string."""
        self._measure(self._widths.finish())
        return tuple(token for _, token in self._held)

    def cut(self) -> tuple[AlignedToken, ...]:
        """Returns the remaining tokens of an answer that ended at a stop string. They have no part of the text."""
        held = [replace(token, width=0) for _, token in self._held]
        return (*held, *(AlignedToken(*token, 0) for token in self._unmeasured))

    def _measure(self, widths: Sequence[int]) -> None:
        for width in widths:
            token = AlignedToken(*self._unmeasured.popleft(), width, is_first=self._measured_chars == 0)
            self._held.append((self._measured_chars, token))
            self._measured_chars += width
