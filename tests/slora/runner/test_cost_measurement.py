"""Costs that are measured at start are usable for decisions, and the measurement leaves no trace in the engine."""

import logging
import math
from dataclasses import astuple

import pytest

from slora.core.cost_model import StepWork
from slora.core.engine_config import EngineConfig
from slora.runner import cost_measurement
from slora.runner.cost_measurement import Timings
from slora.runner.runner import Runner
from slora.scheduler.step_plan import StepPlan
from tests.support.covering import soaked
from tests.support.cpu_kernels import CPU_KERNELS, KERNELS
from tests.support.model_kit import Kits, ModelKit

TIMINGS = Timings(
    one_row=0.010,
    rows=0.017,
    num_rows=8,
    long_rows=0.0578,
    context_tokens=511,
    prefill=0.265,
    prefill_tokens=256,
    page_copy_s=0.001,
    load_byte_s=1e-9,
)


def start_runner(kit: ModelKit, num_pages: int = 60, **settings: int | str | None) -> Runner:
    defaults = {"device": "cpu", "kernels": KERNELS, "dtype": "float32"}
    config = EngineConfig(
        kit.directory,
        **{**defaults, "pool_bytes": kit.pool_bytes(num_pages), **settings},  # type: ignore[arg-type]
    )
    return Runner(config, kit.spec)


@pytest.mark.parametrize("kernels", CPU_KERNELS)
@pytest.mark.parametrize("model", soaked(["llama", "gpt2", "mistral_window"], "gpt2"))
def test_every_cost_is_positive_and_finite_and_in_one_line_of_the_log(
    kits: Kits, caplog: pytest.LogCaptureFixture, model: str, kernels: str
) -> None:
    with caplog.at_level(logging.INFO, "slora.runner.cost_measurement"):
        costs = start_runner(kits(model), kernels=kernels).measure_costs()
    assert all(0 < value < math.inf for value in astuple(costs))
    assert costs.prefill_s(200) > costs.prefill_s(100) > 0
    assert 0 < costs.tokens(costs.load_s(1 << 20)) < math.inf
    (record,) = [record for record in caplog.records if record.name == "slora.runner.cost_measurement"]
    assert record.getMessage().startswith("measured: a step ") and "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_pages": 2, "max_model_len": 32},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_model_len": 1, "max_num_seqs": 2},
        {"swap_bytes": 0},
    ],
)
def test_the_smallest_of_settings_can_be_measured(kits: Kits, settings: dict[str, int]) -> None:
    assert all(
        0 < value < math.inf for value in astuple(start_runner(kits("llama"), **settings).measure_costs())
    )


def test_measurement_steps_respect_the_limits_and_leave_no_state(kits: Kits) -> None:
    plans: list[StepPlan] = []
    touched = 0
    runner = start_runner(kits("llama"), num_pages=60, max_num_seqs=4, max_num_batched_tokens=50)
    runner.memory.pages.zero_()

    def run(plan: StepPlan) -> None:
        nonlocal touched
        runner.run(plan)
        plans.append(plan)
        touched += int(runner.memory.pages.count_nonzero())

    # No time passes, so no smaller prefill counts as long enough.
    cost_measurement.measure_costs(run, runner.memory, 50, 4, runner.max_model_len, clock=lambda: 0.0)
    assert touched, "the steps computed nothing"
    assert max(plan.num_tokens for plan in plans) == 50
    assert max(len(plan.chunks) for plan in plans[1:]) == 4
    assert not runner.memory.pages.any()
    assert not any(table.any() for table in (runner.memory.tables.page_table, runner.memory.tables.groups))


def test_the_pages_are_cleared_even_if_a_measurement_step_fails(kits: Kits) -> None:
    runner = start_runner(kits("llama"))
    runner.memory.pages.fill_(0xFF)

    def break_down(plan: StepPlan) -> None:
        for chunk in plan.chunks:
            runner.memory.pages[chunk.sequence.blocks.held_pages] = 1
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        cost_measurement.measure_costs(break_down, runner.memory, 64, 8, 512)
    assert not (runner.memory.pages == 1).any()


def test_timings_are_solved_for_the_costs_that_they_consist_of() -> None:
    costs = TIMINGS.solve()
    assert costs.decode_s == pytest.approx(0.001)
    assert costs.step_s == pytest.approx(0.009)
    assert costs.token_s == pytest.approx(0.001)
    assert costs.context_token_s == pytest.approx(1e-5)
    assert costs.step_seconds(StepWork(0, 8, 8 * 510, 0, 0)) == pytest.approx(TIMINGS.long_rows)
    assert costs.step_seconds(StepWork(256, 0, 0, 0, 0)) == pytest.approx(TIMINGS.prefill)


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_differences_below_the_noise_count_as_the_minimum_cost(noise: float) -> None:
    """A GPU that waits for its host takes as long for one row as for a whole prefill. The measured difference is
    then noise."""
    costs = Timings(0.01, 0.01 - noise, 8, 0.01 - 2 * noise, 512, 0.01 - noise, 256, 0.0, 1e-9).solve()
    assert all(0 < value < math.inf for value in astuple(costs)[:-1])
    assert costs.decode_s == costs.context_token_s == costs.page_copy_s == 1e-9
    assert costs.token_s == pytest.approx(0.1 * 0.01 / 256, rel=0.01), (
        "a load would count as many more tokens"
    )


def test_with_one_row_per_step_the_whole_time_is_the_step_cost() -> None:
    costs = Timings(0.01, 0.01, 1, 0.01, 1, 0.02, 1, 0.001, 1e-9).solve()
    assert costs.step_s == pytest.approx(0.01) and costs.decode_s == 1e-9


def test_a_long_prefill_is_not_measured_if_a_short_one_suffices(kits: Kits) -> None:
    """On this machine, each token takes as long as a step."""
    runner = start_runner(kits("llama"))
    now, lengths = 0.0, []

    def run(plan: StepPlan) -> None:
        nonlocal now
        now += plan.num_tokens
        lengths.extend([plan.num_tokens] if plan.chunks else [])

    costs = cost_measurement.measure_costs(run, runner.memory, 512, 8, 512, clock=lambda: now)
    assert max(lengths) == 16
    assert len(lengths) == 4, "steps of a second and more were repeated"
    assert costs.decode_s == pytest.approx(1) and costs.token_s == pytest.approx(1)


def test_an_interrupted_copy_does_not_spoil_the_cost_of_copies(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a fault: beside busy programs, the measured cost of a page copy was a hundred times too high.

    No swap seemed to pay with that cost, so none was made and the cost was never corrected.
    """
    runner = start_runner(kits("llama"), kernels="torch", max_num_seqs=8, max_num_batched_tokens=512)
    now, num_swaps = 0.0, 0

    def swap_out(pairs: list[tuple[int, int]]) -> None:
        nonlocal now, num_swaps
        num_swaps += 1
        now += (1.0 if num_swaps < 5 else 0.001) * len(pairs)

    monkeypatch.setattr(runner.memory, "swap_out", swap_out)
    costs = cost_measurement.measure_costs(
        runner.run, runner.memory, 512, 8, runner.max_model_len, clock=lambda: now
    )
    assert costs.page_copy_s == pytest.approx(0.0005)
