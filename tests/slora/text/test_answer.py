"""How an answer is collected from its deltas, without an engine."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slora.core.request import EngineRequest, FinishReason, TokenDelta, TokenLogprobs
from slora.core.sampling_params import SamplingParams
from slora.text.answer import Answer, AnswerOptions
from tests.api.scripted_engine import EOS, byte_tokenizer, deltas_of
from tests.slora.text.test_detokenizer import fast_of, tokenizer_of


def test_cached_tokens_are_counted_once_for_all_choices() -> None:
    answer = Answer(EngineRequest("r", "t", [1] * 40, (), SamplingParams(n=2)), None)
    deltas = [
        TokenDelta((7,), num_cached=32),
        TokenDelta((8,), index=1),
        TokenDelta((9,), FinishReason.LENGTH),
        TokenDelta((9,), FinishReason.LENGTH, index=1),
    ]
    assert [answer.take(delta).num_cached_tokens for delta in deltas] == [32, 0, 0, 0]
    assert answer.completion().num_cached_tokens == 32


def test_the_equality_of_completions_ignores_cached_tokens() -> None:
    completions = []
    for num_cached in (0, 16):
        answer = Answer(EngineRequest("r", "t", [1] * 40, (), SamplingParams()), None)
        answer.take(TokenDelta((7,), FinishReason.LENGTH, num_cached=num_cached))
        completions.append(answer.completion())
    assert completions[0] == completions[1]


def test_an_answer_to_the_prompt_alone_ends_before_its_first_token() -> None:
    request = EngineRequest("r", "t", [1, 2], (), SamplingParams(max_tokens=1, prompt_logprobs=0, n=2))
    answer = Answer(request, byte_tokenizer(), options=AnswerOptions(prompt_only=True))
    scored = (None, TokenLogprobs(-0.5, ()))
    answer.take(TokenDelta((), prompt_logprobs=scored))
    first = answer.take(TokenDelta((65,), FinishReason.STOP, num_cached=1))
    assert (first.text, first.token_ids, first.finish_reason) == ("", (), FinishReason.LENGTH)
    assert first.num_cached_tokens == 1 and not answer.is_over
    answer.take(TokenDelta((65,), index=1))
    completion = answer.completion()
    assert completion.prompt_logprobs == list(scored)
    assert [(choice.text, choice.token_ids) for choice in completion.choices] == [("", []), ("", [])]


def test_aligned_tokens_divide_the_text_up_to_a_stop_string() -> None:
    sampling = SamplingParams(logprobs=0, stop=("bc",))
    answer = Answer(EngineRequest("r", "t", [1], (), sampling), byte_tokenizer())
    deltas = [answer.take(TokenDelta((byte,), None, (TokenLogprobs(-0.5, ()),))) for byte in b"xabc"]
    assert [[token.token_id for token in delta.tokens] for delta in deltas] == [[120], [97], [], []]
    (choice,) = answer.completion().choices
    assert choice.text == "xa" and [token.width for token in choice.tokens] == [1, 1]
    assert len(choice.token_ids) == len(choice.logprobs or ()) == 4


def test_a_stop_token_and_a_stop_string_are_part_of_the_text_if_that_is_asked_for() -> None:
    for sampling, text in (
        (SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False), "ab<eos>"),
        (SamplingParams(include_stop_str_in_output=True), "ab"),
        (SamplingParams(skip_special_tokens=False), "ab"),
        (SamplingParams(include_stop_str_in_output=True, stop=("a",)), "a"),
    ):
        answer = Answer(EngineRequest("r", "t", [1], (), replace(sampling, logprobs=0)), byte_tokenizer())
        for delta in deltas_of(b"ab", FinishReason.STOP):
            if answer.wants(0):
                answer.take(replace(delta, logprobs=(TokenLogprobs(-0.5, ()),)))
        (choice,) = answer.completion().choices
        assert choice.text == text and sum(token.width for token in choice.tokens) == len(text)


@pytest.mark.parametrize(
    "kind", ["byte_level", "byte_fallback", "gemma_like", "word_suffix", "connectionist"]
)
@given(data=st.data())
def test_a_stop_string_may_have_special_tokens_that_the_text_leaves_out(
    kind: str, data: st.DataObject
) -> None:
    """Born from a bug: `stop: ["<|im_end|>"]` never stopped, because the text had no special tokens."""
    tokenizer = tokenizer_of(kind)
    specials = ("</s>", "<|user|>", "<|system|>")
    (end, user, _), others = (
        [fast_of(kind).token_to_id(text) for text in specials],
        tokenizer.encode("a b é", add_special_tokens=False),
    )
    ids = data.draw(st.lists(st.sampled_from([*others, end, user]), max_size=12))
    stop = data.draw(st.sampled_from(["</s>", "a</s>", "</s><|user|>", "</s>b", "</s> b", "<|user|>a</s>"]))
    includes_stop = data.draw(st.booleans())
    # Whole texts show where the stop string ends. A decoder may treat the first token differently.
    prefix = others[:1]
    sampling = SamplingParams(stop=("absent", stop), include_stop_str_in_output=includes_stop)
    answer = Answer(EngineRequest("r", "t", [1], (), sampling), tokenizer)
    tokens, told = [*prefix, *ids], ""
    hidden = [text for text in specials if text in stop]
    for count in range(1, len(tokens) + 1):
        reason = FinishReason.LENGTH if count == len(tokens) else None
        told += answer.take(TokenDelta((tokens[count - 1],), reason)).text
        if not answer.wants(0):
            break
    marked = [token for token in tokens if token != user or "<|user|>" in hidden]
    whole, shown = tokenizer.decode(marked, skip_special_tokens=False), tokenizer.decode(tokens)
    assume("".join(re.split("|".join(map(re.escape, hidden)), whole)) == shown)
    at = whole.find(stop)
    (choice,) = answer.completion().choices
    if at < 0:
        assert choice.text == told == shown and choice.finish_reason is FinishReason.LENGTH
        return
    kept = "".join(re.split("|".join(map(re.escape, hidden)), whole[:at]))
    assert choice.text == told == kept + (stop if includes_stop else "")
    assert choice.finish_reason is FinishReason.STOP


def test_a_delta_that_a_special_stop_string_cuts_ends_at_its_token() -> None:
    sampling = SamplingParams(logprobs=0, stop=("<eos>",), ignore_eos=True)
    for size in (1, 5):
        answer = Answer(EngineRequest("r", "t", [1], (), sampling), byte_tokenizer())
        tokens, entry = [97, 98, EOS, 99, 100], TokenLogprobs(-0.5, ())
        for at in range(0, 5, size):
            if answer.wants(0):
                answer.take(TokenDelta(tuple(tokens[at : at + size]), None, (entry,) * size))
        (choice,) = answer.completion().choices
        assert (choice.text, choice.token_ids) == ("ab", [97, 98, EOS])
        assert [token.token_id for token in choice.tokens] == [97, 98]


def test_deltas_of_an_ended_choice_in_the_same_list_are_left_out() -> None:
    sampling = SamplingParams(n=2, stop=("b",))
    answer = Answer(EngineRequest("r", "t", [1], (), sampling), byte_tokenizer())
    ended: list[tuple[str, int]] = []
    lists = (
        [*(TokenDelta((byte,)) for byte in b"abcd"), TokenDelta((120,), index=1)],
        [TokenDelta((120,), index=1), TokenDelta((), FinishReason.LENGTH, index=1)],
    )
    taken = [
        delta
        for arrived in lists
        for delta in answer.take_list(arrived, lambda *choice: ended.append(choice))
    ]
    stopped, length = FinishReason.STOP, FinishReason.LENGTH
    assert [(delta.choice, delta.text, delta.finish_reason) for delta in taken] == [
        (0, "a", None), (0, "", stopped), (1, "x", None), (1, "x", None), (1, "", length)
    ]  # fmt: skip
    assert ended == [("r", 0)]
    assert [choice.text for choice in answer.completion().choices] == ["a", "xx"]


def test_a_delta_of_several_tokens_gives_the_same_answer_as_its_tokens_one_by_one() -> None:
    """A stop string within the delta ends the answer at the token that completes it."""
    text, entry = b"abcd.efgh", TokenLogprobs(-0.5, ())
    for stop, min_tokens, kept in (
        (("c",), 0, 3),
        (("d.e",), 0, 6),
        (("a", "f"), 2, 7),
        (("z",), 0, 9),
        ((), 0, 9),
    ):
        sampling = SamplingParams(logprobs=0, stop=stop, min_tokens=min_tokens)
        answers = []
        for size in (1, 4, 9):
            answer = Answer(EngineRequest("r", "t", [1], (), sampling), byte_tokenizer())
            told: list[int] = []
            for at in range(0, len(text), size):
                part, reason = text[at : at + size], FinishReason.LENGTH if at + size >= len(text) else None
                if answer.wants(0):
                    told += answer.take(TokenDelta(tuple(part), reason, (entry,) * len(part))).token_ids
            (choice,) = answer.completion().choices
            assert told == choice.token_ids == list(text[:kept]) and answer.num_generated == kept
            assert choice.finish_reason == (FinishReason.STOP if kept < 9 else FinishReason.LENGTH)
            answers.append(choice)
        assert answers[0] == answers[1] == answers[2]
