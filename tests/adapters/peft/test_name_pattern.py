import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_adapters.peft.name_pattern import NamePattern

ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    "q_proj",
    "[ab]",
    "[^a]",
    r"[a-c_]",
    r"\d",
    r"\w",
    r"\W",
    r"\D",
    r"\s",
    "(?:a|b.)",
    "(ab|)",
]
ANCHORS = ["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?=a)", "(?!.b)", "(?!.*1)"]
REPEATS = ["", "", "*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{2,}", "{0,2}?"]


def _repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pieces = st.lists(st.tuples(inner, st.sampled_from(REPEATS)), min_size=1, max_size=4)
    joined = pieces.map(lambda found: "".join(f"(?:{atom}){repeat}" for atom, repeat in found))
    return joined | st.tuples(joined, joined).map("|".join)


patterns = st.recursive(st.sampled_from(ATOMS + ANCHORS), _repeated, max_leaves=6)
names = st.text("ab._q1proj", min_size=1, max_size=10)  # not empty: Python versions disagree about \B on ""


@given(patterns, names)
def test_answers_are_those_of_pythons_matcher(pattern: str, name: str) -> None:
    ours = NamePattern(pattern)
    assert ours.matches_whole(name) == (re.fullmatch(pattern, name) is not None)
    assert ours.matches_start(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "(.*.*.*.*.*.*.*)*b", "((((a*)*)*)*)*b", "(a?){40}a{40}"]
)
def test_patterns_that_hang_pythons_matcher_are_answered_or_refused(pattern: str) -> None:
    name = "a" * 60 + "!"
    try:
        assert not NamePattern(pattern).matches_whole(name)
    except ValueError as error:
        assert "too long to match" in str(error)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "not a regular expression"),
        (r"(a)\1", "not accepted"),
        ("(?<=a)b", "not accepted"),
        ("(?i)q_proj", "inline flags"),
        ("(?i:q)_proj", "not accepted"),
        ("(?>a*)b", "not accepted"),
        ("a" * 9000, "9000 characters"),
        ("(" * 60 + "a" + ")" * 60, "deeper than"),
        ("(" * 4000 + "a" + ")" * 4000, "not a regular expression"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_reason(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamePattern(pattern)


def test_a_repeat_of_a_billion_is_answered_at_once() -> None:
    assert NamePattern("(?:a?b?c?){1000000000}").matches_whole("abc" * 20)
    assert not NamePattern("(?:a?b?c?){1000000000}").matches_whole("abc" * 20 + "d")
