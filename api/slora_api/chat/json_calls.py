"""Reads tool calls that a model writes as JSON objects, such as `{"name": "f", "arguments": {"x": 1}}`.

The arguments are passed on unchanged while the model writes them. As in OpenAI's API, they may be invalid JSON.
"""

import json
import re
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass

from slora_api.chat.text_reader import NoMatch, Piece, PieceKind, TextReader, Waiting
from slora_api.chat.value_scan import hold_value, value_parts

# A parser yields pieces of the answer, and None when it needs more text.
Steps = Generator[Piece | None, None, None]

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
# OpenAI's rule for names of functions, extended by dots.
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolNames:
    """Decides whether a name is the name of a tool.

    known: the tools of the request.
    only_known: whether a call of another tool is ordinary text. This is true for calls without a marker. With a marker,
        the call is passed on, as in OpenAI's API. The client can then tell the model that the tool does not exist.
    """

    known: frozenset[str]
    only_known: bool

    def check(self, name: object) -> str:
        """Returns the name. Raises NoMatch if it is not the name of a tool."""
        if not isinstance(name, str):
            raise NoMatch
        if name not in self.known and (self.only_known or not _TOOL_NAME.fullmatch(name)):
            raise NoMatch
        return name


def read_json_calls(reader: TextReader, names: ToolNames) -> Steps:
    """Reads a list of calls, or calls that are separated by commas, semicolons or white space.

    Raises NoMatch if there is no call. Does not read the text after the last call.
    """
    yield from reader.skip_space()
    is_list = yield from reader.take("[")
    yield from reader.skip_space()
    yield from _read_call(reader, names)
    while True:
        reader.hold()
        try:
            yield from reader.skip_space()
            if is_list and (yield from reader.take("]")):
                reader.accept()
                return
            if (yield from reader.take(",")) or (yield from reader.take(";")):
                yield from reader.skip_space()
            yield from _read_call(reader, names)
        except NoMatch:
            reader.rewind()
            return


def _read_call(reader: TextReader, names: ToolNames) -> Steps:
    """Reads the object of one call. Arguments that come before the name are held back until the name is read."""
    yield from reader.require("{")
    name: str | None = None
    arguments: str | None = None
    yield from reader.skip_space()
    while not (yield from reader.take("}")):
        key = yield from _read_string(reader)
        yield from reader.skip_space()
        yield from reader.require(":")
        yield from reader.skip_space()
        if key in _ARGUMENT_KEYS and name is not None:
            reader.accept()
            yield Piece(PieceKind.CALL, name)
            yield from read_arguments(reader)
            yield from _end_object(reader)
            return
        if key in _NAME_KEYS:
            name = names.check((yield from _read_string(reader)))
        elif key in _ARGUMENT_KEYS:
            arguments = _as_object((yield from hold_value(reader)))
        elif names.only_known and key not in _OTHER_KEYS:
            raise NoMatch
        else:
            yield from hold_value(reader)
        yield from reader.skip_space()
        if (yield from reader.take(",")):
            yield from reader.skip_space()
    if name is None or (arguments is None and names.only_known):
        raise NoMatch
    reader.accept()
    yield Piece(PieceKind.CALL, name)
    yield Piece(PieceKind.ARGUMENTS, arguments or "{}")


def _end_object(reader: TextReader) -> Waiting[None]:
    """Reads the rest of an object after its arguments. A model may forget the bracket at its end."""
    reader.hold()
    try:
        yield from reader.skip_space()
        while not (yield from reader.take("}")):
            yield from reader.require(",")
            yield from reader.skip_space()
            yield from _read_string(reader)
            yield from reader.skip_space()
            yield from reader.require(":")
            yield from reader.skip_space()
            yield from hold_value(reader)
            yield from reader.skip_space()
        reader.accept()
    except NoMatch:
        reader.rewind()


def read_arguments(reader: TextReader) -> Steps:
    """Passes on the arguments. An object is passed on while it arrives, any other value when it is complete."""
    first = yield from reader.peek()
    if not first:
        return
    if first not in "{[":
        yield Piece(PieceKind.ARGUMENTS, _as_object((yield from hold_value(reader))))
        return
    for part in value_parts(reader):
        if part is None:
            yield None
        else:
            reader.release()
            yield Piece(PieceKind.ARGUMENTS, part)


def _as_object(value: str) -> str:
    """Returns the arguments as the JSON of an object. Some models write a string that contains this JSON, or null if
    there are no arguments.
    """
    if value.startswith('"'):
        with suppress(ValueError):
            value = json.loads(value, strict=False)
    return "{}" if value in ("", "null") else value


def _read_string(reader: TextReader) -> Waiting[str]:
    if (yield from reader.peek()) != '"':
        raise NoMatch
    raw = yield from hold_value(reader)
    try:
        return str(json.loads(raw, strict=False))
    except ValueError:
        raise NoMatch from None
