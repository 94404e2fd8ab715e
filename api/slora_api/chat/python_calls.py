"""Reads tool calls that a model writes as Python: `[f(x=1), g()]`, or lines in a fence of the kind `tool_code`."""

import ast
import json
import re
from itertools import accumulate

from slora_api.chat.json_calls import Steps, ToolNames
from slora_api.chat.text_reader import NoMatch, Piece, PieceKind, TextReader
from slora_api.chat.value_scan import PYTHON_QUOTES, hold_value

# Parsing this many characters blocks the event loop for about 10 ms.
_MAX_SOURCE_CHARS = 4096
# A string in one or three quotes, on one line. Formatted strings are not literals, so only `r` and `u` may precede the
# quotes.
_STRING = "|".join(
    rf"[rRuU]?+(?:{q}{q}{q}(?:[^{q}\\\n]|\\.|{q}(?!{q}{q}))*+{q}{q}{q}|{q}(?!{q}{q})(?:[^{q}\\\n]|\\.)*+{q})"
    for q in "\"'"
)
_STRINGS = re.compile(_STRING)
# Names, numbers, strings and brackets. There are no operators, so only brackets, or chains such as `f()()`, can nest
# expressions.
_SOURCE = re.compile(
    rf"(?:\s++|[A-Za-z_][\w.]{{0,63}}+(?![\"'])|-?\d[\d.]*+(?:[eE][+-]?\d++)?+|{_STRING}|[][(){{}},:=])*+"
)
# This limit is deeper than arguments need, and far below the 200 nested brackets that Python's parser accepts.
_MAX_DEPTH = 32
_FENCE = "```"


def read_call_list(reader: TextReader, names: ToolNames) -> Steps:
    """Reads a list of calls, up to the closing bracket. Raises NoMatch for any other text."""
    yield from _pass_on(reader, (yield from hold_value(reader, PYTHON_QUOTES)), names)


def read_fenced_calls(reader: TextReader, names: ToolNames) -> Steps:
    """Reads calls up to the end of a fence or of the text. Raises NoMatch if the code is not calls only."""
    yield from _pass_on(reader, (yield from reader.read_until(_FENCE)), names)


def _pass_on(reader: TextReader, source: str, names: ToolNames) -> Steps:
    calls = _parse(source, names)
    reader.accept()
    for name, arguments in calls:
        yield Piece(PieceKind.CALL, name)
        yield Piece(PieceKind.ARGUMENTS, arguments)


def _parse(source: str, names: ToolNames) -> list[tuple[str, str]]:
    """Returns the name and the arguments of each call, the arguments as JSON. Raises NoMatch."""
    if len(source) > _MAX_SOURCE_CHARS or not _SOURCE.fullmatch(source) or _depth(source) > _MAX_DEPTH:
        raise NoMatch
    try:
        lines = ast.parse(source.strip()).body
        found = [_read_call(call, names) for line in lines for call in _calls_of(line)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoMatch from None
    if not found:
        raise NoMatch
    return found


def _depth(source: str) -> int:
    """Returns the deepest nesting of brackets. Brackets in strings do not count."""
    steps = (1 if char in "([{" else -1 for char in _STRINGS.sub("", source) if char in "()[]{}")
    return max(accumulate(steps), default=0)


def _calls_of(line: ast.stmt) -> list[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise NoMatch
    value = line.value
    if isinstance(value, ast.List):
        return value.elts
    # Gemma often writes a call as an argument of `print`.
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print":
        return value.args
    return [value]


def _read_call(call: ast.expr, names: ToolNames) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise NoMatch
    arguments = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise NoMatch
        arguments[keyword.arg] = ast.literal_eval(_with_json_names(keyword.value))
    return names.check(ast.unparse(call.func)), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


class _JsonNames(ast.NodeTransformer):
    """Replaces the names `true`, `false` and `null`, which some models write as in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _with_json_names(value: ast.expr) -> ast.expr:
    changed: ast.expr = _JsonNames().visit(value)
    return changed
