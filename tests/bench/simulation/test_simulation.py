"""The simulation serves a trace with the production scheduler, and says the same each time."""

import pytest

from bench.machines import A10G_7B, CPU_110M
from bench.simulation.next_tokens import NextTokens
from bench.simulation.simulation import Policies, PoolMeter, Setup, Simulation
from bench.simulation.traces import S2, TraceRequest, slora_trace
from bench.simulation.virtual_source import FetchCosts
from slora.core.cost_model import StepWork
from slora.scheduler.step_plan import StepPlan

SLOW_FETCH = FetchCosts(latency_s=0.05, bytes_per_s=200e6, num_lanes=2)


def request(
    arrival_s: float = 0.0, *, adapter: int | None = None, prompt: int = 32, output: int = 8, thread: int = 0
) -> TraceRequest:
    return TraceRequest(arrival_s, 0, adapter, prompt, output, thread)


def test_every_request_is_answered_in_full_and_two_runs_are_equal_in_every_number() -> None:
    trace = slora_trace(20, 2, 20)
    setup = Setup(A10G_7B, S2.ranks, fetch=SLOW_FETCH)
    runs = []
    for _ in range(2):
        meter = PoolMeter()
        simulation = Simulation(setup, [meter])
        results, outcomes = simulation.run(trace), simulation.outcomes.values()
        assert results.completed == len(trace)
        assert [o.num_tokens for o in outcomes] == [r.output_tokens for r in trace]
        simulation.scheduler.check_invariants()
        assert simulation.pool.num_held == simulation.source.num_pinned == 0
        times = [(o.first_token_s, o.end_s) for o in outcomes]
        runs.append((results, simulation.totals, meter.result(), times))
    assert runs[0] == runs[1]


def test_the_clock_advances_by_the_cost_of_each_step() -> None:
    costs = A10G_7B.costs
    simulation = Simulation(Setup(A10G_7B, S2.ranks))
    simulation.run([request(prompt=32, output=3)])
    prefill = costs.step_seconds(StepWork(32, 0, 0, 0, 0))
    decode = costs.step_seconds(StepWork(0, 1, 33, 0, 0)) + costs.step_seconds(StepWork(0, 1, 34, 0, 0))
    assert simulation.now == pytest.approx(prefill + decode)


def test_a_cold_adapter_delays_its_request_by_the_fetch() -> None:
    far = Setup(A10G_7B, (8,), fetch=FetchCosts(latency_s=1.0, bytes_per_s=16 * 2**20))
    waits = Simulation(far).run([request(adapter=0)]).ttft_mean_s
    at_once = Simulation(Setup(A10G_7B, (8,))).run([request(adapter=0)]).ttft_mean_s
    assert waits == pytest.approx(2.0 + at_once)  # rank 8 is 16 MiB: one second, and the latency


def test_fetches_wait_for_a_lane() -> None:
    """Two lanes, four adapters of a second each: the last two arrive after two seconds."""
    setup = Setup(A10G_7B, (8,), fetch=FetchCosts(bytes_per_s=16 * 2**20, num_lanes=2))
    simulation = Simulation(setup)
    simulation.run([request(adapter=i, thread=i) for i in range(4)])
    waits = [o.first_token_s for o in simulation.outcomes.values()]
    assert [int(w) for w in waits if w is not None] == [1, 1, 2, 2]


def test_a_chat_turn_reuses_the_cached_blocks_of_earlier_turns() -> None:
    turns = [
        TraceRequest(0.0, 0, 0, 320, 64, thread=1, shared_tokens=256),
        TraceRequest(30.0, 0, 0, 320 + 64 + 32, 16, thread=1, shared_tokens=256),
        TraceRequest(60.0, 0, 0, 320, 16, thread=2, shared_tokens=256),
        TraceRequest(90.0, 1, 1, 320, 16, thread=1, shared_tokens=256),
    ]
    simulation = Simulation(Setup(A10G_7B, (8,)))
    simulation.run(turns)
    # 383 tokens of the first turn were computed, 23 blocks; the other thread shares 16 blocks; another adapter none.
    assert simulation.scheduler.prefixes.num_hits == 23 * 16 + 256


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_sequences_are_swapped_or_recomputed_as_configured(preemption: str) -> None:
    setup = Setup(A10G_7B, (8,), swap_share=1.0, policies=Policies(preemption=preemption, prefix_cache="off"))
    simulation = Simulation(setup)
    trace = slora_trace(4, 4, 12)
    simulation.run(trace)
    assert simulation.scheduler.num_preemptions > 0
    prompts = sum(r.prompt_tokens for r in trace)
    if preemption == "swap":
        assert simulation.totals.swapped_pages > 0 and simulation.totals.prefill_tokens <= 1.02 * prompts
    else:
        assert simulation.totals.swapped_pages == 0 and simulation.totals.prefill_tokens > 1.02 * prompts


def test_a_request_that_cannot_meet_its_deadline_fails() -> None:
    simulation = Simulation(Setup(A10G_7B, (8,), max_num_seqs=1, deadline_s=2.0))
    results = simulation.run([request(prompt=32, output=200), request(0.1, prompt=32, thread=1)])
    assert results.completed == 1 and results.errors == {"DeadlineMissed": 1}
    late = simulation.outcomes["request-1"]
    assert late.first_token_s is None and late.end_s is not None and 1.9 < late.end_s < 2.2


def test_the_pool_is_shared_by_kv_and_adapters_almost_without_waste() -> None:
    meter = PoolMeter(5.0)
    Simulation(Setup(A10G_7B, S2.ranks), [meter]).run(slora_trace(200, 4, 10))
    use = meter.result()
    assert use.seconds > 5
    assert use.useful_share > 0.97
    assert use.held_share > 0.9
    assert 0.05 < use.adapter_share < 0.5


def test_choices_of_a_request_share_its_prompt() -> None:
    held: list[int] = []

    class Watch:
        def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
            held.append(simulation.pool.num_held)

    simulation = Simulation(Setup(CPU_110M, (8,), num_choices=4), [Watch()])
    simulation.run([request(prompt=160, output=8)])
    assert max(held) == 10 + 4
    (outcome,) = simulation.outcomes.values()
    assert outcome.num_tokens == 4 * 8


def test_a_search_is_the_production_one_and_its_beams_share_all_but_their_ends() -> None:
    """Beams that expect nothing in common soon have a common past; alike ones keep what once told them apart."""
    held: dict[str, list[int]] = {}
    for name, beams in (("alike", NextTokens(0)), ("independent", NextTokens(None))):

        class Watch:
            def observe(
                self, simulation: Simulation, plan: StepPlan, seconds: float, name: str = name
            ) -> None:
                assert all(chunk.sequence.search is not None for chunk in plan.chunks)
                held.setdefault(name, []).append(simulation.pool.num_held)

        setup = Setup(CPU_110M, (8,), num_choices=4, beams=beams, policies=Policies(prefix_cache="off"))
        simulation = Simulation(setup, [Watch()])
        assert simulation.run([request(prompt=160, output=160)]).completed == 1
        (outcome,) = simulation.outcomes.values()
        assert outcome.num_tokens == 4 * 160
        simulation.scheduler.check_invariants()
        assert simulation.pool.num_held == 0
    assert held["independent"][-1] < held["alike"][-1] < 10 + 4 * 10


@pytest.mark.parametrize(("memory_tokens", "agree"), [(0, 3), (2, 2), (None, 1)])
def test_beams_with_the_same_last_tokens_get_the_same_proposals(
    memory_tokens: int | None, agree: int
) -> None:
    """Of three, one ends as the first does, and one otherwise."""
    next_tokens = NextTokens(memory_tokens)
    answers = [[5, 6, 7], [1, 6, 7], [5, 6, 8]]
    proposals = [next_tokens.propose(0, answer, 4) for answer in answers]
    assert sum(one == proposals[0] for one in proposals) == agree
    assert next_tokens.propose(0, answers[0], 4) == proposals[0]
    assert next_tokens.propose(1, answers[0], 4) != proposals[0]
    assert next_tokens.propose(0, [6, 7], 4) != proposals[0]  # so that no text goes round in circles
