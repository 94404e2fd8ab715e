"""Reads a text that arrives in parts, for parsers that are written as if the whole text were there.

A parser is a generator. It yields pieces of its result, and None while it waits for more text. A parser waits until it
has enough text to decide, so its pieces do not depend on where the text is divided.
"""

import re
from collections.abc import Generator
from enum import Enum, auto
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


class PieceKind(Enum):
    """The kind of a piece. A CALL begins a tool call, and its text is the tool's name. ARGUMENTS belong to the latest
    call.
    """

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()


class Piece(NamedTuple):
    """One part of an answer. start: for CONTENT, the position of its first character in the answer."""

    kind: PieceKind
    text: str
    start: int = 0


# A part of a parser. It yields None while it waits for text, and returns a value.
Waiting = Generator[None, None, _T]

_SPACE = re.compile(r"\s*")
# Limit on the characters that a parser may read before it decides whether they are a tool call. The limit bounds the
# work on a text with many false beginnings of calls.
MAX_HELD_CHARS = 1 << 14
# Longer than any text that `take` reads.
_MAX_TAKEN_CHARS = 64


class NoMatch(Exception):
    """The text is not what the parser tried to read."""


class TextReader:
    """Reads one text in parts.

    text: the text that is still needed, possibly preceded by text that is no longer needed.
    at: the position of the next character in `text`.
    is_over: whether the text is complete.

    To try to read something, a parser calls `hold`, and then `accept` on success or `rewind` on failure. In between,
    reading more than MAX_HELD_CHARS raises NoMatch.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False
        self._num_dropped = 0
        self._held_from: int | None = None

    @property
    def position(self) -> int:
        """The position of the next character in the whole text."""
        return self._num_dropped + self.at

    def add(self, text: str) -> None:
        self.text += text

    def hold(self) -> None:
        self._held_from = self.at

    def accept(self) -> None:
        self._held_from = None

    def rewind(self) -> None:
        """Returns to the position of `hold`."""
        assert self._held_from is not None
        self.at, self._held_from = self._held_from, None

    def release(self) -> None:
        """Marks the text before the current position as no longer needed. Must not be called between `hold` and
        `accept`.

        The marked text is dropped once it is more than half of `text`, so that dropping costs less than reading.
        """
        assert self._held_from is None
        if 2 * self.at > len(self.text):
            self.text = self.text[self.at :]
            self._num_dropped += self.at
            self.at = 0

    def advance(self, end: int) -> str:
        """Moves to the position `end` and returns the text from the current position up to `end`."""
        read = self.text[self.at : end]
        self.at = end
        if self._held_from is not None and end - self._held_from > MAX_HELD_CHARS:
            raise NoMatch
        return read

    def more(self) -> Waiting[bool]:
        """Waits for more text. Returns False if the text is complete."""
        num_chars = len(self.text)
        held_from = self._held_from
        if held_from is not None and num_chars - held_from > MAX_HELD_CHARS + _MAX_TAKEN_CHARS:
            raise NoMatch
        while len(self.text) == num_chars:
            if self.is_over:
                return False
            yield None
        return True

    def peek(self) -> Waiting[str]:
        """Returns the next character, or an empty string at the end of the text."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip_space(self) -> Waiting[str]:
        """Reads and returns white space, which may be empty."""
        return (yield from self.match(_SPACE))

    def match(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Reads and returns the text that the pattern matches, which may be empty. The pattern must repeat one class of
        characters, such as white space.
        """
        end = self.at
        while True:
            found = pattern.match(self.text, end)
            end = end if found is None else found.end()
            if end < len(self.text) or not (yield from self.more()):
                return self.advance(end)

    def take(self, wanted: str) -> Waiting[bool]:
        """Reads `wanted` if it comes next, and returns True. Otherwise, reads nothing and returns False."""
        while True:
            found = self.text[self.at : self.at + len(wanted)]
            if found == wanted:
                self.advance(self.at + len(wanted))
                return True
            if not wanted.startswith(found) or not (yield from self.more()):
                return False

    def require(self, wanted: str) -> Waiting[None]:
        """Reads `wanted`. Raises NoMatch if it does not come next."""
        if not (yield from self.take(wanted)):
            raise NoMatch

    def read_until(self, mark: str) -> Waiting[str]:
        """Reads the text up to and including the mark, and returns it without the mark. If there is no mark, reads the
        whole text.
        """
        first = self.at
        while (found := self.text.find(mark, first)) < 0:
            first = max(self.at, len(self.text) - len(mark) + 1)
            if not (yield from self.more()):
                return self.advance(len(self.text))
        return self.advance(found + len(mark))[: -len(mark)]
