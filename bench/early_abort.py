"""Early abort under overload: who can't have its first token in time any more is given up, so that others can.

S-LoRA's S2 on an A10G at twice what it serves (about 1.4 requests/s); every request allows six seconds for its first
token. "true lengths" tells the engine how long each answer will be, as S-LoRA's bench does; otherwise every request
allows 512 tokens and its end is a surprise. Attainment: requests whose first token came in time, of all.
"""

from bench.machines import A10G_7B
from bench.simulation.request_log import SLO_S
from bench.simulation.simulation import Policies, Setup, Simulation
from bench.simulation.traces import S2, Trace, slora_trace
from bench.table import Row

TWICE = 2.8
MAX_TOKENS = 512


def abort_rows(duration_s: float, rate: float = TWICE) -> list[Row]:
    trace = slora_trace(200, rate, duration_s)
    rows = []
    for scheduling in ("fcfs", "fair"):
        for deadline_s in (None, SLO_S):
            for max_tokens in (MAX_TOKENS, None):
                rows.append(abort_row(trace, scheduling, deadline_s, max_tokens))
    return rows


def abort_row(trace: Trace, scheduling: str, deadline_s: float | None, max_tokens: int | None) -> Row:
    setup = Setup(
        A10G_7B,
        S2.ranks,
        max_tokens=max_tokens,
        deadline_s=deadline_s,
        policies=Policies(scheduling=scheduling),
    )
    results = Simulation(setup).run(trace)
    return {
        "scheduling": scheduling,
        "early abort": "no" if deadline_s is None else f"{deadline_s:g} s",
        "lengths": "true" if max_tokens is None else "unknown",
        "attainment": results.attainment,
        "served": results.completed,
        "given up": results.requests - results.completed,
        "served/s": results.requests_per_s,
        "p50 first token s": results.ttft_p50_s,
        "p99 first token s": results.ttft_p99_s,
        "mean latency s": results.latency_mean_s,
    }
