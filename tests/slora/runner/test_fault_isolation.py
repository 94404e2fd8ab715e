"""Bisection of a broken step: which chunks are still computed. The runner computes nothing."""

from collections.abc import Callable

import pytest

from slora.core.errors import DeviceFailed
from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from slora.memory.kv_cache import BlockTable
from slora.memory.tenant_account import TenantAccount
from slora.runner.fault_isolation import FaultIsolation, StepResult
from slora.runner.runner import PageTransferFailed
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan


def make_chunk(number: int, *, num_forks: int = 0, samples: bool = True) -> Chunk:
    request = EngineRequest(str(number), "t", [number], (), SamplingParams())
    sequence = Sequence(request, TenantAccount("t"), 1, frozenset(), 0, BlockTable(16))
    forks = tuple(sequence.fork(index) for index in range(1, num_forks + 1))
    return Chunk(sequence, 0, 1, samples=samples, slots=(), forks=forks)


def number_of(chunk: Chunk) -> int:
    return chunk.sequence.token_ids[0]


class Runner:
    """Samples each chunk's own number. `fails` receives the numbers of each run and returns the exception to raise,
    or None."""

    def __init__(self, fails: Callable[[list[int]], Exception | None]) -> None:
        self.runs: list[list[int]] = []
        self.plans: list[StepPlan] = []
        self.is_lost = False
        self._fails = fails

    def run(self, plan: StepPlan) -> list[SampledToken]:
        numbers = [number_of(chunk) for chunk in plan.chunks]
        self.runs.append(numbers)
        self.plans.append(plan)
        error = self._fails(numbers)
        if error is not None:
            raise error
        return [SampledToken(number_of(chunk)) for chunk in plan.chunks for _ in chunk.sampled_sequences]

    def probe(self) -> None:
        if self.is_lost:
            raise DeviceFailed("it is lost")


def breaking_on(*culprits: int) -> Runner:
    return Runner(lambda numbers: RuntimeError("x") if {*culprits} & {*numbers} else None)


def run(runner: Runner, plan: StepPlan, most_runs: int = 64) -> StepResult:
    try:
        return StepResult(runner.run(plan))
    except Exception as error:
        return FaultIsolation(runner, most_runs).recover(plan, error)


def isolate(runner: Runner, chunks: list[Chunk], most_runs: int = 64) -> StepResult:
    return run(runner, StepPlan(chunks=chunks), most_runs)


@pytest.mark.parametrize("culprits", [(0,), (255,), (100, 101), (3, 77, 200)])
def test_fault_isolation_finds_the_culprits_and_computes_all_others_in_order(
    culprits: tuple[int, ...],
) -> None:
    runner = breaking_on(*culprits)
    result = isolate(runner, [make_chunk(number) for number in range(256)])
    assert sorted(map(number_of, result.culprits)) == list(culprits) and not result.given_up
    assert result.sampled == [SampledToken(number) for number in range(256) if number not in culprits]
    assert len(runner.runs) <= 1 + 16 * len(culprits)


def test_forks_are_sampled_and_chunks_in_the_middle_of_a_prompt_are_not() -> None:
    chunks = [make_chunk(0, num_forks=2), make_chunk(1), make_chunk(2, samples=False), make_chunk(3)]
    result = isolate(breaking_on(1), chunks)
    assert result.sampled == [SampledToken(0)] * 3 + [SampledToken(3)]


def test_rows_of_the_sampling_table_are_written_again_and_pages_move_once() -> None:
    runner = breaking_on(1)
    chunk = make_chunk(0, num_forks=1)
    run(runner, StepPlan(chunks=[chunk, make_chunk(1)], copies=[(1, 2)]))
    again = next(plan for plan, run in zip(runner.plans, runner.runs, strict=True) if run == [0])
    assert again.rows_to_write == list(chunk.sampled_sequences)
    assert [plan.copies for plan in runner.plans] == [[(1, 2)], [], []]


def test_the_row_of_an_admitted_sequence_is_written_although_its_chunk_samples_no_token() -> None:
    """Born from a bug: a step failed before it wrote the rows of new sequences. A sequence in the middle of its prompt
    then sampled its first token with the parameters of an earlier sequence."""
    runner = breaking_on(1)
    chunk = make_chunk(0, samples=False)
    run(runner, StepPlan(chunks=[chunk, make_chunk(1)], rows_to_write=[chunk.sequence]))
    again = next(plan for plan, run in zip(runner.plans, runner.runs, strict=True) if run == [0])
    assert chunk.sequence in again.rows_to_write


def test_a_step_that_fails_only_once_fails_no_request() -> None:
    breaks = iter([RuntimeError("out of memory")])
    runner = Runner(lambda numbers: next(breaks, None))
    assert isolate(runner, [make_chunk(1)]) == StepResult([SampledToken(1)])


def test_the_number_of_isolation_runs_is_bounded() -> None:
    runner = breaking_on(*range(256))
    result = isolate(runner, [make_chunk(number) for number in range(256)])
    assert len(runner.runs) == 65
    assert len(result.culprits) + len(result.given_up) == 256 and len(result.given_up) > 200


def test_a_failed_page_transfer_is_not_retried() -> None:
    runner = Runner(lambda numbers: PageTransferFailed("x"))
    with pytest.raises(PageTransferFailed):
        isolate(runner, [make_chunk(0)])
    assert len(runner.runs) == 1
    with pytest.raises(PageTransferFailed):
        isolate(Runner(lambda numbers: RuntimeError("x")), [])
