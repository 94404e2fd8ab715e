"""Finds the end of a JSON value or of a Python literal that arrives in parts. The value is not checked."""

import re
from collections.abc import Generator

from slora_api.chat.text_reader import TextReader, Waiting

JSON_QUOTES = '"'
PYTHON_QUOTES = "\"'"

_SCALAR = re.compile(r"[^\s,{}\[\]()\"'<]*")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in PYTHON_QUOTES}
# Outside of strings, no value contains `<`. So a marker such as `</tool_call>` ends a value even if some brackets of
# the value are not closed.
_OUTSIDE = {quotes: re.compile(rf"[{quotes}{{}}()\[\]<]") for quotes in (JSON_QUOTES, PYTHON_QUOTES)}


def hold_value(reader: TextReader, quotes: str = JSON_QUOTES) -> Waiting[str]:
    """Reads the next value and returns its text, which is incomplete if the answer ends first. quotes: the characters
    that begin a string.
    """
    parts = []
    for part in value_parts(reader, quotes):
        if part is None:
            yield None
        else:
            parts.append(part)
    return "".join(parts)


def value_parts(reader: TextReader, quotes: str = JSON_QUOTES) -> Generator[str | None, None, None]:
    """Yields the parts of the next value as they arrive, and None when more text is needed."""
    first = yield from reader.peek()
    if not first or first not in "{[" + quotes:
        yield (yield from reader.match(_SCALAR))
        return
    scan = _ValueScan(quotes)
    while not scan.is_complete:
        if part := reader.advance(scan.find_end(reader.text, reader.at)):
            yield part
        if not scan.is_complete and not (yield from reader.more()):
            return


class _ValueScan:
    """The state of the search for the end of a value. Any closing bracket closes any opening bracket."""

    def __init__(self, quotes: str) -> None:
        self.is_complete = False
        self._outside = _OUTSIDE[quotes]
        self._depth = 0
        self._quote: str | None = None
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int:
        """Returns the end position of the value; the length of the text if the value continues."""
        at = start
        while at < len(text) and not self.is_complete:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            pattern = self._outside if self._quote is None else _IN_STRING[self._quote]
            found = pattern.search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            match found[0]:
                case "\\":
                    self._is_escaped = True
                case '"' | "'":
                    self._quote = found[0] if self._quote is None else None
                    self.is_complete = self._depth == 0 and self._quote is None
                case "{" | "[" | "(":
                    self._depth += 1
                case "}" | "]" | ")":
                    self._depth -= 1
                    self.is_complete = self._depth == 0
                case _:
                    self.is_complete = True
                    return at - 1
        return at
