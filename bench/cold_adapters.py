"""What those who decode notice of adapters that come from far away.

A few requests decode for the whole time, on adapters that are in the pool. Every 100 ms another request comes for an
adapter that nobody has asked for before; it is fetched at 20 MB/s, five fetches at a time. Told is the time between
two tokens of those who decode: alone, beside the others, and beside as many for the bare base, which have no adapter
to bring but are computed just the same.
"""

from dataclasses import dataclass, field

from bench.machines import A10G_7B, CPU_110M
from bench.simulation.machine import Machine
from bench.simulation.request_log import percentile
from bench.simulation.simulation import Setup, Simulation
from bench.simulation.traces import S2, Trace, TraceRequest, merge
from bench.simulation.virtual_source import FetchCosts
from bench.table import Row
from slora.scheduler.step_plan import StepPlan

FAR = FetchCosts(bytes_per_s=20e6, num_lanes=5)
COLD_EVERY_S = 0.1
NUM_DECODING = 12
NUM_WARM = 4
# Until then the prompts are computed and the warm adapters have come.
WARM_UP_S = 10.0


@dataclass(slots=True)
class TokenGaps:
    """Seconds between two tokens of those requests that use warm adapters, after the warm-up."""

    gaps: list[float] = field(default_factory=list)
    _last_s: dict[str, float] = field(default_factory=dict)

    def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
        now = simulation.now + seconds
        for chunk in plan.chunks:
            request_id = chunk.sequence.request.request_id
            if chunk.sampled_sequences and simulation.outcomes[request_id].request.tenant < NUM_WARM:
                last_s = self._last_s.get(request_id)
                if last_s is not None and now > WARM_UP_S:
                    self.gaps.append(now - last_s)
                self._last_s[request_id] = now


def decoding_trace(output_tokens: int) -> Trace:
    """All of them are there from the start."""
    return [TraceRequest(0.0, i % NUM_WARM, i % NUM_WARM, 64, output_tokens, i) for i in range(NUM_DECODING)]


def others_trace(seconds: float, *, adapted: bool) -> Trace:
    """Short requests, each of a tenant of its own, for an adapter of its own or the base."""
    numbers = range(NUM_WARM, NUM_WARM + int(seconds / COLD_EVERY_S))
    return [TraceRequest(COLD_EVERY_S * (i - NUM_WARM), i, i if adapted else None, 8, 4, i) for i in numbers]


def cold_rows(output_tokens: int) -> list[Row]:
    return [cold_row(machine, output_tokens) for machine in (A10G_7B, CPU_110M)]


def cold_row(machine: Machine, output_tokens: int) -> Row:
    decoding = decoding_trace(output_tokens)
    seconds, alone = _replay(machine, decoding)
    _, beside_cold = _replay(machine, merge(decoding, others_trace(seconds, adapted=True)))
    _, beside_base = _replay(machine, merge(decoding, others_trace(seconds, adapted=False)))
    p50s, p99s = (
        [1e3 * percentile(gaps, percent) for gaps in (alone, beside_cold, beside_base)]
        for percent in (50, 99)
    )
    return {
        "machine": machine.name,
        "decoding": NUM_DECODING,
        "alone p50 ms": p50s[0],
        "p99 ms": p99s[0],
        "beside cold p50 ms": p50s[1],
        "cold p99 ms": p99s[1],
        "over alone": p99s[1] / p99s[0],
        "beside base p99 ms": p99s[2],
    }


def _replay(machine: Machine, trace: Trace) -> tuple[float, list[float]]:
    """How long it took, and the gaps between tokens in order of size."""
    meter = TokenGaps()
    results = Simulation(Setup(machine, S2.ranks, fetch=FAR), [meter]).run(trace)
    return results.duration_s, sorted(meter.gaps)
