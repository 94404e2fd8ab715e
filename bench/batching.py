"""The same requests under static, dynamic and continuous batching.

The engine is the same; a gate before it holds requests back (bench/gates.py). Batches of the two older kinds are of the
size with which the machine serves most, of those tried: chosen in hindsight, like the window.
"""

from collections.abc import Sequence

from bench.gates import DynamicGate, StaticGate
from bench.machines import A10G_7B
from bench.simulation.simulation import Gate, Setup, Simulation
from bench.simulation.traces import S2, Trace, slora_trace
from bench.table import Row

SIZES = (8, 16, 32)
WINDOWS_S = (0.5, 2.0, 8.0)
RATES = (0.5, 1.0, 2.0)


def batching_rows(duration_s: float, rates: tuple[float, ...] = RATES) -> list[Row]:
    """S2 on an A10G at rates below, near and above what it can serve."""
    rows = []
    for rate in rates:
        trace = slora_trace(200, rate, duration_s)
        static = _best(trace, [("static", f"{n}", StaticGate(n)) for n in SIZES])
        gates = [("dynamic", f"{n} or {w:g} s", DynamicGate(n, w)) for n in SIZES for w in WINDOWS_S]
        rows += [
            {"requests/s": rate, **row}
            for row in (static, _best(trace, gates), _row(trace, "continuous", "", None))
        ]
    return rows


def _best(trace: Trace, gates: Sequence[tuple[str, str, Gate]]) -> Row:
    """The shortest mean latency of all."""
    return min((_row(trace, *gate) for gate in gates), key=lambda row: float(row["mean latency s"]))


def _row(trace: Trace, batching: str, bounds: str, gate: Gate | None) -> Row:
    results = Simulation(Setup(A10G_7B, S2.ranks)).run(trace, gate)
    return {
        "batching": batching,
        "batch": bounds,
        "served/s": results.requests_per_s,
        "output tokens/s": results.output_tokens_per_s,
        "mean latency s": results.latency_mean_s,
        "p99 latency s": results.latency_p99_s,
        "p50 first token s": results.ttft_p50_s,
    }
