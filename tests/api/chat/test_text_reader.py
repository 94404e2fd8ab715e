"""A text that arrives in parts is read with work in proportion to its length."""

import re
from collections.abc import Generator
from typing import Any

from slora_api.chat.text_reader import TextReader


class CountingPattern:
    """Counts the characters that a pattern is matched against."""

    def __init__(self, pattern: str) -> None:
        self.num_chars = 0
        self._pattern = re.compile(pattern)

    def match(self, text: str, at: int) -> re.Match[str] | None:
        self.num_chars += len(text) - at
        return self._pattern.match(text, at)


def result(steps: Generator[None, None, Any], reader: TextReader, deltas: list[str]) -> Any:
    for delta in deltas:
        next(steps)
        reader.add(delta)
    reader.is_over = True
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value


def test_a_match_continues_where_the_last_delta_ended() -> None:
    reader, pattern = TextReader(), CountingPattern(" *")
    assert result(reader.match(pattern), reader, [" "] * 100) == " " * 100  # type: ignore[arg-type]
    assert pattern.num_chars == 100


def test_text_is_dropped_once_most_of_it_is_read() -> None:
    reader = TextReader()
    reader.add("0123456789")
    reader.advance(5)
    reader.release()
    assert (reader.text, reader.at) == ("0123456789", 5)
    reader.advance(6)
    reader.release()
    assert (reader.text, reader.at) == ("6789", 0)
