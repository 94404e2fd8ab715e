"""Which requests an engine refuses, decided from the request and the facts of the engine alone."""

from dataclasses import replace
from typing import Any

import pytest

from slora.core.errors import ContextTooLong, RequestRefused
from slora.core.request import NOT_SAMPLED, EngineRequest, Pooling, single_adapter
from slora.core.request_check import check_request
from slora.core.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion
from tests.api.scripted_engine import ScriptedEngine

INFO = ScriptedEngine(max_model_len=64, max_num_seqs=8).info
WIDTH = INFO.shape.hidden_size
VERSION = AdapterVersion("t", "0" * 64)
FURTHEST = single_adapter(VERSION, -10_000.0)
EMBEDDED: dict[str, Any] = {"sampling": NOT_SAMPLED}
SEARCH = {"use_beam_search": True, "temperature": 0.0}
REQUEST = EngineRequest("r", "t", [1, 2, 3], (), SamplingParams(max_tokens=8))


def test_every_field_at_its_limit_is_accepted() -> None:
    filtered = {"allowed_token_ids": (1, 2, 3, 256), "bad_words": ((1,), (1, 2))}
    sampling = SamplingParams(max_tokens=61, n=8, logit_bias={256: 1.0}, min_tokens=61, **filtered)  # type: ignore[arg-type]
    check_request(
        replace(REQUEST, sampling=sampling, priority=-1000, deadline_s=86_400, adapters=FURTHEST), INFO
    )
    check_request(replace(REQUEST, priority=1000, deadline_s=0.001, prompt_token_ids=[1] * 56), INFO)


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"priority": 1001}, "priority", "priority is 1001"),
        ({"priority": -1001}, "priority", "priority is -1001"),
        ({"priority": 0.5}, "priority", "priority is 0.5"),
        ({"priority": True}, "priority", "priority is True"),
        ({"deadline_s": 0.0}, "deadline_ms", "deadline_ms is 0"),
        ({"deadline_s": -1.0}, "deadline_ms", "deadline_ms is -1000"),
        ({"deadline_s": float("nan")}, "deadline_ms", "deadline_ms is nan"),
        ({"deadline_s": float("inf")}, "deadline_ms", "deadline_ms is inf"),
        ({"deadline_s": 86_401.0}, "deadline_ms", "deadline_ms is .* at most 86400000"),
        ({"adapters": single_adapter(VERSION, float("nan"))}, "adapters", "adapters has the weight nan"),
        ({"adapters": single_adapter(VERSION, 10_001.0)}, "adapters", "adapters has the weight 10001.0"),
        ({"adapters": FURTHEST * 5}, "adapters", "adapters has 5 adapters"),
        ({"prompt_token_ids": []}, "prompt", "the prompt is empty"),
        ({"prompt_token_ids": [1, -1]}, "prompt", "prompt has token id -1"),
        ({"prompt_token_ids": [257]}, "prompt", "prompt has token id 257, which is out of vocabulary; .* 0 to 256"),
        ({"pooling": Pooling()}, "pooling", "an embedding samples no token"),
        ({**EMBEDDED, "pooling": Pooling(dimensions=WIDTH + 1)}, "dimensions", rf"have {WIDTH} \(hidden_size\)"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_by_field(
    changes: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        check_request(replace(REQUEST, **changes), INFO)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("sampling", "param", "words"),
    [
        ({"n": 9}, "n", "n is 9"),
        ({"n": 2, "best_of": 9}, "best_of", "best_of is 9"),
        ({"logit_bias": {257: 1.0}}, "logit_bias", "token id 257; this model has 257 ids, 0 to 256"),
        ({"allowed_token_ids": (257,)}, "allowed_token_ids", "token id 257"),
        ({"bad_words": ((1, 257),)}, "bad_words", "token id 257"),
        ({"logprobs": 0, "logprob_token_ids": (257,)}, "logprob_token_ids", "token id 257"),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,), (1, 2))}, "allowed_token_ids", "leaves 0 tokens"),
        ({"allowed_token_ids": (256,), "min_tokens": 1}, "allowed_token_ids", "leaves 0 tokens"),
        ({"allowed_token_ids": (1, 2, 256), "n": 3, **SEARCH}, "allowed_token_ids", "leaves 2 tokens"),
        ({"max_tokens": None, "min_tokens": 62}, "min_tokens", "the answer can have at most 61 tokens"),
        ({"best_of": 9, **SEARCH}, "best_of", "best_of is 9"),
    ],
)
def test_sampling_that_cannot_be_served_is_refused_by_field(
    sampling: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        check_request(replace(REQUEST, sampling=SamplingParams(**sampling)), INFO)
    assert caught.value.param == param and param in caught.value.message


def test_a_model_without_a_last_hidden_state_refuses_embeddings_by_name() -> None:
    with pytest.raises(RequestRefused, match="computes no embeddings") as refusal:
        check_request(replace(REQUEST, pooling=Pooling(), **EMBEDDED), replace(INFO, can_embed=False))
    assert refusal.value.param == "model"


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "param", "words"),
    [
        (64, 1, "prompt", "max_model_len.* prompt has 64 tokens, which leave no room"),
        (65, None, "prompt", "max_model_len"),
        (60, 5, "max_tokens", "ask for at most 4"),
    ],
)
def test_prompt_and_answer_share_the_context(
    num_tokens: int, max_tokens: int | None, param: str, words: str
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(ContextTooLong, match=words) as caught:
        check_request(replace(REQUEST, prompt_token_ids=[1] * num_tokens, sampling=sampling), INFO)
    assert caught.value.param == param


def test_the_number_of_non_stop_tokens_bounds_beams_and_min_tokens() -> None:
    small = replace(INFO, vocab_size=12, eos_token_ids=(11,))
    stops = tuple(range(8))
    search = SamplingParams(temperature=0.0, use_beam_search=True, n=3, stop_token_ids=stops)
    check_request(replace(REQUEST, sampling=search), small)
    with pytest.raises(RequestRefused, match="only 3 of the 12 tokens are not stop tokens"):
        check_request(replace(REQUEST, sampling=replace(search, n=4)), small)
    check_request(replace(REQUEST, sampling=replace(search, n=4, ignore_eos=True)), small)
    with pytest.raises(RequestRefused, match="all 12 tokens are stop tokens"):
        all_stop = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(11)))
        check_request(replace(REQUEST, sampling=all_stop), small)


def test_a_priority_is_refused_where_requests_are_served_in_order_of_arrival() -> None:
    in_order = replace(INFO, scheduling="fcfs")
    check_request(REQUEST, in_order)
    with pytest.raises(RequestRefused, match=r"priority is -3, but .* order of arrival"):
        check_request(replace(REQUEST, priority=-3), in_order)
