"""Who is served how much, when there is not enough for all.

Service is counted as VTC counts it: 1 for a prompt token computed, 2 for a token generated, each once. A tenant's share
is of the service in a window in which everybody who is counted has requests waiting all the time.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from bench.machines import A10G_7B
from bench.simulation.request_log import Outcome, percentile
from bench.simulation.simulation import Policies, Setup, Simulation
from bench.simulation.traces import Trace, TraceRequest, merge, slora_trace
from bench.table import Row
from slora.scheduler.step_plan import StepPlan

RANKS = (8,)
# An A10G serves about 1.5 requests/s of S-LoRA's lengths: so each tenant alone is too much for it.
MUCH = 2.0


@dataclass(slots=True)
class ServiceMeter:
    """Service by tenant within [start_s, end_s) of the clock."""

    start_s: float
    end_s: float
    service: Counter[str] = field(default_factory=Counter)
    _seen: dict[str, int] = field(default_factory=dict)

    def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
        counts = self.start_s <= simulation.now < self.end_s
        for chunk in plan.chunks:
            request = chunk.sequence.request
            seen = self._seen.get(request.request_id, 0)
            end = min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt)
            self._seen[request.request_id] = max(seen, end)
            if counts:
                self.service[request.tenant] += max(0, end - seen) + 2 * len(chunk.sampled_sequences)


def fairness_rows(duration_s: float) -> list[Row]:
    """Fair scheduling, and first come first served beside it."""
    return [row for scheduling in ("fair", "fcfs") for row in share_rows(fair_setup(scheduling), duration_s)]


def share_rows(setup: Setup, duration_s: float) -> list[Row]:
    return [
        _row("two tenants, one sends 10 x", setup, ten_times(duration_s), (0.2 * duration_s, duration_s)),
        _row("one of them back from idle", setup, back_from_idle(duration_s), (0.5 * duration_s, duration_s)),
        _row("100 adapters against one", setup, many_adapters(duration_s), (0.2 * duration_s, duration_s)),
    ]


def ten_times(duration_s: float) -> Trace:
    return merge(_one(0, 1, MUCH, duration_s, seed=1), _one(1, 1, 10 * MUCH, duration_s, seed=2))


def back_from_idle(duration_s: float) -> Trace:
    """Tenant 1 was served a little, then sends nothing until half of the time is over."""
    early = _one(1, 1, 0.2, 0.1 * duration_s, seed=2)
    later = _one(1, 1, MUCH, 0.5 * duration_s, seed=3)
    back = [replace(request, arrival_s=request.arrival_s + 0.5 * duration_s) for request in later]
    return merge(_one(0, 1, MUCH, duration_s, seed=1), early, back)


def many_adapters(duration_s: float) -> Trace:
    return merge(_one(0, 100, MUCH, duration_s, seed=1), _one(1, 1, MUCH, duration_s, seed=2))


def fair_setup(scheduling: str) -> Setup:
    return Setup(A10G_7B, RANKS, num_tenants=2, policies=Policies(scheduling=scheduling))


def chats(duration_s: float) -> Trace:
    """Tenant 0 sends two short requests a second."""
    return [TraceRequest(number / 2, 0, 0, 60, 40, number) for number in range(round(2 * duration_s))]


def long_prompts(duration_s: float) -> Trace:
    """Tenant 1 sends four prompts of 2,000 tokens a second, more than the machine can compute, for short answers."""
    return [
        TraceRequest(number / 4, 1, 1, 2000, 4, 1 << 20 | number) for number in range(round(4 * duration_s))
    ]


def flood_rows(duration_s: float) -> list[Row]:
    """What the short requests of one tenant wait for while another one sends long prompts."""
    both = merge(chats(duration_s), long_prompts(duration_s))
    return [
        _flood_row("chats alone", fair_setup("fair"), chats(duration_s), duration_s),
        *(
            _flood_row(f"beside long prompts, {name}", fair_setup(name), both, duration_s)
            for name in ("fair", "fcfs")
        ),
    ]


def _flood_row(scene: str, setup: Setup, trace: Trace, duration_s: float) -> Row:
    simulation = Simulation(setup)
    simulation.run(trace, until_s=duration_s)
    answered = [one for one in simulation.outcomes.values() if one.request.tenant == 0 and one.is_complete]
    first = sorted(1e3 * (one.ttft_s or 0.0) for one in answered)
    between = sorted(1e3 * _between_s(one) for one in answered)
    return {
        "scene": scene,
        "chats answered": len(answered),
        "TTFT p50 ms": percentile(first, 50),
        "TTFT p99 ms": percentile(first, 99),
        "between tokens p50 ms": percentile(between, 50),
        "between tokens p99 ms": percentile(between, 99),
        "prompt tokens/s": simulation.totals.prefill_tokens / duration_s,
    }


def _between_s(outcome: Outcome) -> float:
    """The mean time between two tokens of an answer."""
    assert outcome.end_s is not None and outcome.first_token_s is not None
    return (outcome.end_s - outcome.first_token_s) / (outcome.num_tokens - 1)


def _one(tenant: int, num_adapters: int, rate: float, duration_s: float, seed: int) -> Trace:
    """One tenant's requests for adapters of its own: those whose index is its number modulo two."""
    trace = slora_trace(num_adapters, rate, duration_s, seed=seed)
    return [replace(r, tenant=tenant, adapter=2 * (r.adapter or 0) + tenant) for r in trace]


def _row(scene: str, setup: Setup, trace: Trace, window: tuple[float, float]) -> Row:
    meter = ServiceMeter(*window)
    Simulation(setup, [meter]).run(trace, until_s=window[1])
    total = meter.service.total()
    return {
        "scheduling": setup.policies.scheduling,
        "scene": scene,
        "tenant 0 %": 100 * meter.service["tenant-0"] / total,
        "tenant 1 %": 100 * meter.service["tenant-1"] / total,
        "service/s": total / (window[1] - window[0]),
    }
