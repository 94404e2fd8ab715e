"""A simulated fleet: 100 adapters per replica, Zipf popularity that shifts, a day's swing of the load, a viral adapter
and a lost rack, under several routing policies.

    python -m bench.fleet [--parts calibration policies hour sizes] [--replicas 1000] [--write FILE]

calibration: 4 replica models against 4 production schedulers on the same trace and router. policies: all policies on
300 s of traffic. hour: slora's router on an hour of traffic. sizes: the first token by load, for the rule when to add a
GPU. A day's swing, six shifts of popularity, the viral adapter (5% of the requests in the third sixth) and the loss of
4% of the replicas (at half time) are scaled to the length of the traffic.

The fluid bound serves all replicas' work as one queue without cold loads. See `bound_goodput`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from bench.fleet_policies import (
    Multiplexing,
    PlainAffinity,
    PowerOfTwo,
    RandomChoice,
    ScoredAffinity,
    choose_chameleon_victim,
)
from bench.machines import A10G_7B
from bench.simulation.fleet.fleet import Fleet, FleetResults, Loss, RouterPolicy, RoutingPolicy
from bench.simulation.fleet.model_adapters import AdapterSettings
from bench.simulation.fleet.replica_model import ReplicaSettings
from bench.simulation.fleet.traffic import Demand, Traffic, make_traffic, read_trace_arrays
from bench.simulation.request_log import SLO_S
from bench.simulation.routed_engines import RoutedEngines
from bench.simulation.simulation import Policies, Setup
from bench.simulation.traces import S2, zipf_trace
from bench.simulation.virtual_source import FetchCosts
from bench.table import Row, print_table, write_json
from slora.client.router import Router
from slora_adapters.process.progress_bar import track_progress

REMOTE = FetchCosts(latency_s=0.02, bytes_per_s=200e6, num_lanes=5)
ADAPTERS = AdapterSettings(S2.ranks, REMOTE)
SETTINGS = ReplicaSettings(A10G_7B, ADAPTERS)
ONE_LANE = replace(SETTINGS, adapters=replace(ADAPTERS, fetch=replace(REMOTE, num_lanes=1)))
CHAMELEON = replace(SETTINGS, adapters=replace(ADAPTERS, choose_victim=choose_chameleon_victim))
TOKEN_S = 1.5e-3
RATE, SWING = 0.75, 0.3  # Requests per second and replica, and the swing of a day around them.

POLICIES: dict[str, tuple[Callable[[], RoutingPolicy], ReplicaSettings]] = {
    "random": (lambda: RandomChoice(TOKEN_S), SETTINGS),
    "power of two": (lambda: PowerOfTwo(TOKEN_S), SETTINGS),
    "power of two, Chameleon's cache": (lambda: PowerOfTwo(TOKEN_S), CHAMELEON),
    "affinity without bound": (lambda: PlainAffinity(TOKEN_S), SETTINGS),
    "llm-d's scorers": (lambda: ScoredAffinity(TOKEN_S), SETTINGS),
    "Ray's multiplexing": (lambda: Multiplexing(TOKEN_S), ONE_LANE),
    "slora": (lambda: RouterPolicy(Router(token_s=TOKEN_S)), SETTINGS),
}


def make_demand(num_replicas: int, seconds: float, rate: float = RATE) -> Demand:
    viral = (seconds / 3, seconds / 2, 0.05)
    return Demand(100 * num_replicas, rate * num_replicas, seconds, 1.0, SWING, seconds / 6, viral)


def count_bound_rows(traffic: Traffic) -> tuple[float, float]:
    """Returns how many requests fill the pool with KV, and the mean context over their steps.

    Long answers count by their length, because they run for more steps.
    """
    prompts, outputs = traffic.prompt_tokens.astype(float), traffic.output_tokens.astype(float)
    context = float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
    return A10G_7B.pool_tokens / context, context


def bound_capacity(traffic: Traffic) -> float:
    """Returns the most tokens per second of one replica: its pool is full of KV, no adapter takes a page, and no
    request is preempted.
    """
    costs = A10G_7B.costs
    rows, context = count_bound_rows(traffic)
    step_s = costs.step_s + rows * (costs.decode_s + context * costs.context_token_s)
    request_s = (
        float(traffic.prompt_tokens.mean()) * costs.token_s
        + float(traffic.output_tokens.mean()) * step_s / rows
    )
    return float(traffic.total_tokens.mean()) / request_s


def bound_goodput(traffic: Traffic, num_replicas: int, loss: Loss | None) -> float:
    """Returns the tokens per second of one queue with the capacity of all replicas.

    The queue takes as much work as it serves within the SLO, and the work of the requests that run or are swapped out:
    their first token has come. They count with all their tokens. Further work is not served.
    """
    duration, capacity = float(traffic.arrival_s[-1]), bound_capacity(traffic)
    totals = traffic.total_tokens.astype(float)
    started = (
        (1 + SETTINGS.swap_share) * count_bound_rows(traffic)[0] * float((totals**2).sum() / totals.sum())
    )
    offered = np.bincount(traffic.arrival_s.astype(int), totals)
    served = backlog = 0.0
    for second, tokens in enumerate(offered.tolist()):
        lost = loss.count if loss is not None and second >= loss.at_s else 0
        present = num_replicas - lost
        backlog = min(backlog + tokens, present * (capacity * SLO_S + started))
        done = min(backlog, capacity * present)
        served, backlog = served + done, backlog - done
    return (served + backlog) / duration


def run_fleet(name: str, num_replicas: int, traffic: Traffic, loss: Loss | None) -> Row:
    make_policy, settings = POLICIES[name]
    fleet = Fleet(settings, num_replicas, [make_policy()], traffic, token_s=TOKEN_S, loss=loss)
    start = time.process_time()
    results = fleet.run()
    cpu_s = time.process_time() - start
    bound = bound_goodput(traffic, num_replicas, loss)
    return {"policy": name, "replicas": num_replicas, **describe(results, bound), "CPU s": cpu_s}


def describe(results: FleetResults, bound: float) -> Row:
    return {
        "requests": results.requests,
        "of the bound %": 100 * results.goodput_tokens_per_s / bound,
        "in 6 s %": 100 * results.attainment,
        "first token s": results.ttft_mean_s,
        "first p50": results.ttft_p50_s,
        "first p99": results.ttft_p99_s,
        "latency s": results.latency_mean_s,
        "warm %": 100 * results.warm_share,
        "loads": results.loads,
        "loads per adapter": results.loads / results.distinct_adapters,
        "preempted": results.preemptions,
        "pool use %": 100 * results.pool_use,
    }


def calibration_rows(
    rates: tuple[float, ...] = (0.8, 1.0, 1.1, 1.2), seeds: int = 4, seconds: float = 400.0
) -> list[Row]:
    """Means over the seeds, and the greatest error of a seed."""
    rows: list[Row] = []
    for rate in track_progress("Rates", rates, "rate"):
        runs = [calibrate(rate, seconds, seed) for seed in range(seeds)]
        for name in runs[0]:
            first, second = (fmean(run[name][i] for run in runs) for i in (0, 1))
            worst = max((run[name][1] / run[name][0] - 1 for run in runs), key=abs)
            row = {"rate per replica": rate, "seeds": seeds, "of": name, "scheduler": first, "model": second}
            rows.append({**row, "error %": 100 * (second / first - 1), "worst %": 100 * worst})
    return rows


def calibrate(rate: float, seconds: float, seed: int) -> dict[str, tuple[float, float]]:
    """Returns statistics of four production schedulers and of four models on the same trace."""
    num_tenants = 20
    trace = zipf_trace(200, 4 * rate, seconds, alpha=1.0, num_tenants=num_tenants, seed=seed)
    policies = Policies(prefix_cache="off")
    setup = Setup(
        A10G_7B, S2.ranks, num_tenants=num_tenants, fetch=REMOTE, max_tokens=2048, policies=policies
    )
    engines = RoutedEngines(setup, 4, Router(token_s=TOKEN_S), TOKEN_S)
    exact = engines.run(trace)
    in_time = [one.request for one in engines.outcomes() if one.ttft_s is not None and one.ttft_s < SLO_S]
    tokens = sum(request.prompt_tokens + request.output_tokens for request in in_time)
    settings = replace(SETTINGS, num_tenants=num_tenants)
    routers = [RouterPolicy(Router(token_s=TOKEN_S))]
    traffic = read_trace_arrays(trace)
    model = Fleet(settings, 4, routers, traffic, token_s=TOKEN_S, report_s=0.0).run()
    return {
        "goodput tokens/s": (tokens / trace[-1].arrival_s, model.goodput_tokens_per_s),
        "first token s": (exact.ttft_mean_s, model.ttft_mean_s),
        "first p50": (exact.ttft_p50_s, model.ttft_p50_s),
        "first p99": (exact.ttft_p99_s, model.ttft_p99_s),
        "latency s": (exact.latency_mean_s, model.latency_mean_s),
        "loads": (engines.num_loads, model.loads),
    }


def make_scene(num_replicas: int, seconds: float) -> tuple[Traffic, Loss]:
    return make_traffic(make_demand(num_replicas, seconds)), Loss(seconds / 2, 0, num_replicas // 25)


def policy_rows(num_replicas: int, seconds: float) -> list[Row]:
    traffic, loss = make_scene(num_replicas, seconds)
    return [run_fleet(name, num_replicas, traffic, loss) for name in POLICIES]


def size_rows(num_replicas: int, seconds: float = 300.0) -> list[Row]:
    """The same without events: only the mean load differs."""
    rows: list[Row] = []
    for rate in track_progress("Rates", (0.5, 0.7, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2), "rate"):
        traffic = make_traffic(Demand(100 * num_replicas, rate * num_replicas, seconds))
        load = float(traffic.total_tokens.sum()) / seconds / num_replicas / bound_capacity(traffic)
        row = run_fleet("slora", num_replicas, traffic, None)
        rows.append({"rate per replica": rate, "of capacity %": 100 * load, **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("calibration", "policies", "hour", "sizes")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    if "calibration" in options.parts:
        tables["calibration"] = calibration_rows()
        print_table("The model against the production scheduler, 4 replicas", tables["calibration"])
    if "policies" in options.parts:
        tables["policies"] = policy_rows(options.replicas, 300.0)
        print_table("Policies, 300 s", tables["policies"])
    if "hour" in options.parts:
        traffic, loss = make_scene(options.replicas, 3600.0)
        tables["hour"] = [run_fleet("slora", options.replicas, traffic, loss)]
        print_table("An hour", tables["hour"])
    if "sizes" in options.parts:
        tables["sizes"] = size_rows(max(50, options.replicas // 10))
        print_table("When to add a GPU", tables["sizes"])
    if options.write:
        write_json(options.write, tables, {"replicas": options.replicas, "settings": asdict(A10G_7B.costs)})


if __name__ == "__main__":
    main()
