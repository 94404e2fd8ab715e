"""Several engines of the demo behind one `ReplicaGroup`: where requests go, what they load, and how fair they are.

    python -m bench.replicas [--replicas 2 3] [--parts affinity storm choice fairness] [--write FILE]

The engines and the loader are processes, as in `slora serve`; HTTP is left out. 200 adapters are the ten of the demo
for 20 tenants: the same weights for another tenant are another adapter.

- affinity: the pool of an engine holds 1.4 times its part of the adapters, and not all of them. "hits" are the requests
  that find their adapter in the pool, without the first request for each adapter. Each adapter is loaded once at least.
- storm: six cold adapters at once, and one after the other.
- choice: CPU time of choosing an engine. "first" is the first request for an adapter, "changing" comes after a report.
- fairness: a tenant with adapters at all engines, and a tenant with one adapter at one engine. Both always wait.
  "shared" are engines that hear of each other's service.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.table import Row, print_table, write_json
from slora.client.replica_group import ReplicaGroup
from slora.client.router import Penalties, Router
from slora.core.engine_state import Backlog, EngineReport
from slora.core.messages import Report
from slora.core.request import EngineRequest, RequestTiming, RequestUsage, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.models.model_spec import read_model_spec
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import lay_out_adapter
from tests.support.engine_stack import ChildProcess, EngineStack, wait_until
from tests.support.model_kit import ModelKit

DEMO = Path(__file__).parents[1] / "demo"
NUM_ADAPTERS, NUM_STORM = 200, 6
SPREAD, PINNED = "spread", "pinned"
HIT_BAR, LOAD_BAR, CHOICE_BAR_MS = 0.95, 1.2, 0.2
# Requests in flight.
_IN_FLIGHT = 8
_PAGES_FOR_KV = 64
KIT = ModelKit(DEMO / "model", {one.name: one for one in sorted((DEMO / "adapters").iterdir())})
PARTS = ("affinity", "storm", "choice", "fairness")


class Depot:
    """The demo's model and its adapters, for any number of tenants."""

    def __init__(self, root: Path, num_pages: int, **settings: int | str) -> None:
        self.stack = EngineStack(root, KIT, num_pages, **settings)
        self._digests = [version.digest for version in self.stack.versions.values()]
        self.root = root

    def version(self, index: int) -> AdapterVersion:
        number, kind = divmod(index, len(self._digests))
        return AdapterVersion(f"tenant-{number}", self._digests[kind])


@asynccontextmanager
async def running(depot: Depot, num_replicas: int) -> AsyncIterator[ReplicaGroup]:
    sockets = [depot.root / f"engine-{number}.sock" for number in range(num_replicas)]
    depot.stack.start_loader()
    engines: list[ChildProcess] = [depot.stack.start_engine(socket=path) for path in sockets]
    group = ReplicaGroup(sockets, 0.0)
    connecting = asyncio.create_task(group.run())
    try:
        await wait_until(lambda: all(group.health.values()))
        yield group
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        for engine in engines:
            engine.kill()
        depot.stack.stop()


def ask(name: str, version: AdapterVersion, num_tokens: int = 4) -> EngineRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompt = [5 + ord(letter) % 60 for letter in f"{version.tenant} {name} {name}"]
    return EngineRequest(name, version.tenant, prompt, single_adapter(version), sampling)


async def read(group: ReplicaGroup, request: EngineRequest) -> float:
    """Returns the seconds until the first token."""
    start, first_s = time.perf_counter(), None
    async for _ in group.generate(request):
        first_s = first_s or time.perf_counter() - start
    assert first_s is not None
    return first_s


class Timings:
    """The timings of the requests that a group has reported."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.by_request: dict[str, RequestTiming] = {}
        self._group = group
        group.listen_for_usage(self._note)

    def _note(self, name: str, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        assert timing is not None
        self.by_request[name] = timing
        self._group.acknowledge_usage(name)


def measure_pages() -> int:
    """Returns the number of pages of the largest adapter."""
    shape = read_model_spec(KIT.directory).shape("float32")
    adapters = [read_adapter(path, shape, AdapterLimits()) for path in KIT.adapters.values()]
    largest = max(lay_out_adapter(shape, adapter.ranks(shape)).num_bytes for adapter in adapters)
    return -(-largest // KIT.pool_bytes(1))


async def measure_affinity(num_replicas: int, num_requests: int) -> Row:
    pages = measure_pages()
    held = int(1.4 * NUM_ADAPTERS / num_replicas)
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as folder:
        depot = Depot(Path(folder), held * pages + _PAGES_FOR_KV, max_num_seqs=_IN_FLIGHT)
        async with running(depot, num_replicas) as group:
            timings = Timings(group)
            random = np.random.default_rng(1)
            popularity = 1 / np.arange(1, NUM_ADAPTERS + 1)
            drawn = random.choice(NUM_ADAPTERS, num_requests, p=popularity / popularity.sum()).tolist()
            requests = iter([ask(f"r{turn}", depot.version(index)) for turn, index in enumerate(drawn)])

            async def work() -> None:
                for request in requests:
                    await read(group, request)

            start = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
            seconds = time.perf_counter() - start
            stats = await group.stats()
    num_cold = sum(one.is_cold for one in timings.by_request.values())
    num_least = len(set(drawn))
    # A request that is the first for its adapter cannot find it.
    hits = (num_requests - num_cold) / (num_requests - num_least)
    return {
        "replicas": num_replicas,
        "adapters": num_least,
        "held by a pool": held,
        "requests": num_requests,
        "per s": num_requests / seconds,
        "hits": hits,
        "bar ": HIT_BAR,
        "loads": stats.adapter_loads,
        "at least": num_least,
        "ratio": stats.adapter_loads / num_least,
        "bar": LOAD_BAR,
        "met": "yes" if hits >= HIT_BAR and stats.adapter_loads <= LOAD_BAR * num_least else "no",
    }


async def measure_storm(num_replicas: int, rounds: int = 5) -> Row:
    pages = measure_pages()
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as folder:
        depot = Depot(Path(folder), NUM_ADAPTERS * pages + _PAGES_FOR_KV)
        async with running(depot, num_replicas) as group:
            timings = Timings(group)
            await read(group, ask("first", depot.version(0)))
            alone, together, most_open = [], [], []
            for turn in range(rounds):
                first = 1 + 2 * turn * NUM_STORM
                cold = [ask(f"alone-{turn}-{i}", depot.version(first + i)) for i in range(NUM_STORM)]
                alone += [await read(group, request) for request in cold]
                cold = [
                    ask(f"storm-{turn}-{i}", depot.version(first + NUM_STORM + i)) for i in range(NUM_STORM)
                ]
                together.append(max(await asyncio.gather(*(read(group, request) for request in cold))))
                most_open.append(count_side_by_side([timings.by_request[one.request_id] for one in cold]))
    return {
        "replicas": num_replicas,
        "cold adapters": NUM_STORM,
        "one alone ms": 1e3 * statistics.median(alone),
        "all at once ms": 1e3 * statistics.median(together),
        "of one by one": statistics.median(together) / (NUM_STORM * statistics.median(alone)),
        "loads side by side": statistics.median(most_open),
    }


def count_side_by_side(timings: Sequence[RequestTiming]) -> int:
    """Returns the most requests that waited for their adapters at the same time."""
    events = [
        (at, change)
        for one in timings
        if one.computed_at is not None
        for at, change in ((one.arrived_at, 1), (one.computed_at, -1))
    ]
    open_now = most = 0
    for _, change in sorted(events):
        open_now += change
        most = max(most, open_now)
    return most


async def measure_choice(num_replicas: int, num_choices: int = 3000) -> list[Row]:
    spent: dict[str, list[int]] = {"first": [], "known": [], "changing": []}
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as folder:
        depot = Depot(Path(folder), 400)
        async with running(depot, num_replicas) as group:
            states = [one.client.state for one in group.replicas.values()]
            report = Report.since(EngineReport(), EngineReport(), "")
            for turn in range(num_choices):
                for case, index in (
                    ("first", turn),
                    ("known", turn % NUM_ADAPTERS),
                    ("changing", turn % NUM_ADAPTERS),
                ):
                    if case == "changing":
                        backlog = Backlog(turn % 3, turn % 8, turn % 7 / 2, 1e-4, 1e-3)
                        states[turn % num_replicas].receive(replace(report, backlog=backlog))
                    request = ask(f"{case}-{turn}", AdapterVersion(f"tenant-{index}", f"{index:064x}"), 100)
                    start = time.thread_time_ns()
                    group._choose_for(request)
                    spent[case].append(time.thread_time_ns() - start)
    return [
        {
            "replicas": num_replicas,
            "request": case,
            "mean ms": sum(found) / len(found) / 1e6,
            "p50 ms": statistics.median(found) / 1e6,
            "p99 ms": sorted(found)[len(found) * 99 // 100] / 1e6,
            "bar ms": CHOICE_BAR_MS,
            "met": "yes" if sum(found) / len(found) / 1e6 <= CHOICE_BAR_MS else "no",
        }
        for case, found in spent.items()
    ]


async def measure_fairness(num_replicas: int, seconds: float, *, is_shared: bool) -> Row:
    pages = measure_pages()
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as folder:
        depot = Depot(Path(folder), 40 * pages + 4 * _PAGES_FOR_KV, max_num_seqs=4)
        async with running(depot, num_replicas) as group:
            # Each adapter has one home for ever, so that the pinned tenant stays at one engine.
            group._router = Router(
                penalties=Penalties(0, 1e9, 1e9, prefix_s=0), homes_per_replica_of_traffic=0
            )
            if not is_shared:
                for replica in group.replicas.values():
                    replica.client.listen_for_service(lambda service: None)
            digests = [depot.version(index).digest for index in range(10)]
            tokens: Counter[str] = Counter()
            numbers = iter(range(1 << 30))

            async def work(tenant: str, number: int) -> None:
                version = AdapterVersion(tenant, digests[0 if tenant == PINNED else number % len(digests)])
                while True:
                    async for deltas in group.generate(ask(f"f{next(numbers)}", version, 64)):
                        tokens[tenant] += sum(len(delta.token_ids) for delta in deltas)

            tasks = [asyncio.create_task(work(SPREAD, number)) for number in range(10 * num_replicas)]
            tasks += [asyncio.create_task(work(PINNED, number)) for number in range(10)]
            await asyncio.sleep(seconds / 4)
            before = tokens.copy()
            await asyncio.sleep(seconds)
            shares = [tokens[name] - before[name] for name in (SPREAD, PINNED)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "replicas": num_replicas,
        "shared": "yes" if is_shared else "no",
        "spread tokens/s": shares[0] / seconds,
        "pinned tokens/s": shares[1] / seconds,
        "pinned, of an engine": num_replicas * shares[1] / sum(shares),
        "Jain index": sum(shares) ** 2 / (2 * sum(one**2 for one in shares)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement of fairness")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    for count in options.replicas:
        for part in options.parts:
            match part:
                case "affinity":
                    rows = [asyncio.run(measure_affinity(count, options.requests))]
                case "storm":
                    rows = [asyncio.run(measure_storm(count))]
                case "choice":
                    rows = asyncio.run(measure_choice(count))
                case _:
                    rows = [
                        asyncio.run(measure_fairness(count, options.seconds, is_shared=is_shared))
                        for is_shared in (False, True)
                    ]
            print_table(part, rows)
            tables.setdefault(part, []).extend(rows)
    if options.write:
        write_json(options.write, tables, {"requests": options.requests, "seconds": options.seconds})


if __name__ == "__main__":
    main()
