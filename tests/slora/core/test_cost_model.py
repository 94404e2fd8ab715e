import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.cost_model import CostModel, StepWork
from slora.core.engine_config import KVFootprint
from slora.core.errors import ConfigError

COSTS = CostModel(
    step_s=0.01, token_s=0.002, decode_s=0.001, context_token_s=1e-6, page_copy_s=0.004, load_byte_s=1e-8
)


def test_a_step_takes_the_sum_of_its_parts() -> None:
    assert COSTS.step_seconds(StepWork(0, 0, 0, 0, 0)) == pytest.approx(0.01)
    assert COSTS.step_seconds(StepWork(0, 4, 2000, 0, 0)) == pytest.approx(0.016)
    assert COSTS.step_seconds(StepWork(100, 4, 2000, 3, 10**6)) == pytest.approx(0.016 + 0.2 + 0.01 + 0.012)


def test_a_token_of_a_prompt_takes_longer_the_more_tokens_are_before_it() -> None:
    costs = replace(COSTS, token_s=0.001, prefill_context_s=1e-6)
    assert costs.prefill_s(3, start=100) == pytest.approx(0.003 + (100 + 101 + 102) * 1e-6)
    assert costs.fit_tokens(0.1, 0) == pytest.approx(95.5, abs=0.1)
    assert costs.fit_tokens(0.1, 5000) == pytest.approx(16.6, abs=0.1)
    for start in (0, 7, 5000):
        assert costs.fit_tokens(costs.prefill_s(30, start), start) == pytest.approx(30)
    assert costs.fit_tokens(0.0, 5000) == 0
    assert costs.step_seconds(StepWork(3, 0, 0, 0, 0, 303)) == pytest.approx(0.01 + costs.prefill_s(3, 100))


def test_the_cost_of_a_swap_is_a_copy_out_and_a_copy_in() -> None:
    assert COSTS.swap_s(5) == pytest.approx(0.04)


def test_the_time_of_a_load_converts_to_prefill_tokens() -> None:
    assert COSTS.load_s(60 * 10**6) == pytest.approx(0.6)
    assert COSTS.tokens(COSTS.load_s(60 * 10**6)) == pytest.approx(300)
    assert COSTS.tokens(COSTS.prefill_s(17)) == pytest.approx(17)


@pytest.mark.parametrize(
    "field",
    ["step_s", "token_s", "decode_s", "context_token_s", "page_copy_s", "load_byte_s", "prefill_context_s"],
)
@pytest.mark.parametrize("value", [-0.5, math.inf, math.nan])
def test_a_cost_that_is_negative_or_not_finite_is_refused(field: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=f"{field} is {value!r}; it must be a finite number of seconds from 0"
    ):
        replace(COSTS, **{field: value})


def test_tokens_that_cost_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_s is 0; it must be above 0"):
        replace(COSTS, token_s=0.0)


def blocks_in_sight(footprint: KVFootprint, start: int, num_tokens: int) -> int:
    """A brute-force count of the blocks that tokens [start, start + num_tokens) write to or attend to."""
    first = footprint.first_token_seen(start)
    return len({token // footprint.block_tokens for token in range(first, start + num_tokens)})


sizes = st.integers(1, 40)


@given(st.sampled_from([1, 2, 4, 16]), st.none() | sizes, st.integers(1, 90), sizes)
def test_the_footprint_is_the_most_blocks_that_any_chunk_has_in_sight(
    block_tokens: int, window: int | None, num_tokens: int, chunk_tokens: int
) -> None:
    footprint = KVFootprint(block_tokens, window)
    chunks = [(at, min(chunk_tokens, num_tokens - at)) for at in range(num_tokens)]
    most = max(blocks_in_sight(footprint, *chunk) for chunk in chunks)
    assert most <= footprint.pages(num_tokens, chunk_tokens)
    enough = num_tokens >= (window or 0) + chunk_tokens + 2 * block_tokens
    if enough or window is None:
        assert most == footprint.pages(num_tokens, chunk_tokens)


@given(st.sampled_from([1, 2, 4, 16]), st.none() | sizes, st.integers(1, 90), sizes)
def test_a_chunk_is_as_long_as_the_pages_allow_and_no_longer(
    block_tokens: int, window: int | None, num_tokens: int, num_pages: int
) -> None:
    footprint = KVFootprint(block_tokens, window)
    most = footprint.chunk_tokens(num_tokens, num_pages)
    if most < 1:
        assert footprint.pages(num_tokens, 1) > num_pages
        return
    assert footprint.pages(num_tokens, min(most, num_tokens)) <= num_pages
    if most < num_tokens:
        assert footprint.pages(num_tokens, most + 1) > num_pages
