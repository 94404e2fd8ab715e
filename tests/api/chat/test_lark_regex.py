"""Lark grammars as regular expressions, compared with the grammar library, which compiles Lark grammars as they are."""

import json
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from slora.core.sampling_params import StructuredOutput
from slora.grammar.lark_grammar import GrammarLibrary, LarkGrammar
from slora.grammar.matcher import TokenSpelling
from slora.grammar.schema_form import prepare_schema
from slora_api.chat.lark_regex import lark_to_regex

EOS = 256
PIECES = [*(bytes([byte]) for byte in range(EOS)), b""]
LIBRARY = GrammarLibrary(TokenSpelling(PIECES), [EOS])
MAX_STEPS = 150

# In the manner of the tool of OpenAI's Codex that edits files.
PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add | delete | update
add: "*** Add File: " filename LF added+
delete: "*** Delete File: " filename LF
update: "*** Update File: " filename LF move? change?
move: "*** Move to: " filename LF
change: (context | line)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF
added: "+" /(.*)/ LF -> line
filename: /(.+)/

%import common.LF
"""
TIMESTAMP = r"""
start: date "T" time zone?  // ISO 8601
date: YEAR "-" MONTH "-" DAY
?time: HOUR ":" MINUTE [":" SECOND]
!zone: "z"i | ("+" | "-") HOUR ":" MINUTE
YEAR: DIGIT~4
MONTH: "0" "1".."9"
     | "1" "0".."2"
DAY: /[0-2][0-9]|3[01]/
HOUR: /[01]\d|2[0-3]/
MINUTE: "0".."5" DIGIT
SECOND: MINUTE
%import common.DIGIT
"""
COMMANDS = r"""
start: command (NEWLINE command)*
command: "go"i WORD -> go
       | "take"i INT WORD -> take
       // A comment between alternatives.
       | "say" ESCAPED_STRING ("to" WORD)?
%ignore WS_INLINE
%ignore /\t/
%import common (NEWLINE, WORD, INT, ESCAPED_STRING, WS_INLINE)
"""
ARITHMETIC = r"""
start: term (("+" | "-") term)~0..2
term: factor [("*" | "/") factor]
factor: NUMBER | NAME
NAME: /[a-z_]\w*/
%import common.SIGNED_NUMBER -> NUMBER
"""
ESCAPES = r"""
start: QUOTED "\\" "\t" "\x41" "\u00e9" "[-^]"? /\/[\]\-\x{42}]{2,}/ ODD
QUOTED: "\"" /[^"\\]/~2 "\""
ODD.2: /(?P<odd>\p{Lu}|(?i:q))\D\W\s/i | "$ {}|.&#~"
"""
GRAMMARS = {
    PATCH: [
        '*** Begin Patch\n*** Add File: a/b.py\n+print("\\n")\n+\n*** End Patch\n',
        "*** Begin Patch\n*** Delete File: é\n*** Update File: a b\n*** Move to: c\n*** End Patch",
        "*** Begin Patch\n*** Update File: a\n@@ def f():\n-old\n+new\n \n*** End of File\n*** End Patch",
        "*** Begin Patch\n*** End Patch\n",
        "*** Begin Patch\n*** Add File: a\n*** End Patch\n",
        "*** Begin Patch\n*** Add File: a\n-b\n*** End Patch\n",
    ],
    TIMESTAMP: ["2026-11-27T10:20", "2026-01-31T23:59:59+01:00", "2026-13-01T00:00", "2026-11-27T10:60Z",
                "2026-11-27T1٣:00Z", "2026-11-27T10:20z"],
    COMMANDS: ["go north", "GO north\ntake 3 apples", "go  north\n take3 apples", 'say "a\\"b"to Bob', "gonorth",
               "go", "take apples", "go north\n\n\ngo south", "go north\n"],
    ARITHMETIC: ["1+a*2", "-1.5e3", ".5", "5.", "_aé-b", "1+2+3", "1+2+3+4", "1*2*3", ""],
    ESCAPES: ['"ab"\\\tAé[-^]/]-Éa. ', '"é\n"\\\tAé/BB$ {}|.&#~', '"a\\"\\\tAé[-^]/]-Éa. ', '"ab"\\\tAé/B$ {}|.&#~',
              '"ab"\\\tAé/BBq1\u2003\u2003'],
    'start: | "a"i\n | ["b"] ~ 2 .. 3': ["", "a", "A", "b", "bb", "bbb", "bbbb", "ab"],
    'start: ("a" | "ab"){2,} "b"{,2} "c"{1}': ["aac", "aababbc", "aabbbbc", "ac", "aa", "aacc"],
    'start: A*\nA: B | "c" [B]\nB: "b"+ | ""': ["", "bb", "cb", "cbbcb", "a"],
}  # fmt: skip


def compile_lark(definition: str) -> LarkGrammar:
    # The library knows no priorities, and no comments between alternatives.
    lines = [line for line in definition.splitlines() if not line.lstrip().startswith("//")]
    return LIBRARY.compile(StructuredOutput.grammar("\n".join(lines).replace(".2:", ":")))


def compile_regex(definition: str) -> LarkGrammar:
    """Returns the grammar of JSON strings that the expression matches."""
    schema = prepare_schema({"type": "string", "pattern": f"^(?:{lark_to_regex(definition)})$"})
    return LIBRARY.compile(StructuredOutput.grammar(f"start: %json {schema}"))


def is_allowed(grammar: LarkGrammar, text: str) -> bool:
    matcher, words = grammar.start({EOS}), np.zeros(-(-len(PIECES) // 32), np.int32)
    for token in (*text.encode(), EOS):
        matcher.write_mask(words)
        if not words.view(np.uint32)[token // 32] >> token % 32 & 1:
            return False
        if token != EOS:
            matcher.accept(token)
    return True


def write_at_random(grammar: LarkGrammar, random: Random) -> str | None:
    """Returns a text of the grammar without NUL; None if it did not end soon."""
    matcher, words, text = grammar.start({EOS}), np.zeros(-(-len(PIECES) // 32), np.int32), b""
    for _ in range(MAX_STEPS):
        matcher.write_mask(words)
        assert matcher.error is None, (matcher.error, text)
        tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        ends = [token for token in (EOS, *b'"n\n\\') if token in tokens]
        token = random.choice(ends if ends and random.random() < 0.5 else [one for one in tokens if one])
        if token == EOS:
            return text.decode()
        matcher.accept(token)
        text += PIECES[token]
    return None


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@pytest.mark.parametrize("definition", GRAMMARS)
def test_an_expression_matches_what_the_library_accepts(definition: str) -> None:
    lark, regex = compile_lark(definition), compile_regex(definition)
    found = {text: is_allowed(regex, quote(text)) for text in GRAMMARS[definition]}
    assert found == {text: is_allowed(lark, text) for text in GRAMMARS[definition]}
    assert {*found.values()} == {True, False}
    num_ended = 0
    for seed in range(10):
        if (quoted := write_at_random(regex, Random(seed))) is not None:
            num_ended += 1
            text = json.loads(quoted)
            # The library ignores terminals only between two others, but Lark also at the beginning and at the end.
            assert is_allowed(lark, text.strip(" \t") if "%ignore" in definition else text), text
        if (written := write_at_random(lark, Random(seed))) is not None:
            num_ended += 1
            assert is_allowed(regex, quote(written)), written
    assert num_ended >= 5


ATOMS = [
    *(
        '"a"', '"ab"', '"B"i', '"a".."c"', r'"\n"', r'"\"\\"', '"é"', '""', "/a+/", '/[^a"]/', r"/\d|bc/",
        "/(?i)k/",
    ),
    *(r"/[^\w-]?/i", "/./s", r"/\/[]b]/", "/(?P<x>a|b){2}/"),
]  # fmt: skip
REPETITIONS = ["*", "+", "?", "~2", "~0..2", "{1,}"]


def write_parts(num_names: int, first: int) -> st.SearchStrategy[list[str | int]]:
    """Writes the definition with the number `first - 1`. A number stands for the name of a later definition."""
    names = [st.integers(first, num_names - 1).map(lambda number: [number])] if first < num_names else []
    atoms: st.SearchStrategy[list[str | int]] = st.one_of(
        st.sampled_from(ATOMS).map(lambda atom: [atom]), *names
    )
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda both: [*both[0], *both[1]]),
            st.tuples(inner, inner).map(lambda both: ["(", *both[0], "|", *both[1], ")"]),
            inner.map(lambda parts: ["[", *parts, "]"]),
            st.tuples(inner, st.sampled_from(REPETITIONS)).map(lambda both: ["(", *both[0], ")", both[1]]),
        ),
        max_leaves=6,
    )


DEFINITIONS = st.integers(1, 4).flatmap(
    lambda count: st.tuples(*(write_parts(count, number + 1) for number in range(count)))
)


def write_grammar(definitions: Sequence[Sequence[str | int]], num_rules: int) -> str:
    """num_rules: the number of definitions that are rules; the others are terminals."""
    names = [f"r{number}" if number < num_rules else f"T{number}" for number in range(len(definitions))]
    lines = [
        f"{name}: {' '.join(names[part] if isinstance(part, int) else part for part in parts)}"
        for name, parts in zip(names, definitions, strict=True)
    ]
    return "\n".join([f"start: {names[0]}", *lines])


def test_expressions_of_random_grammars_match_what_the_library_accepts(*, soak: bool) -> None:
    """The library never ends a terminal as long as it can go on. Within one terminal, it accepts every text that the
    definitions can derive, and so does an expression.
    """
    num_texts = 0

    @settings(max_examples=1000 if soak else 30, suppress_health_check=list(HealthCheck), deadline=None)
    @given(DEFINITIONS, st.integers(0, 4), st.text('aBbck1é\n"\\/ ', max_size=5), st.integers(0, 2**32))
    def check(definitions: Sequence[Sequence[str | int]], num_rules: int, text: str, seed: int) -> None:
        nonlocal num_texts
        random = Random(seed)
        regex = compile_regex(write_grammar(definitions, num_rules))
        terminal = compile_lark(write_grammar(definitions, 0))
        assert is_allowed(regex, quote(text)) == is_allowed(terminal, text)
        if (quoted := write_at_random(regex, random)) is not None:
            num_texts += 1
            assert is_allowed(terminal, json.loads(quoted)), quoted
        if (written := write_at_random(terminal, random)) is not None:
            num_texts += 1
            assert is_allowed(regex, quote(written)), written
        if (
            written := write_at_random(compile_lark(write_grammar(definitions, num_rules)), random)
        ) is not None:
            num_texts += 1
            assert is_allowed(regex, quote(written)), written

    check()
    assert num_texts >= (1500 if soak else 45), "too few texts ended for this test to prove anything"


# A grammar, and what its refusal says.
REFUSED = [
    ('start: value\nvalue: "[" list "]"\nlist: value*', "'value', which refers to itself ('value -> list -> value')"),
    ('start: A\nA: "a" A?', "the rule 'A', which refers to itself ('A -> A') and cannot be enforced"),
    ('start: "x" | start "y"', "repeat with `*`, `+` or `~n..m`, or use the format 'text'"),
    ("start: a b", "uses 'a', which is not defined, in line 1; define it"),
    ("a: /b/", "has no rule 'start'; define it"),
    ('start: "a"\n\nstart: "b"', "defines 'start' again in line 3"),
    ('%import common.WS\nWS: " "\nstart: WS', "defines 'WS' again in line 2"),
    ('start: A\nA: b\nb: "x"', "uses the rule 'b' in a terminal in line 2"),
    ('Start: "a"', "defines 'Start' in line 1; write rules in lower case"),
    ("%import python.NAME\nstart: NAME", "imports from 'python' in line 1; import from 'common' only"),
    ("start: X\n%import common.X", "imports 'X' in line 2; 'common' has only DIGIT, HEXDIGIT"),
    ("%import common.WS -> ws\nstart: ws", "imports 'ws' in line 1; write terminals in upper case"),
    ("%declare A\nstart: A", "has '%declare', which cannot be enforced within a call, in line 1; define the terminal"),
    ('%extend start: "a"', "has '%extend'"),
    ('%override start: "a"', "has '%override'"),
    ('%llguidance {}\nstart: "a"', "has '%llguidance'"),
    ("start: %json {}", "has '%json'"),
    ('start: a{"x"}\na{b}: b', "has '{', which cannot be enforced within a call, in line 1; write a rule for each use"),
    ('start: "a"\na[lazy]: "b"', "has '[', which cannot be enforced within a call, in line 2; remove the attributes"),
    ("start: <|token|>", "has '<', which cannot be enforced within a call, in line 1; write the text of the token"),
    ("start: A\nA: /a/ & /b/", "has '&'"),
    ("start: ~/a/", "has '~'"),
    ('start: "a" )', "has ')' at the wrong place in line 1"),
    ('start: "a" | (\n| "b" ]', "has ']' at the wrong place in line 2"),
    ('start: ("a"', "has a '(' that is not closed in line 1"),
    ('start: "a"**', "has '*' at the wrong place"),
    ('start "a"', "has '\"a\"' at the wrong place"),
    ('start: "a', "has '\"' at the wrong place"),
    ('start: "a" ->', r"has '\n' at the wrong place"),
    ('start: "a"~3..2', "has the repetition '~3..2' in line 1; write ~n..m with n <= m <= 9999"),
    ('start: "a"{10000}', "has the repetition '{10000}'"),
    ('start: "a"{,}', "has the repetition '{,}'"),
    ('start: "b".."a"', 'has the range \'"b".."a"\''),
    ('start: "a".."bc"', 'has the range \'"a".."bc"\''),
    (r'start: "\d"', r"use the escapes of JSON and \xHH only"),
    (r'start: "\ud800"', "a lone surrogate"),
    ("start: /a/x", "has an expression with the flags 'x' in line 1; use i, m, s and u only"),
    ("start: /(?x)a/", "has '(?' in an expression, which cannot be enforced within a call, in line 1"),
    *((f"start: /a{piece}/", f"has {piece!r} in an expression") for piece in ("^", "$", r"\b", r"\1", "*?", "{2}?")),
    ("start: /a(?!b)/", "has '(?!' in an expression"),
    *((f"start: /{bad}/", f"do not match in the expression '/{bad}/'") for bad in ("(a", "a)(b", "[a", "[]", "a)")),
    ("start: " + "(" * 50 + '"a"' + ")" * 50, "has more than 50 levels of groups and definitions at 'start'"),
    ("start: a0\n" + "\n".join(f"a{at}: a{at + 1}" for at in range(60)) + "\na60:", "has more than 50 levels"),
    (
        "start: a0\n" + "\n".join(f"a{at}: a{at + 1} a{at + 1}" for at in range(40)) + '\na40: "x"',
        "has more than 16384 characters as an expression at 'a25'; use long definitions less often",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("definition", "message"), REFUSED)
def test_what_an_expression_cannot_say_is_refused_by_name(definition: str, message: str) -> None:
    with pytest.raises(PydanticCustomError) as refused:
        lark_to_regex(definition)
    assert message in refused.value.message()
    assert "; " in refused.value.message(), "there is no remedy"


def test_a_definition_that_is_not_used_may_refer_to_itself() -> None:
    assert lark_to_regex('start: "a"\nb: "(" b? ")"') == "a"
