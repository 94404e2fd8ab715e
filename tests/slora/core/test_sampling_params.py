from typing import Any

import pytest

from slora.core.errors import RequestRefused
from slora.core.request import Pooling
from slora.core.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams, StructuredOutput

BEYOND = 2**31
NAN, INFINITY = float("nan"), float("inf")


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
    ("name", "values"),
    [
        ("max_tokens", (0, -5)),
        ("temperature", (-0.1, 2.1, NAN, INFINITY)),
        ("top_p", (-0.1, 1.1, NAN)),
        ("top_k", (-1,)),
        ("seed", (2**63, -(2**63) - 1)),
        ("min_p", (-0.1, 1.5)),
        ("presence_penalty", (2.1,)),
        ("frequency_penalty", (-2.1, NAN)),
        ("repetition_penalty", (0.0, INFINITY)),
        ("logit_bias", ({3: 101.0}, {3: NAN}, {-1: 1.0}, {BEYOND: 1.0}, dict.fromkeys(range(1025), 1.0))),
        ("min_tokens", (-1, 17)),
        ("stop", (("",), tuple("abcdefghijklmnopq"))),
        ("stop_token_ids", (tuple(range(129)), (-1,), (1, BEYOND))),
        ("logprobs", (-1, 21)),
        ("prompt_logprobs", (21,)),
        ("allowed_token_ids", ((BEYOND,), ())),
        ("logprob_token_ids", ((-1,), (BEYOND,))),
        ("bad_words", (((1, -1),), ((),))),
        ("length_penalty", (0.5,)),
        ("early_stopping", (True,)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(RequestRefused, match=name) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.2},
        {"stop": ("end",)},
        {"length_penalty": 11.0},
        {"length_penalty": NAN},
    ],
)
def test_parameters_that_a_beam_search_cannot_honour_are_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(RequestRefused, match=name) as caught:
        SamplingParams(**{"temperature": 0.0, "use_beam_search": True, **changes})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "changes", [{"min_tokens": 3}, {"ignore_eos": True}, {"allowed_token_ids": (1,)}, {"bad_words": ((1,),)}]
)
def test_what_contradicts_a_form_is_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(RequestRefused, match=name) as caught:
        SamplingParams(structured_output=StructuredOutput.json_object(), **changes)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"), [({"kind": "max"}, "pooling"), ({"dimensions": 0}, "dimensions")]
)
def test_pooling_parameters_out_of_range_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused, match=f"{param} is ") as refusal:
        Pooling(**fields)
    assert refusal.value.param == param


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
