import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from slora.text.detokenizer import Detokenizer, StopMatcher, StopString
from slora.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import TOKENIZERS, byte_level


@cache
def fast_of(kind: str) -> FastTokenizer:
    return TOKENIZERS[kind]()


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(fast_of(kind), {}, None)


KINDS = ["byte_level", "byte_fallback"]
# Words of the vocabulary, characters that need byte tokens, joined emoji, and spaces.
texts = st.lists(
    st.sampled_from(
        ["hello", " ", "wor", "lo", "é", "日本", "👩‍👩‍👧", "\n", "�", "x" * 20, " the ", "ß", "\t"]
    ),
    max_size=12,
).map("".join) | st.text(max_size=20)


def split(data: st.DataObject, tokens: list[int]) -> list[list[int]]:
    """The tokens in pieces, as the engine's steps may deliver them. Some pieces are empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens) + 2)))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def tokens_of(kind: str) -> st.SearchStrategy[int]:
    """Token ids. If the vocabulary has byte tokens, at least half of the ids are byte tokens on average."""
    vocabulary = fast_of(kind).get_vocab()
    byte_ids = [token_id for piece, token_id in sorted(vocabulary.items()) if piece.startswith("<0x")]
    any_id = st.sampled_from(sorted(vocabulary.values()))
    return any_id | st.sampled_from(byte_ids) if byte_ids else any_id


def stop_strings(texts: Sequence[str]) -> list[StopString]:
    return [StopString(text) for text in texts]


def feed(detokenizer: Detokenizer, pieces: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def cut_at_stop(text: str, stop: tuple[str, ...], *, includes_stop: bool) -> tuple[str, bool]:
    """The text up to the first complete stop string, if text arrives one character at a time, and whether one was
    found."""
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            return text[: end - (0 if includes_stop else max(map(len, found)))], True
    return text, False


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, data=st.data())
def test_a_text_in_pieces_reads_as_it_does_in_one(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(text)
    pieces = feed(Detokenizer(tokenizer.start_decoding()), split(data, tokens))
    assert "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(skip_special_tokens=st.booleans(), data=st.data())
def test_any_tokens_in_pieces_read_as_they_do_in_one(
    kind: str, skip_special_tokens: bool, data: st.DataObject
) -> None:
    """A model may generate any tokens, including invalid bytes, parts of characters and special tokens.

    Born from a bug: an invalid byte after a complete character of byte tokens changed text that had already been sent.
    """
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(st.lists(tokens_of(kind), max_size=25))
    decoder = tokenizer.start_decoding(skip_special_tokens=skip_special_tokens)
    pieces = feed(Detokenizer(decoder), split(data, tokens))
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_an_incomplete_character_is_never_sent(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(text.replace("�", ""))
    detokenizer = Detokenizer(tokenizer.start_decoding())
    assert all("�" not in detokenizer.push([token]) for token in tokens)
    assert "�" not in detokenizer.flush()


def test_a_character_over_four_tokens_is_sent_with_the_last() -> None:
    tokenizer = tokenizer_of("byte_level")
    tokens = tokenizer.encode("🎉")
    detokenizer = Detokenizer(tokenizer.start_decoding())
    assert [detokenizer.push([token]) for token in tokens] == [*[""] * (len(tokens) - 1), "🎉"]


def test_byte_tokens_are_sent_when_their_run_is_over() -> None:
    """A further byte could make the whole run invalid."""
    tokenizer = tokenizer_of("byte_fallback")
    tokens = tokenizer.encode("h🎉h")[-5:]
    detokenizer = Detokenizer(tokenizer.start_decoding())
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", "", "🎉h"]


def test_bytes_that_never_become_a_character_are_sent_at_the_end() -> None:
    tokenizer = tokenizer_of("byte_level")
    tokens = tokenizer.encode("a🎉")[:-1]
    detokenizer = Detokenizer(tokenizer.start_decoding())
    sent = detokenizer.push(tokens)
    assert sent + detokenizer.flush() == tokenizer.decode(tokens) != ""


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.text(alphabet="abé ", max_size=25),
    stop=st.lists(st.text(alphabet="abé ", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    includes_stop=st.booleans(),
    data=st.data(),
)
def test_stop_strings_end_the_text_wherever_tokens_fall(
    kind: str, text: str, stop: tuple[str, ...], includes_stop: bool, data: st.DataObject
) -> None:
    """Born from a bug: with two stop strings, the text depended on how many tokens arrived at once."""
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(text)
    expected, stopped = cut_at_stop(tokenizer.decode(tokens), stop, includes_stop=includes_stop)
    decoder = tokenizer.start_decoding()
    detokenizer = Detokenizer(decoder, stop_strings(stop), includes_stop=includes_stop)
    pieces = feed(detokenizer, split(data, tokens))
    assert "".join(pieces) == expected
    assert detokenizer.stopped == stopped
    if stopped:
        assert detokenizer.push(tokens) == detokenizer.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.text(alphabet="abé ", max_size=25),
    stop=st.lists(st.text(alphabet="abé ", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    min_tokens=st.integers(0, 8),
    data=st.data(),
)
def test_no_stop_string_ends_in_the_text_of_the_first_min_tokens(
    kind: str, text: str, stop: tuple[str, ...], min_tokens: int, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(text)
    whole, exempt = tokenizer.decode(tokens), len(decode_complete(tokenizer, tokens[:min_tokens]))
    ends = range(exempt + 1, len(whole) + 1)
    expected = next(
        (whole[: end - max(map(len, found))] for end in ends if (found := _ending(whole[:end], stop))), whole
    )
    detokenizer = Detokenizer(tokenizer.start_decoding(), stop_strings(stop), min_tokens)
    pieces = feed(detokenizer, split(data, tokens))
    sent = "".join(pieces)
    # Text that was already certain is not taken back when a stop string that began in it becomes complete.
    assert sent == expected
    assert detokenizer.stopped == (expected != whole)


def decode_complete(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text without an incomplete character at its end, which may also turn the bytes before it into U+FFFD."""
    texts = (tokenizer.decode(tokens[:count]).rstrip("�") for count in range(len(tokens) + 1))
    return max((text for text in texts if "�" not in text), key=len)


def _ending(text: str, stop: tuple[str, ...]) -> list[str]:
    return [one for one in stop if text.endswith(one)]


@given(text=st.text(alphabet="ab", max_size=20))
def test_the_start_of_a_stop_string_is_never_sent_before_it_is_known_to_be_none(text: str) -> None:
    stop = "abab"
    tokenizer = tokenizer_of("byte_level")
    detokenizer, sent = Detokenizer(tokenizer.start_decoding(), stop_strings([stop])), ""
    for number, token in enumerate(tokenizer.encode(text)):
        sent += detokenizer.push([token])
        if detokenizer.stopped:
            return
        read = tokenizer.decode(tokenizer.encode(text)[: number + 1])
        longest = max(n for n in range(len(stop)) if read.endswith(stop[:n]))
        assert read[len(sent) :] == stop[:longest]


@pytest.mark.parametrize(("skip_special_tokens", "text"), [(True, "ab"), (False, "a</s>b")])
def test_special_tokens_are_part_of_the_text_only_if_that_is_asked_for(
    skip_special_tokens: bool, text: str
) -> None:
    tokenizer = tokenizer_of("byte_level")
    tokens = [*tokenizer.encode("a"), *tokenizer.encode("</s>"), *tokenizer.encode("b")]
    decoder = tokenizer.start_decoding(skip_special_tokens=skip_special_tokens)
    assert "".join(feed(Detokenizer(decoder), [[token] for token in tokens])) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_token_does_not_grow_with_the_answer(kind: str) -> None:
    """Born from a bug: each token of a run of invalid bytes decoded the whole run again, which took 20 s here."""
    invalid = {"byte_level": "ÿ", "byte_fallback": "<0xFF>"}[kind]
    tokens = [fast_of(kind).token_to_id(invalid)] * 10_000
    detokenizer = Detokenizer(
        tokenizer_of(kind).start_decoding(), stop_strings(["�" * 1000 + str(n) for n in range(15)])
    )
    before = time.thread_time()
    pieces = feed(detokenizer, [[token] for token in tokens])
    assert time.thread_time() - before < 5
    assert "".join(pieces) == "�" * len(tokens)


def test_a_shown_special_token_is_part_of_the_text_and_others_are_not() -> None:
    fast = byte_level()
    fast.add_special_tokens(["[TOOL_CALLS]", "<|python_tag|>"])
    tokenizer = Tokenizer(fast, {}, None)
    tokens = tokenizer.encode("<s>a[TOOL_CALLS]b<|python_tag|></s>")
    shown = frozenset({"[TOOL_CALLS]", "not in the vocabulary"})
    decoder = tokenizer.start_decoding(shown=shown)
    assert decoder.push(tokens) + decoder.finish() == "a[TOOL_CALLS]b"
    widths = tokenizer.start_measuring(shown=shown)
    assert widths.push(tokens) + widths.finish() == [0, 1, len("[TOOL_CALLS]"), 1, 0, 0]


SOME_STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


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
    pieces=st.lists(st.text(alphabet="abc", max_size=8), max_size=6),
    strings=SOME_STOPS,
    exempt=st.integers(0, 12),
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


def test_long_strings_that_nearly_match_cost_no_more_than_short_ones() -> None:
    """Born from a bug: 15 stop strings of thousands of equal letters took milliseconds for each token."""
    matcher = StopMatcher([StopString("a" * 1000 + str(n)) for n in range(15)])
    before = time.thread_time()
    for _ in range(20_000):
        assert matcher.search("aa") is None
    assert time.thread_time() - before < 5
    assert matcher.num_pending == 1000
