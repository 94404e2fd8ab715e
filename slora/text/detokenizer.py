"""Detokenizes one answer as its tokens arrive, and never returns text that a later token could change.

Text is held back in two cases: the decoder needs more tokens to complete it, or it may be the beginning of a stop
string. The cost of a token depends neither on the length of the answer nor on the length of the stop strings.
"""

import re
from collections.abc import Sequence

from slora.text.incremental_decoder import IncrementalDecoder


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
        self.is_empty = not strings  # Whether there is no string to find.
        self._strings = strings
        self._matched = [0] * len(strings)

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


class Detokenizer:
    """Detokenizes one answer. `stopped` becomes true when a stop string is found; the text ends before it. `stop` is
    this string.

    The joined results of `push` and `flush` equal the text of all tokens, up to the first stop string. They do not
    depend on how many tokens each `push` gets.

    decoder: the result of `Tokenizer.start_decoding`.

    min_tokens: a stop string that ends within the text of the first min_tokens tokens is ordinary text, as in vLLM
    (v1/engine/detokenizer.py). A stop string that begins there and ends later ends the answer.

    includes_stop: whether the text ends with the stop string, instead of before it.

    stop_decoder: like `decoder`, but also decodes `hidden`: special tokens that occur in stop strings and that the text
    leaves out. Stop strings are searched in its text. None if no stop string has such tokens.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: Sequence[StopString] = (),
        min_tokens: int = 0,
        *,
        includes_stop: bool = False,
        stop_decoder: IncrementalDecoder | None = None,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.stopped = False
        self.stop: str | None = None
        # The text of `_decoder` is searched for stop strings. The text of `_visible` is returned.
        self._decoder = decoder if stop_decoder is None else stop_decoder
        self._visible = None if stop_decoder is None else decoder
        # Without hidden tokens, this pattern finds only empty strings.
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))))
        self._includes_stop = includes_stop
        self._stops = StopMatcher(stops)
        self._num_exempt_tokens = min_tokens if stops else 0
        self._exempt_chars = 0  # Number of exempt characters that the decoder has not returned yet.
        self._held = ""  # Decoded text that may be the beginning of a stop string.

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now certain. Returns nothing after a stop string."""
        if self._stops.is_empty:
            return self._decoder.push(token_ids)
        if self._visible is not None and len(token_ids) > 1:
            return "".join(self.push((token_id,)) for token_id in token_ids)
        if self.stopped:
            return ""
        num_exempt = min(self._num_exempt_tokens, len(token_ids))
        sent = ""
        if num_exempt > 0:
            text = self._decoder.push(token_ids[:num_exempt])
            self._num_exempt_tokens -= num_exempt
            self._exempt_chars = len(text)
            sent = self._release_text(text, token_ids[:num_exempt])
            if self._num_exempt_tokens == 0:
                self._exempt_chars = self._decoder.count_complete()
        rest = token_ids[num_exempt:]
        return sent + self._release_text(self._decoder.push(rest), rest)

    def push_until_stop(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Like `push`, but also returns how many tokens were added. Tokens after the token that completes a stop
        string are not added.
        """
        if self._stops.is_empty:  # This is nearly always the case.
            return self._decoder.push(token_ids), len(token_ids)
        if len(token_ids) <= 1:
            return self.push(token_ids), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += self.push((token_id,))
            if self.stopped:
                return text, count
        return text, len(token_ids)

    def flush(self) -> str:
        """Returns the remaining text after the last token, unless a stop string has ended the answer."""
        if self.stopped:
            return ""
        text = self._decoder.finish()
        if self._num_exempt_tokens > 0:
            self._exempt_chars = len(text)
        sent = self._release_text(text, is_last=True)
        return sent if self.stopped else sent + self._held

    def _release_text(self, text: str, token_ids: Sequence[int] = (), *, is_last: bool = False) -> str:
        """Appends decoded text and returns the unsent text that is now certain.

        token_ids: the tokens that were added to `_decoder`. is_last: whether the text is the rest of `_decoder`.
        """
        found = self._stops.search(text, self._exempt_chars)
        self._exempt_chars = max(0, self._exempt_chars - len(text))
        known = self._held + (text if self._visible is None else self._visible.push(token_ids))
        if self._visible is not None and (is_last or found is not None):
            known += self._visible.finish()
        if found is not None:
            self.stopped = True
            end, self.stop = found
            rest = text[end:]
            if self._visible is not None and not is_last:
                rest += self._decoder.finish()
            shown = self._hidden.sub("", self.stop), self._hidden.sub("", rest)
            kept = known[: max(0, len(known) - sum(map(len, shown)))]
            return kept + self.stop if self._includes_stop else kept
        num_certain = max(0, len(known) - self._stops.num_pending)
        self._held = known[num_certain:]
        return known[:num_certain]
