"""Turns a Lark grammar into one regular expression, which can be enforced within the JSON string of a call.

Each name is replaced by its definition, so no definition may refer to itself. The expression matches every text that
the grammar can derive. A lexer that takes the longest terminal refuses some of these texts if the grammar is ambiguous.
Ignored terminals may stand before and after every other terminal.
"""

import json
import re
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from pydantic_core import PydanticCustomError

from slora_adapters.errors import abbreviate
from slora_api.http.field_types import make_refusal, refuse_surrogates

# The model sees the expression in its prompt.
MAX_REGEX_CHARS = 1 << 14
# Groups and definitions within one another. Each takes up to four of the 250 levels that the grammar library accepts.
MAX_DEPTH = 50
_MAX_COUNT = 9999
_IGNORED = "%ignore"

_TOKEN = re.compile(
    r"""(?P<name>_*[A-Za-z]\w*)
    |(?P<mark>[()\[\]:]|->|\.\.|%[a-z]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<or>(?>(?:[ \t]*(?:(?://|\#)[^\n]*)?\r?\n)*)[ \t]*+\|)
    |(?P<line>(?>(?:[ \t]*(?:(?://|\#)[^\n]*)?\r?\n)+)[ \t]*)
    |[ \t]+|(?://|\#)[^\n]*
    |(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    |(?P<repeat>[*+?]|~[ \t]*+\d+(?:[ \t]*+\.\.[ \t]*+\d+)?|\{[ \t]*+[\d,][\d, \t]*\})
    |(?P<number>[+-]?\d+)
    |(?P<other>.)""",
    re.VERBOSE | re.ASCII,
)
_COUNT = re.compile(r"[~{](\d{0,4})(?:(\.\.|,)(\d{0,4}))?\}?")
_REMEDIES = {
    "%declare": "define the terminal by its text",
    "%extend": "write the whole definition",
    "%override": "write the whole definition",
    "%llguidance": "remove it",
    "%json": "write the text as rules",
    "%regex": "write the text as rules",
    "%lark": "write the text as rules",
    "@": "write the text as rules",
    "{": "write a rule for each use of a template",
    "[": "remove the attributes of the rule",
    "<": "write the text of the token as a string",
    "&": "write the terminal as one expression",
    "~": "write the terminal as one expression",
}
# As the grammar library defines them.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"\#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"\-\-[^\n]*",
}
_COMMON |= {f"SIGNED_{name}": f"[+-]?{_COMMON[name]}" for name in ("FLOAT", "NUMBER")}

# The pieces of an expression in the grammar.
_PIECE = re.compile(
    r"""(?P<unicode>\\[dDwW])|\\(?:[pPuUx]\{[^}]{0,64}\}|[^1-9bBAzZGkK<>])
    |(?P<named>\(\?P?<\w+>)|\(\?[imsu]*(?:-[ims]+)?[:)]|\((?!\?)
    |(?P<refused>\\.|[\^$]|(?:[*+?]|\{\d+(?:,\d*)?\})\?|\(\?(?:<?[=!]|P[=>])?)
    |\[\^?\]?|[^\\()\[\]^$*+?{]+|.""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
# In a JSON schema, `\d` and `\w` are ASCII. In a grammar, they are not.
_UNICODE = {r"\d": r"\p{Nd}", r"\D": r"\P{Nd}"}
_UNICODE[r"\w"] = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"
_UNICODE[r"\W"] = _UNICODE[r"\w"].replace("[", "[^")
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_JSON = json.JSONDecoder(strict=False)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)")


def lark_to_regex(definition: str) -> str:
    """Returns the expression. Raises a refusal. Takes time in proportion to the length of the definition."""
    return _Grammar(definition).expand()


class _Name(str):
    """The name of a definition, among the parts of another."""


class _Definition(NamedTuple):
    """parts: text of an expression, and names. depth: number of groups within one another."""

    parts: list[str]
    depth: int


class _Grammar:
    """The definitions of a grammar. Nested groups need no recursion, because a part may begin or end a group."""

    def __init__(self, text: str) -> None:
        self._text = text
        # A further line ends the last definition.
        self._tokens = [token for token in _TOKEN.finditer(text + "\n") if token.lastgroup]
        self._at = 0
        self._definitions: dict[str, _Definition] = {}
        self._uses: dict[str, re.Match[str]] = {}
        self._ignores = _IGNORED in text
        self._read()

    def expand(self) -> str:
        """Returns the expression of the rule `start`. Its characters are counted before it is built."""
        roots = [_IGNORED, "start"] if self._ignores else ["start"]
        names, pending = dict[str, list[str]](), [*roots]
        while pending:
            if (name := pending.pop()) not in names:
                names[name] = [part for part in self._definitions[name].parts if isinstance(part, _Name)]
                pending += names[name]
        try:
            order = [*TopologicalSorter(names).static_order()]
        except CycleError as error:
            cycle = error.args[1][::-1]
            raise self._refusal(
                f"has the rule {abbreviate(cycle[0])}, which refers to itself ({abbreviate(' -> '.join(cycle))}) and "
                "cannot be enforced within a call",
                "repeat with `*`, `+` or `~n..m`, or use the format 'text'",
            ) from None
        sizes, depths, texts = dict[str, int](), dict[str, int](), dict[str, str]()
        for name in order:
            parts, depth = self._definitions[name]
            sizes[name] = sum([sizes[part] if isinstance(part, _Name) else len(part) for part in parts])
            depths[name] = depth + max((depths[part] for part in names[name]), default=0)
            if sizes[name] > MAX_REGEX_CHARS:
                problem = f"has more than {MAX_REGEX_CHARS} characters as an expression at {abbreviate(name)}"
                raise self._refusal(problem, "use long definitions less often")
            if depths[name] > MAX_DEPTH:
                problem = f"has more than {MAX_DEPTH} levels of groups and definitions at {abbreviate(name)}"
                raise self._refusal(problem, "flatten it")
        for name in order:
            parts = self._definitions[name].parts
            texts[name] = "".join([texts[part] if isinstance(part, _Name) else part for part in parts])
        return "".join(texts[name] for name in roots)

    def _read(self) -> None:
        ignored: list[str] = []
        while self._at < len(self._tokens):
            token = self._take()
            if token[0] == "%import":
                self._read_import()
            elif token[0] == _IGNORED:
                ignored += "|", _Name(f"{_IGNORED} {len(ignored)}")
                self._add(ignored[-1], self._read_body(is_rule=False), token)
            elif token.lastgroup != "line":
                self._read_definition(token)
        self._definitions[_IGNORED] = _Definition(["(?:", *ignored[1:], ")*"], 1)
        for name, token in self._uses.items():
            if name not in self._definitions:
                raise self._refusal(f"uses {abbreviate(name)}, which is not defined,", "define it", token)
        if "start" not in self._definitions:
            raise self._refusal("has no rule 'start'", "define it")

    @property
    def _next(self) -> re.Match[str]:
        return self._tokens[self._at]

    def _take(self, *expected: str) -> re.Match[str]:
        """Returns the next token. expected: its possible texts or kinds; without them, any token."""
        token = self._tokens[self._at]
        if expected and token[0] not in expected and token.lastgroup not in expected:
            raise self._unexpected(token)
        self._at += 1
        return token

    def _refusal(self, problem: str, remedy: str, token: re.Match[str] | None = None) -> PydanticCustomError:
        place = "" if token is None else f" in line {self._text.count(chr(10), 0, token.start()) + 1}"
        return make_refusal(
            "the Lark grammar {problem}{place}; {remedy}", problem=problem, place=place, remedy=remedy
        )

    def _unexpected(self, token: re.Match[str]) -> PydanticCustomError:
        shown = abbreviate(token[0])
        if (remedy := _REMEDIES.get(token[0])) is not None:
            return self._refusal(f"has {shown}, which cannot be enforced within a call,", remedy, token)
        return self._refusal(f"has {shown} at the wrong place", "correct its syntax", token)

    def _add(self, name: str, definition: _Definition, token: re.Match[str]) -> None:
        if name in self._definitions:
            raise self._refusal(f"defines {abbreviate(name)} again", "remove one of the definitions", token)
        self._definitions[name] = definition

    def _read_import(self) -> None:
        """Reads `common.A`, `common.A -> B` or `common (A, B)`."""
        if (module := self._take())[0] != "common":
            raise self._refusal(f"imports from {abbreviate(module[0])}", "import from 'common' only", module)
        is_list = self._take(".", "(")[0] == "("
        while True:
            alias = token = self._take("name")
            if not is_list and self._next[0] == "->":
                self._take()
                alias = self._take("name")
            if not alias[0].isupper():
                raise self._refusal(f"imports {abbreviate(alias[0])}", "write terminals in upper case", alias)
            if (text := _COMMON.get(token[0])) is None:
                known = ", ".join(_COMMON)
                raise self._refusal(f"imports {abbreviate(token[0])}", f"'common' has only {known}", token)
            self._add(alias[0], _Definition([text], 2), token)
            if not is_list or self._take(",", ")")[0] == ")":
                break
        self._take("line")

    def _read_definition(self, token: re.Match[str]) -> None:
        while token[0] in ("?", "!"):
            token = self._take()
        name = token[0]
        if token.lastgroup != "name":
            raise self._unexpected(token)
        if not (name.islower() or name.isupper()):
            raise self._refusal(
                f"defines {abbreviate(name)}", "write rules in lower case and terminals in upper case", token
            )
        if self._next[0] == ".":
            self._take()
            self._take("number")
        self._take(":")
        self._add(name, self._read_body(is_rule=name.islower()), token)

    def _read_body(self, *, is_rule: bool) -> _Definition:
        """Reads alternatives up to the end of the line."""
        parts: list[str] = []
        opened, depth, has_choice = list[str](), 1, False
        while (token := self._take()).lastgroup != "line":
            if token.lastgroup == "or":
                parts.append("|")
                has_choice = has_choice or not opened
            elif token[0] == "->":
                self._take("name")
            elif token[0] in ("(", "["):
                parts.append("(?:")
                opened.append(token[0])
                depth = max(depth, len(opened) + 1)
            else:
                if opened and opened[-1] + token[0] in ("()", "[]"):
                    parts.append(")" if opened.pop() == "(" else "|)")
                else:
                    parts += self._read_atom(token, is_rule=is_rule)
                if self._next.lastgroup == "repeat":
                    parts.append(self._read_count(self._take()))
        if opened:
            raise self._refusal(f"has a '{opened[-1]}' that is not closed", "close it", token)
        return _Definition(["(?:", *parts, ")"] if has_choice else parts, depth)

    def _read_atom(self, token: re.Match[str], *, is_rule: bool) -> list[str]:
        """Returns parts that can be repeated, if a repetition follows."""
        kind, text, following = token.lastgroup, token[0], self._next
        is_terminal = kind != "name" or text.isupper()
        if kind == "name":
            part: str = _Name(text)
            self._uses.setdefault(text, token)
            if not is_terminal and not is_rule:
                raise self._refusal(
                    f"uses the rule {abbreviate(text)} in a terminal", "make it a terminal", token
                )
        elif kind == "regex":
            part = self._read_regex(token)
        elif kind == "string" and following[0] == "..":
            self._take()
            part, following = self._read_range(token, self._take("string")), self._next
        elif kind == "string":
            part = _escape(self._read_string(token))
            part = f"(?i:{part})" if text[-1] == "i" else part
        else:
            raise self._unexpected(token)
        parts = [part, _Name(_IGNORED)] if self._ignores and is_rule and is_terminal else [part]
        is_group = len(parts) == 1 and part.startswith(("(", "["))
        return ["(?:", *parts, ")"] if following.lastgroup == "repeat" and not is_group else parts

    def _read_count(self, token: re.Match[str]) -> str:
        """Returns `*`, `+`, `?`, `~n`, `~n..m`, `{n}`, `{n,m}`, `{n,}` or `{,m}` as a repetition of an expression."""
        if len(token[0]) == 1:
            return token[0]
        found = _COUNT.fullmatch(re.sub(r"[ \t]", "", token[0]))
        if found is None or not (found[1] or found[3]) or int(found[1] or 0) > int(found[3] or _MAX_COUNT):
            problem = f"has the repetition {abbreviate(token[0])}"
            raise self._refusal(problem, f"write ~n..m with n <= m <= {_MAX_COUNT}", token)
        return f"{{{found[1] or 0},{found[3]}}}" if found[2] else f"{{{found[1]}}}"

    def _read_string(self, token: re.Match[str]) -> str:
        """Returns the text of a string, which has the escapes of JSON and `\\xHH`."""
        quoted = token[0].removesuffix("i")
        if "\\" not in quoted:
            return quoted[1:-1]
        try:
            text: str = _JSON.decode(_ESCAPE.sub(_to_json, quoted))
        except ValueError:
            problem = f"has the string {abbreviate(token[0])}"
            raise self._refusal(problem, r"use the escapes of JSON and \xHH only", token) from None
        refuse_surrogates(text)
        return text

    def _read_range(self, first: re.Match[str], last: re.Match[str]) -> str:
        low, high = self._read_string(first), self._read_string(last)
        if len(low) != 1 or len(high) != 1 or low > high or first[0][-1] + last[0][-1] != '""':
            problem = f"has the range {abbreviate(f'{first[0]}..{last[0]}')}"
            raise self._refusal(problem, "write the first and the last of some characters", first)
        return f"[{_escape(low)}-{_escape(high)}]"

    def _read_regex(self, token: re.Match[str]) -> str:
        """Returns an expression of the grammar as a group. The grammar library checks the rest of its syntax."""
        body, _, flags = token[0][1:].rpartition("/")
        if not set(flags) <= set("imsu"):
            raise self._refusal(
                f"has an expression with the flags {flags!r}", "use i, m, s and u only", token
            )
        written, num_classes, num_groups = list[str](), 0, 0
        for found in _PIECE.finditer(body):
            kind, piece = found.lastgroup, found[0]
            if kind == "unicode":
                piece = _UNICODE[piece]
            elif num_classes or piece[0] == "[":
                num_classes += (piece[0] == "[") - (piece == "]")
            elif kind == "refused":
                problem = f"has {abbreviate(piece)} in an expression, which cannot be enforced within a call,"
                remedy = "use no anchors, boundaries, lookarounds, references and lazy repetitions"
                raise self._refusal(problem, remedy, token)
            elif piece[0] == "(":
                piece = "(?:" if kind == "named" else piece
                num_groups += piece[-1] != ")"
            elif piece == ")":
                num_groups -= 1
                if num_groups < 0:
                    break
            written.append(piece)
        if num_classes or num_groups:
            problem = f"has brackets that do not match in the expression {abbreviate(token[0])}"
            raise self._refusal(problem, "close each bracket", token)
        return f"(?{''.join(sorted({*flags}))}:{''.join(written)})"


def _to_json(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else rf"\u00{escape[1]}"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)
