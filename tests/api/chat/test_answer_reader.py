"""Answers of each family are divided into reasoning, content and tool calls, however their text is cut into deltas."""

import json
import re
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slora_api.chat.answer_reader import AnswerReader, AnswerSyntax
from slora_api.chat.call_format import CALL_FORMATS
from slora_api.chat.text_reader import MAX_HELD_CHARS, Piece, PieceKind, TextReader

TOOLS = frozenset({"f", "get_weather"})
# Reasoning, content, and the name and arguments of each call.
Parts = tuple[str, str, list[tuple[str, str]]]


def syntax(family: str, **fields: object) -> AnswerSyntax:
    return AnswerSyntax(calls=CALL_FORMATS[family], tool_names=TOOLS, **fields)  # type: ignore[arg-type]


def parts_of(pieces: Sequence[Piece]) -> Parts:
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece.kind:
            case PieceKind.REASONING:
                reasoning += piece.text
            case PieceKind.CONTENT:
                content += piece.text
            case PieceKind.CALL:
                calls.append((piece.text, ""))
            case PieceKind.ARGUMENTS:
                calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return reasoning, content, calls


def read(text: str, answer: AnswerSyntax, cuts: Sequence[int] = ()) -> Parts:
    reader = AnswerReader(answer)
    pieces: list[Piece] = []
    at = 0
    for cut in sorted(cuts):
        pieces += reader.push(text[at:cut])
        at = max(at, cut)
    return parts_of(pieces + reader.push(text[at:], is_last=True))


def every_way(text: str, answer: AnswerSyntax) -> Parts:
    """What the whole text gives; it is the same character by character."""
    whole = read(text, answer)
    assert read(text, answer, range(len(text) + 1)) == whole
    return whole


ONE = [("f", '{"x": 1}')]
TWO = [*ONE, ("get_weather", '{"city": "Öl\\"}{", "in": [1, {"a": 2}]}')]
X, Y = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in TWO)
PX, PY = X.replace("arguments", "parameters"), Y.replace("arguments", "parameters")
DX, DY = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    for name, arguments in TWO
)
DEEP = '[")", ' * 40 + "]" * 40
# Text, content, calls.
CALLS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "no call": ("hermes", " Just text.\n", " Just text.\n", []),
    "hermes": ("hermes", f"<tool_call>\n{X}\n</tool_call>", "", ONE),
    "hermes two": ("hermes", f"<tool_call>{X}</tool_call>\n<tool_call>\n{Y}\n</tool_call>\n", "", TWO),
    "hermes content": ("hermes", f"Let me see.\n\n<tool_call>{X}</tool_call>", "Let me see.", ONE),
    "hermes text after": ("hermes", f"A <tool_call>{X}</tool_call> \nB ", "AB ", ONE),
    "hermes several in a block": ("hermes", f"<tool_call>{X}\n{Y}</tool_call>", "", TWO),
    "hermes list": ("hermes", f"<tool_call>[{X}, {Y}]</tool_call>", "", TWO),
    "hermes without its end": ("hermes", f"<tool_call>{X}", "", ONE),
    "hermes with a bracket too many": ("hermes", f"<tool_call>{X}}}</tool_call>", "", ONE),
    "hermes with a bracket too few": ("hermes", f"<tool_call>{X[:-1]}</tool_call>", "", ONE),
    "hermes with two brackets too few": (
        "hermes", f"<tool_call>{X[:-2]}</tool_call>", "", [("f", '{"x": 1')],
    ),
    "hermes arguments first": (
        "hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", ONE,
    ),
    "hermes extra fields": (
        "hermes", '<tool_call>{"id": {"a": []}, "name": "f", "arguments": {"x": 1}, "b": "}"}</tool_call>', "", ONE,
    ),
    "hermes no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "hermes null arguments": ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    "hermes arguments in a string": (
        "hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", ONE,
    ),
    "hermes arguments in a string first": (
        "hermes", '<tool_call>{"arguments": "{\\"x\\": 1}", "name": "f"}</tool_call>', "", ONE,
    ),
    "hermes null arguments first": (
        "hermes", '<tool_call>{"arguments": null, "name": "f"}</tool_call>', "", [("f", "{}")],
    ),
    "hermes arguments that are not JSON": (
        "hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {'x': None,}}</tool_call>", "", [("f", "{'x': None,}")],
    ),
    "hermes unknown tool": (
        "hermes", '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>', "", [("nothing", "{}")],
    ),
    "hermes marker in a string": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', "",
        [("f", '{"x": "</tool_call>"}')],
    ),
    "hermes look-alike": ("hermes", "<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
    "hermes look-alike before a call": ("hermes", f"<tool_call> <tool_call>{X}</tool_call>", "<tool_call>", ONE),
    "hermes no name": ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "hermes odd name": ("hermes", '<tool_call>{"name": "a b"}', '<tool_call>{"name": "a b"}', []),
    "hermes name not a string": ("hermes", '<tool_call>{"name": 1}', '<tool_call>{"name": 1}', []),
    "hermes cut in the marker": ("hermes", "x <tool_ca", "x <tool_ca", []),
    "hermes cut in the name": ("hermes", '<tool_call>{"name": "ge', '<tool_call>{"name": "ge', []),
    "hermes cut before the arguments": ("hermes", '<tool_call>{"name": "f", "arguments": ', "", [("f", "")]),
    "hermes cut in the arguments": ("hermes", "<tool_call>" + X[:-3], "", [("f", '{"x": ')]),
    "llama": ("llama3", PX, "", ONE),
    "llama after white space": ("llama3", "\n\n" + PX, "", ONE),
    "llama with its tag": ("llama3", "<|python_tag|>" + PX, "", ONE),
    "llama two": ("llama3", f"{PX}; {PY}", "", TWO),
    "llama arguments": ("llama3", X, "", ONE),
    "llama type": ("llama3", '{"type": "function", "function": "f", "parameters": {"x": 1}}', "", ONE),
    "llama and text": ("llama3", PX + "; and more", "; and more", ONE),
    "llama text": ("llama3", "{x} is a set.", "{x} is a set.", []),
    "llama unknown tool": ("llama3", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    "llama JSON answer": ("llama3", '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
    "llama name alone": ("llama3", '{"name": "f"}', '{"name": "f"}', []),
    "llama code": ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "llama list": ("llama3", f"[{PX}, {PY}]", "", TWO),
    "mistral": ("mistral", f"[TOOL_CALLS][{X}]", "", ONE),
    "mistral two": ("mistral", f"[TOOL_CALLS] [{X}, {Y}]", "", TWO),
    "mistral content": ("mistral", f"See:\n[TOOL_CALLS][{X}]", "See:", ONE),
    "mistral ids": (
        "mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]', "", ONE,
    ),
    "mistral newer": ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}', "", ONE),
    "mistral newer two": (
        "mistral", f"[TOOL_CALLS]f[ARGS]{ONE[0][1]}[TOOL_CALLS]get_weather[ARGS]{TWO[1][1]}", "", TWO,
    ),
    "mistral newer with an id": ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", ONE),
    "mistral without a separator": ("mistral", '[TOOL_CALLS]f{"x": 1}', "", ONE),
    "mistral look-alike": ("mistral", "[TOOL_CALLS] I cannot.", "[TOOL_CALLS] I cannot.", []),
    "deepseek": ("deepseek", f"<｜tool▁calls▁begin｜>{DX}<｜tool▁calls▁end｜>", "", ONE),
    "deepseek two": ("deepseek", f"See.\n<｜tool▁calls▁begin｜>{DX}\n{DY}<｜tool▁calls▁end｜>", "See.", TWO),
    "deepseek without a fence": (
        "deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>', "", ONE,
    ),
    "deepseek without its ends": ("deepseek", f"<｜tool▁calls▁begin｜>{DX[:-18]}", "", ONE),
    "deepseek unknown tool": (
        "deepseek", "<｜tool▁calls▁begin｜>" + DX.replace("f\n", "nothing\n"), "", [("nothing", '{"x": 1}')],
    ),
    "deepseek look-alike": ("deepseek", "<｜tool▁calls▁begin｜> none", "<｜tool▁calls▁begin｜> none", []),
    "deepseek cut in the arguments": ("deepseek", f"<｜tool▁calls▁begin｜>{DX[:-22]}", "", [("f", '{"x": 1')]),
    "phi": ("phi4", f"<|tool_call|>[{X}]<|/tool_call|>", "", ONE),
    "phi two": ("phi4", f"<|tool_call|>[{X},{Y}]<|/tool_call|>", "", TWO),
    "phi functools": ("phi4", f"functools[{X}, {Y}]", "", TWO),
    "phi look-alike": ("phi4", "import functools\n", "import functools\n", []),
    "gemma code": ("gemma", '```tool_code\nf(x=1)\n```', "", ONE),
    "gemma printed code": ("gemma", 'Sure:\n```tool_code\nprint(f(x=1))\n```\n', "Sure:", ONE),
    "gemma two lines": ("gemma", "```tool_code\nf(x=1)\nf(x=True, y=[null, 'ü'])```", "",
                        [*ONE, ("f", '{"x": true, "y": [null, "ü"]}')]),
    "gemma list": ("gemma", "[f(x=1), get_weather(city='a]')]", "", [*ONE, ("get_weather", '{"city": "a]"}')]),
    "gemma JSON": ("gemma", PX, "", ONE),
    "gemma JSON fence": ("gemma", f"```json\n[{PX}, {PY}]\n```", "", TWO),
    "gemma tool_call fence": ("gemma", f"```tool_call\n{X}\n```", "", ONE),
    "gemma JSON answer": ("gemma", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    "gemma other code": ("gemma", "```tool_code\nx = f()\n```", "```tool_code\nx = f()\n```", []),
    "gemma unknown": ("gemma", "[g(x=1)]", "[g(x=1)]", []),
    "gemma list of numbers": ("gemma", "[1, 2] is a list", "[1, 2] is a list", []),
    "gemma positional": ("gemma", "[f(1)]", "[f(1)]", []),
    "gemma deep": ("gemma", "[f(x=" + "[" * 40 + "]" * 40 + ")]", "[f(x=" + "[" * 40 + "]" * 40 + ")]", []),
    "gemma brackets in strings": (
        "gemma", f"[f(x='{'[' * 40}', y=\"{']' * 40}\")]", "", [("f", f'{{"x": "{"[" * 40}", "y": "{"]" * 40}"}}')],
    ),
    "gemma deep between strings": (
        "gemma", f"[f(x={DEEP})]", f"[f(x={DEEP})]", [],
    ),
    "gemma three quotes": (
        "gemma", "```tool_code\nf(x=\"\"\"a \"b\" ]\"\"\", y=\'\', z=r\'\\d\')```", "",
        [("f", '{"x": "a \\"b\\" ]", "y": "", "z": "\\\\d"}')],
    ),
    "gemma formatted string": ("gemma", "[f(x=f'{[]}')]", "[f(x=f'{[]}')]", []),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_read_in_the_format_of_each_family(case: str) -> None:
    family, text, content, calls = CALLS[case]
    assert every_way(text, syntax(family)) == ("", content, calls)


FRAGMENTS = [
    *(
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "functools",
    ),
    *(
        "```tool_code\n",
        "```json\n",
        "```",
        "<think>",
        "</think>",
        "f",
        "get_weather",
        "(x=1)",
        "(x='",
        "\n",
        " ",
    ),
    *(
        '{"name": "f", "arguments": ',
        '{"arguments": {}, "name": "',
        '"f"',
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ":",
        ",",
        ";",
    ),
    *(X, Y, PX, "text", "<", "'", "ü"),
]  # fmt: skip


@given(st.data())
def test_the_parts_of_an_answer_do_not_depend_on_where_its_text_is_cut(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=9)))
    answer = syntax(
        data.draw(st.sampled_from(list(CALL_FORMATS))),
        thinks=data.draw(st.booleans()),
        prompt_thinks=data.draw(st.booleans()),
    )
    whole = every_way(text, answer)
    assert read(text, answer, data.draw(st.lists(st.integers(0, len(text)), max_size=4))) == whole


_VALUES = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5)


@settings(max_examples=settings.default.max_examples // 4)  # Each is read character by character.
@given(st.dictionaries(st.text(max_size=3), _VALUES | st.lists(_VALUES, max_size=2), max_size=3))
def test_arguments_of_any_json_are_passed_on_as_they_are(arguments: dict[str, object]) -> None:
    raw = json.dumps(arguments, ensure_ascii=False)
    text = f'{{"name": "f", "parameters": {raw}}}'
    for family, opener, closer in (
        ("hermes", "<tool_call>", "</tool_call>"), ("llama3", "", ""), ("mistral", "[TOOL_CALLS][", "]"),
    ):  # fmt: skip
        assert every_way(opener + text + closer, syntax(family)) == ("", "", [("f", raw)])


def test_arguments_are_passed_on_while_they_are_generated() -> None:
    reader = AnswerReader(syntax("hermes"))
    pieces = [
        reader.push(part) for part in ("<tool_call>", '{"name": "f", "arg', 'uments": {"x', '": 1', "}}")
    ]
    assert [[piece.text for piece in some] for some in pieces] == [[], [], ["f", '{"x'], ['": 1'], ["}"]]


def test_calls_beyond_the_last_that_counts_are_left_out() -> None:
    text = f"<tool_call>{X}</tool_call><tool_call>{Y}</tool_call>"
    assert every_way(text, syntax("hermes", max_calls=1)) == ("", "", ONE)


REASONING = {
    "none": ("Hi", False, "", "Hi"),
    "written": ("<think>\nHm.\n\nSo.\n</think>\n\nHi", False, "Hm.\n\nSo.", "Hi"),
    "begun by the prompt": ("Hm.\n</think>\n\nHi\n", True, "Hm.", "Hi\n"),
    "begun twice": ("<think>\nHm.</think>Hi", True, "Hm.", "Hi"),
    "cut off": ("<think>Hm. </thi", False, "Hm. </thi", ""),
    "empty": ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
    "later": ("Hi <think>x</think>", False, "", "Hi <think>x</think>"),
    "white space alone": (" \n", False, "", " \n"),
    "an end without a beginning": ("a</think>b", False, "", "a</think>b"),
}


@pytest.mark.parametrize("case", REASONING)
@pytest.mark.parametrize("family", [None, "hermes"])
def test_reasoning_is_split_off(case: str, family: str | None) -> None:
    text, prompt_thinks, reasoning, content = REASONING[case]
    calls = CALL_FORMATS[family] if family else None
    answer = AnswerSyntax(thinks=True, prompt_thinks=prompt_thinks, calls=calls)
    assert every_way(text, answer) == (reasoning, content, [])


def test_a_call_follows_the_reasoning_and_one_within_it_does_not_count() -> None:
    text = f"<think>\n<tool_call>{X}</tool_call>\n</think>\n\n<tool_call>\n{Y}\n</tool_call>"
    assert every_way(text, syntax("hermes", thinks=True)) == (f"<tool_call>{X}</tool_call>", "", TWO[1:])


def test_a_look_alike_of_any_length_is_content() -> None:
    text = "<tool_call>[" * 2000 + '{"arguments": "' + "x" * MAX_HELD_CHARS
    assert read(text, syntax("hermes")) == ("", text, [])
    assert read(text, syntax("hermes"), range(0, len(text), 97)) == ("", text, [])


def test_python_of_any_length_is_content() -> None:
    fits, too_long = (f"[{'f(x=1), ' * 511}{' ' * num}]" for num in (6, 7))
    assert len(fits) == 4096 and read(fits, syntax("gemma")) == ("", "", ONE * 511)
    assert every_way(too_long, syntax("gemma")) == ("", too_long, [])


@pytest.mark.parametrize("num_spaces", [MAX_HELD_CHARS, MAX_HELD_CHARS + 1, 17_000])
def test_white_space_of_any_length_is_content(num_spaces: int) -> None:
    """A bare call may follow white space. More than a reader holds escaped as an error."""
    text = " " * num_spaces + "{x}"
    assert every_way(text, syntax("llama3")) == ("", text, [])


@pytest.mark.parametrize("end", ["", "</think>", "</th"])
def test_line_breaks_within_reasoning_are_kept_and_those_at_its_end_dropped(end: str) -> None:
    text = "<think>" + "\n" * 40 + "a" + "\n" * 40 + "b" + "\n" * 40 + end
    kept = "a" + "\n" * 40 + "b" + ("\n" * 40 + end if end == "</th" else "")
    assert every_way(text, AnswerSyntax(thinks=True)) == (kept, "", [])


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
