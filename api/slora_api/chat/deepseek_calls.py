"""Reads the tool calls of DeepSeek's models.

V3 and R1 write `function<｜tool▁sep｜>name`, and then the arguments in a fence of JSON. V3.1 writes
`name<｜tool▁sep｜>{...}`. Each call stands between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.
"""

import re

from slora_api.chat.json_calls import Steps, ToolNames, read_arguments
from slora_api.chat.piece import Piece, PieceKind
from slora_api.chat.text_reader import NoMatch, TextReader, Waiting

CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_WORD = re.compile(r"[a-zA-Z0-9_.-]*")
_FENCE = re.compile(r"`*")


def read_deepseek_calls(reader: TextReader, names: ToolNames) -> Steps:
    """Reads one call or several. Raises NoMatch if there is none."""
    yield from _read_call(reader, names)
    while True:
        reader.hold()
        try:
            yield from _read_call(reader, names)
        except NoMatch:
            reader.rewind()
            return


def _read_call(reader: TextReader, names: ToolNames) -> Steps:
    yield from reader.skip_space()
    yield from reader.require(CALL_BEGIN)
    name = yield from reader.match(_WORD)
    yield from reader.require(SEPARATOR)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":  # The word read above is the type, and the name follows it.
        name = yield from reader.match(_WORD)
        yield from reader.skip_space()
        yield from reader.match(_FENCE)
        yield from reader.take("json")
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            raise NoMatch
    name = names.check(name)
    reader.accept()
    yield Piece(PieceKind.CALL, name)
    yield from read_arguments(reader)
    yield from _end_call(reader)


def _end_call(reader: TextReader) -> Waiting[None]:
    """Reads the end of a call after its arguments. A model may forget parts of the end."""
    reader.hold()
    yield from reader.skip_space()
    yield from reader.match(_FENCE)
    yield from reader.skip_space()
    yield from reader.take(CALL_END)
    reader.accept()
