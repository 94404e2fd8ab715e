"""The first of several strings in a text that arrives in pieces, compared with a search at every position."""

import time

from hypothesis import given
from hypothesis import strategies as st

from slora.text.detokenizer import StopMatcher, StopString

SOME = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


def naive_match(text: str, strings: list[str], exempt: int) -> tuple[int, str] | None:
    for end in range(exempt + 1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return end, max(found, key=len)
    return None


def naive_open(text: str, strings: list[str]) -> int:
    return max(
        n
        for string in strings
        for n in range(min(len(string) - 1, len(text)) + 1)
        if text.endswith(string[:n])
    )


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=8), max_size=6), strings=SOME, exempt=st.integers(0, 12)
)
def test_the_first_match_is_found_wherever_pieces_end(
    pieces: list[str], strings: list[str], exempt: int
) -> None:
    matcher, text = StopMatcher([StopString(one) for one in strings]), ""
    for piece in pieces:
        found = matcher.search(piece, max(0, exempt - len(text)))
        expected = naive_match(text + piece, strings, exempt)
        if expected is not None:
            assert found == (expected[0] - len(text), expected[1])
            return
        text += piece
        assert found is None
        assert matcher.num_pending == naive_open(text, strings)


@given(strings=SOME, texts=st.lists(st.text(alphabet="ab", max_size=12), min_size=2, max_size=4))
def test_texts_that_share_stop_strings_do_not_disturb_each_other(
    strings: list[str], texts: list[str]
) -> None:
    shared = [StopString(one) for one in strings]
    matchers = [StopMatcher(shared) for _ in texts]
    for at in range(max(map(len, texts))):  # one character of each text in turn
        for text, matcher in zip(texts, matchers, strict=True):
            if naive_match(text[:at], strings, 0) is None:
                found = matcher.search(text[at : at + 1])
                assert (found is not None) == (naive_match(text[: at + 1], strings, 0) is not None)


def test_without_stop_strings_no_text_is_held_back() -> None:
    matcher = StopMatcher([])
    assert matcher.search("text") is None
    assert matcher.num_pending == 0


def test_long_strings_that_nearly_match_cost_no_more_than_short_ones() -> None:
    """Born from a bug: 15 stop strings of thousands of equal letters took milliseconds for each token."""
    matcher = StopMatcher([StopString("a" * 1000 + str(n)) for n in range(15)])
    before = time.thread_time()
    for _ in range(20_000):
        assert matcher.search("aa") is None
    assert time.thread_time() - before < 5
    assert matcher.num_pending == 1000
