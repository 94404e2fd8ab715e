"""Finds the first of several strings in a text that arrives in pieces, in time linear in the text.

Each string is matched by its own Knuth-Morris-Pratt automaton, whose state is carried from piece to piece. The tables
grow only as far as a text has matched, so a request costs nothing for stop strings that its answers never begin.
"""

from collections.abc import Sequence

__all__ = ["StopMatcher", "StopString"]


class StopString:
    """A string with its table of borders, which all texts that are searched for it share.

    A border of a text is a shorter text that it both begins and ends with. `_borders[n]` is the length of the longest
    border of the first n characters.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]

    def advance(self, matched: int, char: str) -> int:
        """Characters of the string that the text ends with behind `char`, if before it they were `matched`."""
        text = self.text
        while matched and text[matched] != char:
            matched = self.longest_border(matched)
        return matched + (text[matched] == char)

    def longest_border(self, length: int) -> int:
        """Of the first `length` characters, at least one."""
        borders = self._borders
        while len(borders) <= length:
            known = len(borders) - 1
            borders.append(self.advance(borders[known], self.text[known]))
        return borders[length]


class StopMatcher:
    """One text's search. Matches that end within the first `immune` characters of a piece are passed over."""

    def __init__(self, strings: Sequence[StopString]) -> None:
        self._strings = strings
        self._matched = [0] * len(strings)

    @property
    def num_open(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        return max(self._matched, default=0)

    def search(self, piece: str, immune: int = 0) -> tuple[int, int] | None:
        """The next piece of the text; returns where in it the first match ends, and the match's length.

        Of several that end at the same character, the longest counts. After a match the search is over.
        """
        first: tuple[int, int] | None = None
        for index, string in enumerate(self._strings):
            end = self._find(index, string, piece if first is None else piece[: first[0]], immune)
            if end is not None and (first is None or (end, -len(string.text)) < (first[0], -first[1])):
                first = end, len(string.text)
        return first

    def _find(self, index: int, string: StopString, piece: str, immune: int) -> int | None:
        """The end of the first match of this string in the piece; its automaton is then where the piece ends."""
        text, matched, at = string.text, self._matched[index], 0
        while at < len(piece):
            if matched == 0:  # most of a text is passed over at the speed of `str.find`
                at = piece.find(text[0], at)
                if at < 0:
                    break
            matched = string.advance(matched, piece[at])
            at += 1
            if matched == len(text):
                if at > immune:
                    return at
                matched = string.longest_border(matched)
        self._matched[index] = matched
        return None
