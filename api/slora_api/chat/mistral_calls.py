"""Reads the newer format of Mistral's tool calls: `name[ARGS]{...}`, with or without `[CALL_ID]id` before `[ARGS]`."""

import re

from slora_api.chat.json_calls import Steps, ToolNames, read_arguments, read_json_calls
from slora_api.chat.piece import Piece, PieceKind
from slora_api.chat.text_reader import NoMatch, TextReader

_WORD = re.compile(r"[a-zA-Z0-9_.-]*")


def read_mistral_calls(reader: TextReader, names: ToolNames) -> Steps:
    """Reads a list of JSON objects, or one call of the newer format. Raises NoMatch if there is no call."""
    yield from reader.skip_space()
    if (yield from reader.peek()) in ("[", "{"):
        yield from read_json_calls(reader, names)
        return
    name = names.check((yield from reader.match(_WORD)))
    if (yield from reader.take("[CALL_ID]")):
        yield from reader.match(_WORD)
    yield from reader.take("[ARGS]")
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        raise NoMatch
    reader.accept()
    yield Piece(PieceKind.CALL, name)
    yield from read_arguments(reader)
