"""Replays traces under each of the engine's policies and prints the table that decides the defaults.

    python -m bench.simulate [--scenes s2 zipf chat ...] [--quick] [--write DIRECTORY]

Each scene is replayed with three seeds. From the defaults, one option at a time is set to each of its values:
scheduling (fair, fcfs), preemption (auto, swap, recompute), prefix cache (tenant, off). The last table has, for each
value, the mean first token and the mean latency over those of the default, as geometric means over all scenes: below 1
is better.

The production scheduler under virtual time, deterministic: the same commit prints the same numbers on any machine.
--write leaves simulate-DATE.json and simulate-DATE.md in a directory.
"""

import argparse
import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.machines import A10G_7B, A100_7B
from bench.simulation.machine import Machine
from bench.simulation.simulation import Policies, PoolMeter, Setup, Simulation
from bench.simulation.traces import S2, Trace, chat_trace, merge, slora_trace, zipf_trace
from bench.simulation.virtual_source import FetchCosts
from bench.table import Row, markdown, print_table, write_json
from slora_adapters.process.progress_bar import track_progress

NUM_TENANTS = 20
# An object store near by: a rank 64 adapter of 128 MiB takes 0.7 s.
REMOTE = FetchCosts(latency_s=0.02, bytes_per_s=200e6, num_lanes=5)
VALUES: dict[str, tuple[str, ...]] = {
    "scheduling": ("fair", "fcfs"),
    "preemption": ("auto", "swap", "recompute"),
    "prefix_cache": ("tenant", "off"),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """`trace` makes the requests of so many seconds from a seed."""

    machine: Machine
    trace: Callable[[float, int], Trace]
    about: str
    fetch: FetchCosts = REMOTE


def _s2(rate: float, seconds: float, seed: int) -> Trace:
    return slora_trace(200, rate, seconds, num_tenants=NUM_TENANTS, seed=42 + seed)


def _chats(rate: float, seconds: float, seed: int) -> Trace:
    return chat_trace(50, rate, seconds, turns=5, pause_s=15.0, num_tenants=NUM_TENANTS, seed=seed)


def _zipf(rate: float, seconds: float, seed: int) -> Trace:
    return zipf_trace(200, rate, seconds, alpha=1.0, num_tenants=NUM_TENANTS, seed=seed)


SCENES = {
    "s2": Scene(
        A10G_7B,
        partial(_s2, 1.2),
        "S-LoRA's S2, 1.2 requests/s, adapters on the host",
        FetchCosts(),
    ),
    "s2-over": Scene(
        A10G_7B,
        partial(_s2, 2.0),
        "the same, 2 requests/s: more than it serves",
        FetchCosts(),
    ),
    "zipf": Scene(A10G_7B, partial(_zipf, 0.9), "200 adapters by Zipf(1), 0.9 requests/s"),
    "chat": Scene(A10G_7B, partial(_chats, 0.4), "chats of 5 turns, 50 adapters, 0.4 requests/s"),
    "chat-over": Scene(A10G_7B, partial(_chats, 0.8), "the same, 0.8 requests/s"),
    "mixed": Scene(
        A10G_7B,
        lambda seconds, seed: merge(_chats(0.25, seconds, seed), _zipf(0.4, seconds, seed)),
        "both kinds, 0.25 and 0.4 requests/s",
    ),
    "a100": Scene(
        A100_7B,
        lambda seconds, seed: merge(_chats(4.0, seconds / 3, seed), _zipf(4.0, seconds / 3, seed)),
        "both kinds on an A100, 4 requests/s each, a third of the time",
    ),
}


@dataclass(frozen=True, slots=True)
class Length:
    """seconds: of each trace. num_seeds: traces of each scene; rows are means over them."""

    seconds: float
    num_seeds: int


def replay(name: str, policies: Policies, length: Length) -> Row:
    rows = [_replay(SCENES[name], policies, length.seconds, seed) for seed in range(length.num_seeds)]
    return {column: statistics.fmean(row[column] for row in rows) for column in rows[0]}


def _replay(scene: Scene, policies: Policies, seconds: float, seed: int) -> Row:
    meter = PoolMeter(only_backlog=False)
    setup = Setup(
        scene.machine,
        S2.ranks,
        num_tenants=NUM_TENANTS,
        fetch=scene.fetch,
        max_tokens=2048,
        policies=policies,
    )
    simulation = Simulation(setup, [meter])
    results = simulation.run(scene.trace(seconds, seed))
    prefixes = simulation.scheduler.prefixes
    return {
        "served/s": results.requests_per_s,
        "first token s": results.ttft_mean_s,
        "first p99": results.ttft_p99_s,
        "latency s": results.latency_mean_s,
        "latency p99": results.latency_p99_s,
        "in 6 s %": 100 * results.attainment,
        "adapter hits %": 100 * simulation.totals.hit_share,
        "prefix hits %": 100 * prefixes.num_hits / max(1, prefixes.num_queries),
        "GB loaded": simulation.totals.loaded_bytes / 1e9,
        "GB fetched": simulation.source.fetched_bytes / 1e9,
        "preempted": simulation.scheduler.num_preemptions,
        "pages swapped": simulation.totals.swapped_pages,
        "pool held %": 100 * meter.result().held_share,
    }


QUICK, FULL = Length(30.0, 1), Length(300.0, 3)


def policy_rows(names: list[str], length: Length) -> list[Row]:
    """The default's row of each scene is repeated under every option, for reading."""
    rows: list[Row] = []
    default = Policies()
    for name in track_progress("Scenes", names, "scene"):
        base = replay(name, default, length)
        for option, values in VALUES.items():
            for value in values:
                is_default = getattr(default, option) == value
                row = base if is_default else replay(name, replace(default, **{option: value}), length)
                rows.append({"scene": name, "option": option, "value": value, **row})
    return rows


def verdict_rows(rows: list[Row]) -> list[Row]:
    """Of each value, over the default's of the same scene."""
    verdicts = []
    for option, values in VALUES.items():
        default = getattr(Policies(), option)
        for value in values:
            ratios = {
                column: [
                    _find(rows, row["scene"], option, value)[column] / row[column]
                    for row in _of(rows, option, default)
                ]
                for column in ("first token s", "first p99", "latency s", "latency p99")
            }
            verdicts.append(
                {
                    "option": option,
                    "value": value,
                    "default": "*" if value == default else "",
                    **{
                        f"{column.removesuffix(' s')} x": statistics.geometric_mean(x)
                        for column, x in ratios.items()
                    },
                }
            )
    return verdicts


def _of(rows: list[Row], option: str, value: str) -> list[Row]:
    return [row for row in rows if row["option"] == option and row["value"] == value]


def _find(rows: list[Row], scene: str, option: str, value: str) -> Row:
    return next(row for row in _of(rows, option, value) if row["scene"] == scene)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=list(SCENES))
    parser.add_argument("--quick", action="store_true", help="short traces, to check that it works")
    parser.add_argument(
        "--write", type=Path, metavar="DIRECTORY", help="also write the tables to this directory"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    rows = policy_rows(options.scenes, QUICK if options.quick else FULL)
    tables = {"policies by scene": rows, "over the default": verdict_rows(rows)}
    for title, table in tables.items():
        print_table(title, table)
    if options.write:
        stem = options.write / f"simulate-{datetime.date.today().isoformat()}"
        scenes = {name: SCENES[name].about for name in options.scenes}
        write_json(stem.with_suffix(".json"), tables, {"quick": options.quick, "scenes": scenes})
        about = "\n".join(f"- {name}: {text}" for name, text in scenes.items())
        text = "\n\n".join(markdown(title, table) for title, table in tables.items())
        stem.with_suffix(".md").write_text(f"{about}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
