"""Costs learned from steps on simulated machines, with different initial costs and disturbances."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields, replace

import pytest

from slora.core.cost_model import CostModel, StepTimes, StepWork, count_pairs
from slora.runner.learned_costs import CostBounds, LearnedCosts, bound_costs
from slora_kernels.layout import LinearShape, ModelShape
from tests.support.covering import soaked

TRUTH = CostModel(
    step_s=0.004, token_s=3e-4, decode_s=8e-4, context_token_s=1e-6, page_copy_s=4e-6, load_byte_s=3e-10,
    prefill_context_s=2e-7,
)  # fmt: skip
# Costs that were measured at start beside a busy program.
SPOILT = replace(TRUTH, step_s=0.069, decode_s=1e-9, token_s=2e-5)
PAGE_BYTES = 16 * 1024


def tiny_shape() -> ModelShape:
    return ModelShape(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        hidden_size=64,
        vocab_size=96,
        element_bytes=4,
        linears=tuple(LinearShape(f"l{n}", 64, 128) for n in range(4)),
        groups=((0, 1, 2), (3,)),
    )


BOUNDS = bound_costs(tiny_shape(), PAGE_BYTES, 16, on_gpu=False)


def serve(seed: int, most_rows: int = 32) -> Iterator[StepWork]:
    """Steps like an engine's: decode rows come and go slowly, and some steps have prefill chunks, loads or swaps."""
    rng = random.Random(seed)
    rows = 0
    while True:
        rows = max(0, min(most_rows, rows + rng.choice([-1, 0, 0, 1])))
        prefill = rng.choice([0] * 9 + [16, 64, 512])
        if not rows and not prefill:
            prefill = 32
        swapped = rng.choice([0] * 29 + [20])
        loaded = rng.choice([0] * 19 + [10**6])
        prefill_context = count_pairs(prefill, rng.randint(0, 4000))
        yield StepWork(prefill, rows, rows * rng.randint(50, 400), swapped, loaded, prefill_context)


def time_step(truth: CostModel, work: StepWork, disturb: Callable[[], float]) -> StepTimes:
    """disturb: returns the factor by which a part of the step is slowed down."""
    computed = work._replace(swapped_pages=0, loaded_bytes=0)
    swap_s, load_s = work.swapped_pages * truth.page_copy_s, work.loaded_bytes * truth.load_byte_s
    return StepTimes(truth.step_seconds(computed) * disturb(), swap_s * disturb(), load_s * disturb())


def learn(
    learned: LearnedCosts, truth: CostModel, works: Iterator[StepWork], until_s: float, noise: float
) -> None:
    """Runs steps one after the other until the clock reaches `until_s`. noise: share of timings that are ten times
    too long."""
    rng = random.Random(0)
    now = 0.0
    while now < until_s:
        work = next(works)
        times = time_step(truth, work, lambda: rng.uniform(0.9, 1.2) * (10 if rng.random() < noise else 1))
        now += sum(times)
        learned.count(work, times, now)


def assert_near(costs: CostModel, truth: CostModel, factor: float) -> None:
    for field in fields(CostModel):
        ratio = getattr(costs, field.name) / getattr(truth, field.name)
        assert 1 / factor < ratio < factor, f"{field.name} is {ratio:.2f} times what it is in truth"


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", soaked(range(5), 0, 3))
def test_wrong_initial_costs_are_corrected_within_a_minute(seed: int, noise: float) -> None:
    """Born from a fault: costs were measured once, beside a busy program. A step then cost 69 ms and a row 1e-6 ms
    until a restart."""
    learned = LearnedCosts(SPOILT, BOUNDS)
    learn(learned, TRUTH, serve(seed), 60.0, noise)
    assert_near(learned.current, TRUTH, 1.7)


def test_the_time_of_a_step_is_predicted_before_its_parts_are_known() -> None:
    """Every step is the same, so the cost of the step cannot be told from the cost of its rows. Their sum is still
    predicted."""
    learned = LearnedCosts(SPOILT, BOUNDS)
    work = StepWork(0, 16, 16 * 200, 0, 0)
    learn(learned, TRUTH, iter(lambda: work, None), 3.0, 0.0)
    assert learned.current.step_seconds(work) == pytest.approx(TRUTH.step_seconds(work), rel=0.15)


def test_costs_follow_a_slower_machine_within_a_minute() -> None:
    learned = LearnedCosts(TRUTH, BOUNDS)
    slower = CostModel(*(4 * value for value in astuple(TRUTH)))
    works = serve(1)
    learn(learned, slower, works, 60.0, 0.05)
    work = StepWork(64, 8, 8 * 100, 0, 0)
    assert learned.current.step_seconds(work) == pytest.approx(slower.step_seconds(work), rel=0.3)


def test_long_prompts_beside_a_single_row_do_not_change_the_cost_of_that_row() -> None:
    """Born from a fault: the attention of long prompts had no cost of its own, so it counted as that of the row, which
    became 30 times as high. A step then seemed to cost nothing."""
    learned = LearnedCosts(replace(TRUTH, prefill_context_s=5e-8), BOUNDS)

    def serve_prompts() -> Iterator[StepWork]:
        rng = random.Random(0)
        for number in itertools.count():
            start, own = 40 * number % 7000, 0 if number % 9 else 40
            count = rng.randint(20, 60)
            pairs = count_pairs(count, start) + count_pairs(own, 0)
            yield StepWork(count + own, int(not own), 0 if own else 44, 0, 0, pairs)

    learn(learned, TRUTH, serve_prompts(), 45.0, 0.0)
    for name in ("step_s", "token_s", "prefill_context_s"):
        assert 0.6 < getattr(learned.current, name) / getattr(TRUTH, name) < 1.6, name
    assert learned.current.row_s(44) < 3 * TRUTH.row_s(44)


def test_costs_that_no_step_exercises_are_not_changed() -> None:
    learned = LearnedCosts(TRUTH, BOUNDS)
    works = (work._replace(swapped_pages=0, loaded_bytes=0) for work in serve(2))
    learn(learned, TRUTH, works, 30.0, 0.1)
    assert learned.current.page_copy_s == TRUTH.page_copy_s
    assert learned.current.load_byte_s == TRUTH.load_byte_s


def test_learned_costs_follow_the_median_of_noisy_timings() -> None:
    """Born from a fault: fitted by least squares, the costs followed the fastest steps, and prefill appeared to be
    free."""
    rng = random.Random(7)
    learned, now = LearnedCosts(SPOILT, BOUNDS), 0.0
    for work in serve(6):
        times = time_step(TRUTH, work, lambda: math.exp(rng.gauss(0.0, 1.0)))
        now += sum(times)
        learned.count(work, times, now)
        if now > 60:
            break
    assert_near(replace(learned.current, context_token_s=TRUTH.context_token_s), TRUTH, 3.0)


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e6])
def test_learned_costs_stay_within_the_bounds(seconds: float) -> None:
    learned = LearnedCosts(TRUTH, BOUNDS)
    for number, work in zip(range(200), serve(3), strict=False):
        learned.count(work, StepTimes(seconds, seconds, seconds), float(number))
        for low, value, high in zip(
            *map(astuple, (BOUNDS.lower, learned.current, BOUNDS.upper)), strict=True
        ):
            assert 0 < low <= value <= high


def test_learning_is_deterministic() -> None:
    first, second = LearnedCosts(SPOILT, BOUNDS), LearnedCosts(SPOILT, BOUNDS)
    for learned in (first, second):
        learn(learned, TRUTH, serve(4), 10.0, 0.1)
    assert first.current == second.current


def test_the_number_of_kept_timings_is_bounded() -> None:
    learned = LearnedCosts(TRUTH, BOUNDS)
    for number in range(2000):
        learned.count(StepWork(1 << number % 50, 1 << number % 7, number, 0, 0), StepTimes(0.01), 0.0)
    assert learned.num_timings <= 64 * 16


def test_initial_costs_are_clamped_to_the_bounds() -> None:
    learned = LearnedCosts(replace(TRUTH, decode_s=0.0, step_s=1e9), BOUNDS)
    costs = learned.current
    assert costs.decode_s == TRUTH.token_s and costs.step_s == BOUNDS.upper.step_s


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_bounds_contain_the_costs_of_real_machines(on_gpu: bool) -> None:
    """Covers an 8B model in 16 bits: on 64 cores with matrix units, on a fast GPU, and on two busy cores."""
    linears = tuple(LinearShape(f"l{n}", 4096, 13312) for n in range(4))
    shape = ModelShape(32, 32, 8, 128, 4096, 128256, 2, linears, ((0, 1, 2), (3,)))
    bounds: CostBounds = bound_costs(shape, 2 << 20, 16, on_gpu=on_gpu)
    fast = (
        CostModel(0.007, 2e-5, 1e-4, 1e-7, 4e-5, 4e-11, 1e-9)
        if on_gpu
        else CostModel(0.1, 0.002, 0.01, 1e-6, 5e-5, 1e-10, 1e-7)
    )
    slow = CostModel(10.0, 0.5, 0.5, 1e-4, 0.01, 5e-9, 1e-4)
    if not on_gpu:
        # This machine may have one core only.
        scaled = {
            name: getattr(bounds.lower, name) / 64 for name in ("token_s", "decode_s", "prefill_context_s")
        }
        bounds = replace(bounds, lower=replace(bounds.lower, **scaled))
    assert bounds.clamp(fast) == fast and bounds.clamp(slow) == slow
