"""Simulates how much traffic an engine serves, and how long requests wait under a load, in bounded time.

The production scheduler plans every step (`slora.simulation`), so a simulation takes longer with more tokens and steps.
The number of requests is chosen so that each simulation takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from slora.scheduler.step_plan import StepPlan
from slora.simulation.request_log import percentile
from slora.simulation.simulation import PoolMeter, Setup, Simulation
from slora.simulation.traces import Trace

__all__ = ["Capacity", "Latencies", "Progress", "choose_num_backlog", "choose_num_requests"]
__all__ += ["measure_capacity", "measure_latencies"]

# Receives the fraction of a simulation that is done, from 0 to 1.
Progress = Callable[[float], None]
# Simulating a step takes about as long as simulating this many answer tokens. Each token takes about 15 us.
_TOKENS_PER_STEP = 10
_MIN_REQUESTS, _MAX_REQUESTS = 60, 2000
_MAX_BACKLOG_PROMPT_TOKENS = 4_000_000
# The first quarter of a simulation is not measured, because the engine starts empty.
_WARM_UP = 0.25


@dataclass(frozen=True, slots=True)
class Capacity:
    """The throughput of an engine whose queue is never empty.

    running: mean number of running sequences. held_share: share of the pool that they and their adapters hold.
    adapter_share: share of the held bytes that belongs to adapters.
    """

    requests_per_s: float
    output_tokens_per_s: float
    running: float
    held_share: float
    adapter_share: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies that clients see under a load.

    seconds: simulated time. hit_share: of the admissions with an adapter, the share that found the adapter in the pool.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    running: float
    hit_share: float
    preemptions: int
    num_requests: int
    seconds: float


class _Ticker:
    """Reports the progress of a simulation whenever another 1% of its requests has ended."""

    def __init__(self, num_requests: int, progress: Progress) -> None:
        self._num_requests, self._progress, self._reported = num_requests, progress, 0.0

    def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
        done = min(1.0, _count_ended(simulation) / self._num_requests)
        if done >= self._reported + 0.01:
            self._reported = done
            self._progress(done)


def choose_num_backlog(concurrency: int, output_tokens: float, max_tokens: int) -> int:
    """Returns how many requests must end to measure a capacity. concurrency: number of requests that run at once."""
    return max(_MIN_REQUESTS, min(2 * concurrency, int(max_tokens / output_tokens)))


def choose_num_requests(rate: float, output_tokens: float, step_s: float, max_tokens: int) -> int:
    """Returns how many requests of a load to simulate. step_s: the shortest time of a step."""
    rows = max(1.0, rate * output_tokens * step_s)
    most = max_tokens * min(1.0, rows / _TOKENS_PER_STEP) / output_tokens
    return int(min(_MAX_REQUESTS, max(_MIN_REQUESTS, most)))


def measure_capacity(setup: Setup, trace: Trace, num_ended: int, progress: Progress) -> Capacity:
    """Measures the capacity: runs requests that all arrive at time 0, until `num_ended` of them have ended.

    The trace must have more than `num_ended` requests. The engine starts empty, so it computes more prompts than in a
    steady state. The time of these additional prompts is deducted.
    """
    meter = PoolMeter(only_backlog=False)
    simulation = Simulation(setup, [meter, _Ticker(num_ended, progress)])
    waiting_tokens = 0
    for request in trace:
        waiting_tokens += request.prompt_tokens
        if waiting_tokens > _MAX_BACKLOG_PROMPT_TOKENS and simulation.num_unfinished > num_ended:
            break
        simulation.submit(replace(request, arrival_s=0.0))
    while _count_ended(simulation) < num_ended:
        if not simulation.step():
            arrival = simulation.source.next_arrival
            if arrival is None:
                break
            simulation.source.now = max(simulation.now, arrival)
    prompt_tokens = sum(request.prompt_tokens for request in trace) / len(trace)
    output_tokens = sum(request.output_tokens for request in trace) / len(trace)
    totals, use = simulation.totals, meter.result()
    # The step that ends a prompt samples the first answer token, so it is not a decode token.
    answers = totals.decode_tokens / (output_tokens - 1) if output_tokens > 1 else _count_ended(simulation)
    excess_tokens = max(0.0, totals.prefill_tokens - answers * prompt_tokens)
    seconds = simulation.now - excess_tokens * setup.machine.costs.token_s
    requests_per_s = answers / seconds if seconds > 0 else 0.0
    return Capacity(
        requests_per_s,
        requests_per_s * output_tokens,
        use.running,
        use.held_share,
        use.adapter_share,
        _count_ended(simulation),
    )


def measure_latencies(setup: Setup, trace: Trace, progress: Progress) -> Latencies:
    meter = PoolMeter(only_backlog=False)
    simulation = Simulation(setup, [meter, _Ticker(len(trace), progress)])
    simulation.run(trace)
    measured_s = trace[0].arrival_s + _WARM_UP * (trace[-1].arrival_s - trace[0].arrival_s)
    outcomes = [one for one in simulation.outcomes.values() if one.request.arrival_s >= measured_s]
    ttfts = sorted(one.ttft_s for one in outcomes if one.ttft_s is not None)
    gaps = sorted(gap for one in outcomes for gap in one.gaps_s)
    return Latencies(
        percentile(ttfts, 50),
        percentile(ttfts, 99),
        percentile(gaps, 50),
        percentile(gaps, 99),
        meter.result().running,
        simulation.totals.hit_share,
        simulation.scheduler.num_preemptions,
        len(trace),
        simulation.now,
    )


def _count_ended(simulation: Simulation) -> int:
    return len(simulation.outcomes) - simulation.num_unfinished
