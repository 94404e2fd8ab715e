"""How an answer is collected from its deltas, without an engine."""

from slora.request import EngineRequest, FinishReason, TokenDelta
from slora.sampling_params import SamplingParams
from slora.text.answer import Answer


def test_cached_tokens_are_counted_once_for_all_choices() -> None:
    answer = Answer(EngineRequest("r", "t", [1] * 40, None, SamplingParams(n=2)), None)
    deltas = [
        TokenDelta((7,), num_cached=32),
        TokenDelta((8,), index=1),
        TokenDelta((9,), FinishReason.LENGTH),
        TokenDelta((9,), FinishReason.LENGTH, index=1),
    ]
    assert [answer.take(delta).num_cached_tokens for delta in deltas] == [32, 0, 0, 0]
    assert answer.completion().num_cached_tokens == 32


def test_two_completions_that_say_the_same_are_equal_whatever_was_cached() -> None:
    completions = []
    for num_cached in (0, 16):
        answer = Answer(EngineRequest("r", "t", [1] * 40, None, SamplingParams()), None)
        answer.take(TokenDelta((7,), FinishReason.LENGTH, num_cached=num_cached))
        completions.append(answer.completion())
    assert completions[0] == completions[1]
