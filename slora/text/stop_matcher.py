"""Finds the first of several strings in a text that arrives in pieces, in time linear in the text's length.

Each string has its own Knuth-Morris-Pratt automaton, whose state is kept between pieces. Its table grows only as far as
the text has matched, so a stop string that never begins to match costs nothing.
"""

from collections.abc import Sequence

__all__ = ["StopMatcher", "StopString"]


class StopString:
    """A string with its table of borders. All searches for this string share the table.

    A border of a string is a shorter string that is both its prefix and its suffix. `_borders[n]` is the length of the
    longest border of the first n characters.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]

    def advance(self, matched: int, char: str) -> int:
        """Returns how many characters match after `char` is read, if `matched` characters matched before."""
        text = self.text
        while matched and text[matched] != char:
            matched = self.longest_border(matched)
        return matched + (text[matched] == char)

    def longest_border(self, length: int) -> int:
        """Length of the longest border of the first `length` characters. length must be at least one."""
        borders = self._borders
        while len(borders) <= length:
            known = len(borders) - 1
            borders.append(self.advance(borders[known], self.text[known]))
        return borders[length]


class StopMatcher:
    """Searches one text. Matches that end within the first `exempt` characters of a piece are ignored."""

    def __init__(self, strings: Sequence[StopString]) -> None:
        self._strings = strings
        self._matched = [0] * len(strings)

    @property
    def is_empty(self) -> bool:
        """Whether there is no string to find."""
        return not self._strings

    @property
    def num_pending(self) -> int:
        """Number of characters at the end of the text that may be the beginning of a match."""
        return max(self._matched, default=0)

    def search(self, piece: str, exempt: int = 0) -> tuple[int, str] | None:
        """Searches the next piece of the text. Returns (end of the first match in this piece, the string found).

        If several strings end at the same character, the longest one counts. After a match the search is over.
        """
        first: tuple[int, str] | None = None
        for index, string in enumerate(self._strings):
            end = self._find(index, string, piece if first is None else piece[: first[0]], exempt)
            if end is not None and (first is None or (end, -len(string.text)) < (first[0], -len(first[1]))):
                first = end, string.text
        return first

    def _find(self, index: int, string: StopString, piece: str, exempt: int) -> int | None:
        """The end of the first match of this string in the piece, or None.

        Without a match, the automaton's state is saved.
        """
        text, matched, at = string.text, self._matched[index], 0
        while at < len(piece):
            if matched == 0:  # Most of a text is skipped at the speed of `str.find`.
                at = piece.find(text[0], at)
                if at < 0:
                    break
            matched = string.advance(matched, piece[at])
            at += 1
            if matched == len(text):
                if at > exempt:
                    return at
                matched = string.longest_border(matched)
        self._matched[index] = matched
        return None
