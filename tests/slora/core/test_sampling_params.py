from typing import Any

import pytest

from slora.core.errors import RequestRefused
from slora.core.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams

BEYOND = 2**31


@pytest.mark.parametrize(
    "name", ["max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "n", "best_of", "seed"]
)
@pytest.mark.parametrize("value", [2**64, -(2**64), 10**4000], ids=["large", "negative", "huge"])
def test_an_integer_that_no_message_can_carry_is_refused_by_its_name(name: str, value: int) -> None:
    """Born from a bug: a top_k of 2^64 reached the message encoder, which raised OverflowError."""
    with pytest.raises(RequestRefused, match=name) as caught:
        SamplingParams(**{"max_tokens": None, name: value})
    assert caught.value.param == name and len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", (1, BEYOND)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", {BEYOND: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", (BEYOND,)),
        ("allowed_token_ids", ()),
        ("logprob_token_ids", (-1,)),
        ("logprob_token_ids", (BEYOND,)),
        ("bad_words", ((1, -1),)),
        ("bad_words", ((),)),
    ],
)
def test_a_token_id_that_no_vocabulary_has_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_the_largest_integers_are_accepted() -> None:
    SamplingParams(
        max_tokens=BEYOND - 1, min_tokens=BEYOND - 1, top_k=BEYOND - 1, stop_token_ids=(BEYOND - 1,)
    )


def test_stop_strings_are_bounded_in_number_and_length() -> None:
    SamplingParams(stop=("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS)
    for stop in (("x" * (MAX_STOP_CHARS + 1),), ("x",) * (MAX_STOP_STRINGS + 1)):
        with pytest.raises(RequestRefused, match="at most") as caught:
            SamplingParams(stop=stop)
        assert caught.value.param == "stop"


def test_a_stop_string_with_a_lone_surrogate_is_refused_with_its_position() -> None:
    with pytest.raises(
        RequestRefused, match=r"stop\[1\] has the lone surrogate '\\udc00' at character 2"
    ) as caught:
        SamplingParams(stop=("a", "ab\udc00"))
    assert caught.value.param == "stop"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "only allowed with logprobs"),
        ({"logprobs": 0, "use_beam_search": True, "temperature": 0.0}, "beam search"),
        ({"logprobs": 0, "logprob_token_ids": (1,) * 129}, "129 ids; at most 128"),
    ],
)
def test_chosen_logprobs_that_cannot_be_listed_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        SamplingParams(**{"logprob_token_ids": (1,), **fields})
    assert caught.value.param == "logprob_token_ids"
