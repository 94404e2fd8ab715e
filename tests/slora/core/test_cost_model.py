import math
from dataclasses import replace

import pytest

from slora.core.cost_model import CostModel, StepWork
from slora.core.errors import ConfigError

COSTS = CostModel(
    step_s=0.01, token_s=0.002, decode_s=0.001, context_token_s=1e-6, page_copy_s=0.004, load_byte_s=1e-8
)


def test_a_step_takes_the_sum_of_its_parts() -> None:
    assert COSTS.step_seconds(StepWork(0, 0, 0, 0, 0)) == pytest.approx(0.01)
    assert COSTS.step_seconds(StepWork(0, 4, 2000, 0, 0)) == pytest.approx(0.016)
    assert COSTS.step_seconds(StepWork(100, 4, 2000, 3, 10**6)) == pytest.approx(0.016 + 0.2 + 0.01 + 0.012)


def test_the_cost_of_a_swap_is_a_copy_out_and_a_copy_in() -> None:
    assert COSTS.swap_s(5) == pytest.approx(0.04)


def test_the_time_of_a_load_converts_to_prefill_tokens() -> None:
    assert COSTS.load_s(60 * 10**6) == pytest.approx(0.6)
    assert COSTS.tokens(COSTS.load_s(60 * 10**6)) == pytest.approx(300)
    assert COSTS.tokens(COSTS.prefill_s(17)) == pytest.approx(17)


@pytest.mark.parametrize(
    "field", ["step_s", "token_s", "decode_s", "context_token_s", "page_copy_s", "load_byte_s"]
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
