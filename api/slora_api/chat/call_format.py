"""The formats in which families of models write tool calls, and how a chat template shows its format.

DeepSeek's V3 and R1 write `function<｜tool▁sep｜>name`, and then the arguments in a fence of JSON. V3.1 writes
`name<｜tool▁sep｜>{...}`. Each call stands between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

The newer format of Mistral's tool calls is `name[ARGS]{...}`, with or without `[CALL_ID]id` before `[ARGS]`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slora_api.chat.json_calls import Steps, ToolNames, read_arguments, read_json_calls
from slora_api.chat.python_calls import read_call_list, read_fenced_calls
from slora_api.chat.text_reader import NoMatch, Piece, PieceKind, TextReader, Waiting

CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_WORD = re.compile(r"[a-zA-Z0-9_.-]*")

_FENCE = re.compile(r"`*")


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


@dataclass(frozen=True, slots=True)
class CallBlock:
    """A part of an answer that has tool calls.

    opener: the text that begins the block.
    read: the function that reads the calls after the opener. It raises NoMatch if there are none.
    closer: the text that ends the block; empty if there is none.
    only_known: whether a call of a tool that the request does not have is read as content.
    """

    opener: str
    read: Callable[[TextReader, ToolNames], Steps]
    closer: str = ""
    only_known: bool = False


_OBJECT = (('{"name": "',), ('", "arguments": ',), ("}",))
_OBJECT_OF_PARAMETERS = (('{"name": "',), ('", "parameters": ',), ("}",))


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The form that an answer must have if it must call a tool. The arguments are JSON.

    around: the texts before the first call, between two calls, and after the last.
    within: the texts before the name of a call, between name and arguments, and after the arguments.
    """

    around: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    within: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = _OBJECT


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One format of tool calls.

    blocks: the kinds of blocks. If one opener begins with another, the longer opener comes first.
    bare: the function that reads calls at the beginning of an answer that have no opener; None if every call has an
        opener. Calls without an opener must call one of the request's tools.
    layout: the form of an answer that must call a tool.
    signs: texts that identify the format. The chat template of a model with this format contains at least one of them.
    foreign: texts of an unsupported format that has some of the same `signs`. A template that contains one of these
    texts has no known format.
    inner_marks: texts within a block that may be special tokens.
    has_short_ids: whether the templates accept only call ids of nine letters and digits.
    """

    blocks: tuple[CallBlock, ...]
    layout: CallLayout
    signs: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    bare: Callable[[TextReader, ToolNames], Steps] | None = None
    inner_marks: tuple[str, ...] = ()
    has_short_ids: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """The texts that may be special tokens. The text of an answer shows them, but no other special tokens."""
        texts = {text for block in self.blocks for text in (block.opener, block.closer)}
        return frozenset({*texts, *self.inner_marks}) - {""}


def _read_json_or_python(reader: TextReader, names: ToolNames) -> Steps:
    """Reads JSON objects, or a Python list of calls."""
    yield from reader.skip_space()
    start = reader.at
    is_list = yield from reader.take("[")
    yield from reader.skip_space()
    is_json = (yield from reader.peek()) == "{"
    reader.at = start
    yield from read_call_list(reader, names) if is_list and not is_json else read_json_calls(reader, names)


_MISTRAL_MARKS = ("[ARGS]", "[CALL_ID]")

# The first format that has one of its `signs` in the template is used. Formats with more specific `signs` therefore
# come first.
CALL_FORMATS: Mapping[str, CallFormat] = {
    "mistral_args": CallFormat(
        (CallBlock("[TOOL_CALLS]", read_mistral_calls),),
        CallLayout((("[TOOL_CALLS]",), ("[TOOL_CALLS]",), ()), ((), ("[ARGS]",), ())),
        ("[ARGS]",),
        inner_marks=_MISTRAL_MARKS,
        has_short_ids=True,
    ),
    "mistral": CallFormat(
        (CallBlock("[TOOL_CALLS]", read_mistral_calls),),
        CallLayout((("[TOOL_CALLS]", "["), (", ",), ("]",))),
        ("[TOOL_CALLS]",),
        inner_marks=_MISTRAL_MARKS,
        has_short_ids=True,
    ),
    "deepseek": CallFormat(
        (CallBlock("<｜tool▁calls▁begin｜>", read_deepseek_calls, "<｜tool▁calls▁end｜>"),),
        CallLayout(
            (("<｜tool▁calls▁begin｜>",), ("\n",), ("<｜tool▁calls▁end｜>",)),
            ((CALL_BEGIN, "function", SEPARATOR), ("\n```json\n",), ("\n```", CALL_END)),
        ),
        ("<｜tool▁calls▁begin｜>",),
        inner_marks=(CALL_BEGIN, SEPARATOR, CALL_END),
    ),
    "hermes": CallFormat(
        (CallBlock("<tool_call>", read_json_calls, "</tool_call>"),),
        CallLayout(
            (
                ("<tool_call>", "\n"),
                ("\n", "</tool_call>", "\n", "<tool_call>", "\n"),
                ("\n", "</tool_call>"),
            )
        ),
        ("<tool_call>",),
        ("<function=", "<arg_key>"),
    ),
    "phi4": CallFormat(
        (
            CallBlock("<|tool_call|>", read_json_calls, "<|/tool_call|>"),
            CallBlock("functools", read_json_calls, only_known=True),
        ),
        CallLayout((("<|tool_call|>", "["), (", ",), ("]", "<|/tool_call|>"))),
        ("<|tool|>", "<|tool_call|>", "functools"),
    ),
    "llama3": CallFormat(
        (CallBlock("<|python_tag|>", read_json_calls),),
        CallLayout(((), ("; ",), ()), _OBJECT_OF_PARAMETERS),
        ("<|start_header_id|>", "<|python_tag|>"),
        ("<function=",),
        bare=read_json_calls,
    ),
    "gemma": CallFormat(
        (
            CallBlock("```tool_code", read_fenced_calls, only_known=True),
            CallBlock("```tool_call", read_json_calls, "```", only_known=True),
            CallBlock("```json", read_json_calls, "```", only_known=True),
        ),
        CallLayout(((), ("\n",), ()), _OBJECT_OF_PARAMETERS),
        ("<start_of_turn>", "tool_code"),
        ("<start_function_call>",),
        bare=_read_json_or_python,
    ),
}


def find_call_format(template: str) -> CallFormat | None:
    """Returns the format that a chat template shows to its model; None if it is not known."""
    for known in CALL_FORMATS.values():
        if any(sign in template for sign in known.signs):
            return None if any(sign in template for sign in known.foreign) else known
    return None
