"""What changes a simulated fleet: several routers, stale reports, a host cache, a lost rack, a viral tenant and
autoscaling; and a sweep of the router's penalties.

    python -m bench.fleet_scenarios [--parts scenarios scaling sweep] [--replicas 100] [--write FILE]

scenarios: one change at a time, on 600 s of constant load. scaling: an hour in which the load swings by half, with a
fixed fleet and with autoscaling. sweep: the traffic of `bench.fleet` for 300 s at two loads, under other penalties,
other numbers of homes and other intervals of reports.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.fleet import ADAPTERS, RATE, SETTINGS, TOKEN_S, bound_goodput, describe, make_demand
from bench.simulation.fleet.autoscaling import ScalingRule
from bench.simulation.fleet.fleet import Fleet, Loss, RouterPolicy
from bench.simulation.fleet.replica_model import ReplicaSettings
from bench.simulation.fleet.traffic import Demand, Traffic, make_traffic
from bench.simulation.request_log import SLO_S
from bench.table import Row, print_table, write_json
from slora.client.router import DEFAULT_PENALTIES, Penalties, Router
from slora_adapters.process.progress_bar import track_progress


class Scene(NamedTuple):
    """A fleet and its traffic. num_routers: API processes, each with a router of its own."""

    traffic: Traffic
    num_replicas: int
    num_routers: int = 1
    report_s: float = 0.5
    settings: ReplicaSettings = SETTINGS
    loss: Loss | None = None
    scaling: ScalingRule | None = None
    penalties: Penalties = DEFAULT_PENALTIES
    homes: float = 2.0


def run_scene(scene: Scene) -> tuple[Fleet, Row]:
    routers = [
        RouterPolicy(
            Router(penalties=scene.penalties, token_s=TOKEN_S, homes_per_replica_of_traffic=scene.homes)
        )
        for _ in range(scene.num_routers)
    ]
    fleet = Fleet(
        scene.settings,
        scene.num_replicas,
        routers,
        scene.traffic,
        token_s=TOKEN_S,
        report_s=scene.report_s,
        loss=scene.loss,
        scaling=scene.scaling,
    )
    start = time.process_time()
    results = fleet.run()
    cpu_s = time.process_time() - start
    row = describe(results, bound_goodput(scene.traffic, scene.num_replicas, scene.loss))
    row["host loads"] = results.host_loads
    row["replica hours"] = results.replica_s / 3600
    return fleet, {**row, "CPU s": cpu_s}


def scenario_rows(num_replicas: int, seconds: float = 600.0) -> list[Row]:
    demand = Demand(100 * num_replicas, RATE * num_replicas, seconds)
    base = Scene(make_traffic(demand), num_replicas)
    viral_s = (seconds / 3, seconds * 2 / 3)
    host = replace(SETTINGS, adapters=replace(ADAPTERS, host_bytes=8 << 30))
    scenes = {
        "one router, reports every 0.5 s": base,
        "reports every 0.1 s": base._replace(report_s=0.1),
        "reports every 2 s": base._replace(report_s=2.0),
        "4 routers": base._replace(num_routers=4),
        "4 routers, reports every 0.1 s": base._replace(num_routers=4, report_s=0.1),
        "4 routers, reports every 2 s": base._replace(num_routers=4, report_s=2.0),
        "16 routers": base._replace(num_routers=16),
        "host cache of 8 GiB": base._replace(settings=host),
        "popularity shifts every 60 s": base._replace(traffic=make_traffic(replace(demand, shift_s=60.0))),
        "a rack of 4% lost": base._replace(loss=Loss(seconds / 2, 0, num_replicas // 25)),
        "a rack of 10% lost": base._replace(loss=Loss(seconds / 2, 0, num_replicas // 10)),
    }
    for share in (0.1, 0.3, 0.5):
        name = f"one adapter viral, {100 * share:.0f}% of all requests"
        traffic = make_traffic(replace(demand, viral=(*viral_s, share)))
        scenes[name] = base._replace(traffic=traffic)
    rows = []
    for name, scene in track_progress("Scenes", list(scenes.items()), "scene"):
        fleet, row = run_scene(scene)
        rows.append({"scenario": name, **row, "others p99": others_p99_s(fleet)})
    return rows


def others_p99_s(fleet: Fleet) -> float:
    """The 99th percentile of the first token, without the tenant of the adapter that goes viral."""
    num_adapters = 100 * len(fleet.models)
    viral = (num_adapters - 1) % SETTINGS.num_tenants
    return float(np.percentile(fleet.ttft_s()[fleet.traffic.adapter % SETTINGS.num_tenants != viral], 99))


def scaling_rows(num_replicas: int, seconds: float = 3600.0) -> list[Row]:
    """The peak needs about 80% of `num_replicas`. Half as many start."""
    demand = Demand(100 * num_replicas, 0.65 * num_replicas, seconds, swing=0.5)
    crowd = replace(demand, viral=(seconds / 6, seconds / 4, 0.3))
    half = num_replicas // 2
    rule = ScalingRule(num_initial=half, num_least=num_replicas // 5)
    daily, crowded = make_traffic(demand), make_traffic(crowd)

    def start_in(seconds: float) -> ScalingRule:
        return replace(rule, start_s=seconds)

    scenes = {
        "a swing of 50% in an hour, fixed": Scene(daily, num_replicas),
        "the same, start-up 120 s": Scene(daily, num_replicas, scaling=start_in(120.0)),
        "the same, start-up 300 s": Scene(daily, num_replicas, scaling=start_in(300.0)),
        "one adapter viral, fixed": Scene(crowded, num_replicas),
        "one adapter viral, start-up 120 s": Scene(crowded, num_replicas, scaling=start_in(120.0)),
    }
    return [{"scenario": name, **run_scene(scene)[1]} for name, scene in scenes.items()]


def sweep_rows(num_replicas: int, seconds: float = 300.0, rates: Sequence[float] = (0.75, 0.95)) -> list[Row]:
    def scale(factor: float) -> Penalties:
        scaled = {name: factor * seconds for name, seconds in asdict(DEFAULT_PENALTIES).items()}
        return Penalties(**(scaled | {"host_share": DEFAULT_PENALTIES.host_share}))

    def change(**fields: float) -> Penalties:
        return replace(DEFAULT_PENALTIES, **fields)

    rows = []
    for rate in rates:
        traffic = make_traffic(make_demand(num_replicas, seconds, rate))
        base = Scene(traffic, num_replicas, loss=Loss(seconds / 2, 0, num_replicas // 25))
        scenes: dict[str, Scene] = {}
        for report_s in (0.1, 0.5, 2.0):
            for factor in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0):
                name = f"all x {factor:g}, reports every {report_s:g} s"
                scenes[name] = base._replace(penalties=scale(factor), report_s=report_s)
        for field, values in (("home_s", (0.25, 1.0)), ("spare_s", (1.0, 3.0)), ("stranger_s", (2.5, 8.0))):
            for value in values:
                scenes[f"{field} {value:g}"] = base._replace(penalties=change(**{field: value}))
        for homes in (1.0, 4.0):
            scenes[f"homes {homes:g}"] = base._replace(homes=homes)
        rows += [
            {"rate per replica": rate, "change": name, **run_scene(scene)[1]}
            for name, scene in scenes.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("scenarios", "scaling", "sweep")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    makers = {"scenarios": scenario_rows, "scaling": scaling_rows, "sweep": sweep_rows}
    for part in options.parts:
        tables[part] = makers[part](options.replicas)
        print_table(part.capitalize(), tables[part])
    if options.write:
        write_json(options.write, tables, {"replicas": options.replicas, "slo_s": SLO_S})


if __name__ == "__main__":
    main()
