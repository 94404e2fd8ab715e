"""Finds the tokens of an answer's content, so that their log-probabilities can be listed with the content."""

from collections import deque
from collections.abc import Iterable

from slora.text.answer import AlignedToken


class ContentTokens:
    """Assigns each token of one answer to the first piece of content with which the token overlaps.

    Tokens of reasoning, tool calls and markers are dropped.
    """

    def __init__(self) -> None:
        # Each token with the position of its first character in the answer.
        self._held: deque[tuple[int, AlignedToken]] = deque()
        self._num_chars = 0

    def add(self, tokens: Iterable[AlignedToken]) -> None:
        for token in tokens:
            self._held.append((self._num_chars, token))
            self._num_chars += token.width

    def take(self, start: int, end: int) -> list[AlignedToken]:
        """Returns the tokens of the content from `start` to `end`. Positions must not decrease between calls."""
        taken = []
        while self._held and self._held[0][0] < end:
            first, token = self._held.popleft()
            if first >= start or first + token.width > start:
                taken.append(token)
        return taken
