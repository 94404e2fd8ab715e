"""CPU time of choosing a replica.

    python -m bench.routing [--choices 20000] [--write FILE]

Requests draw from 100,000 adapters by Zipf(1). Each replica holds the 100 adapters whose first home it is. `fresh`: the
caller passes new states at each choice. `published`: the caller passes the same tuple for 200 choices, as at 2,000
requests a second and a report each 100 ms.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.table import Row, print_table, write_json
from slora.client.router import ReplicaState, RoutedWork, Router
from slora_adapters.version import AdapterVersion

NUM_ADAPTERS, RESIDENT, PUBLISHED_CHOICES = 100_000, 100, 200
BAR_MS = 0.2


def make_replicas(
    count: int, versions: list[AdapterVersion], random: np.random.Generator
) -> list[ReplicaState]:
    router = Router()
    empty = tuple(ReplicaState(f"replica-{i}", frozenset(), frozenset(), 0, 0, 0.0) for i in range(count))
    held: dict[str, set[AdapterVersion]] = {one.name: set() for one in empty}
    for version in versions[: RESIDENT * count]:
        home = held[router.choose(RoutedWork("bench", (version,), None, 500), empty)[0]]
        if len(home) < RESIDENT:
            home.add(version)
    return [
        replace(one, resident=held[one.name], num_running=20, load=float(random.uniform(5, 10)))
        for one in empty
    ]


def measure(count: int, num_choices: int, *, is_published: bool) -> Row:
    random = np.random.default_rng(0)
    versions = [AdapterVersion(f"tenant-{i % 1000}", f"{i:064x}") for i in range(NUM_ADAPTERS)]
    popularity = 1 / np.arange(1, NUM_ADAPTERS + 1)
    drawn = random.choice(NUM_ADAPTERS, num_choices, p=popularity / popularity.sum()).tolist()
    works = [RoutedWork(versions[i].tenant, (versions[i],), None, 500) for i in drawn]
    states, router = make_replicas(count, versions, random), Router(token_s=1e-3)
    spent: list[int] = []
    replicas: list[ReplicaState] | tuple[ReplicaState, ...] = ()
    for turn, work in enumerate(works):
        if not is_published:
            replicas = list(states)
        elif turn % PUBLISHED_CHOICES == 0:
            replicas = tuple(map(replace, states))
        start = time.thread_time_ns()
        router.choose(work, replicas)
        spent.append(time.thread_time_ns() - start)
    spent.sort()
    mean, p99 = sum(spent) / len(spent) / 1e6, spent[len(spent) * 99 // 100] / 1e6
    return {
        "replicas": count,
        "states": "published" if is_published else "fresh",
        "mean ms": mean,
        "p50 ms": spent[len(spent) // 2] / 1e6,
        "p99 ms": p99,
        "bar ms": BAR_MS,
        "met": "yes" if mean <= BAR_MS else "no",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choices", type=int, default=20_000)
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = [
        measure(count, options.choices, is_published=is_published)
        for count in (3, 100, 1000)
        for is_published in (False, True)
    ]
    print_table("CPU time of choosing a replica", rows)
    if options.write:
        write_json(options.write, {"routing": rows}, {"choices": options.choices})


if __name__ == "__main__":
    main()
