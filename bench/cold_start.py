"""The first token of a request whose adapter is not in the pool: how much later than with it, by where it lies.

In each round, for each size: the plainest program reads that tier, then the adapter is asked for where it is cold, and
then three times where it is in the pool; told are medians of rounds. An adapter is cold in the stores when it was
deleted and registered again, and on the host alone when a large one has pushed it out of the pool. The loader has seen
its config and header before, as it has those of most adapters of a server.

    allowed, later than warm, host   1.2 x the copy by the plainest program, + 5 ms
                             file    1.3 x the longer of reading by the plainest program and hashing on one core
                             Redis   1.3 x reading by the plainest program

The plainest program neither checks a digest nor packs. "over hash" tells how each tier stands beside the longer of
reading and hashing on one core.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import redis

from bench.adapter_depot import Deposit, Depot
from bench.live_platform import Platform, Setup, Sizes, live_platform, running_redis
from bench.table import Row
from bench.tier_rates import TierRates, drop_from_page_cache
from slora_adapters.process.progress_bar import track_progress
from slora_adapters.store.redis_store import open_redis_store
from tests.redis_server import RedisServer

RANKS = (16, 128, 512)
TENANT = "acme"
HOST, FILE, DISK, REDIS = "host", "file", "file, not in the page cache", "redis"
FACTORS = {HOST: 1.2, FILE: 1.3, REDIS: 1.3}
_GRACE_S = {HOST: 0.005, FILE: 0.0, REDIS: 0.0}
_WARM_ASKS = 3
_SETUP = Setup()


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one tier and size, in seconds. floor: of the plainest program."""

    warm: float
    cold: float
    floor: float

    @property
    def later(self) -> float:
        return self.cold - self.warm


@dataclass(slots=True)
class _Scene:
    """Adapters from small to large, another one that pushes them out of the pool, and all samples."""

    depot: Depot
    adapters: list[Deposit]
    pusher: Deposit
    rates: TierRates
    flags: tuple[str, ...]
    samples: dict[tuple[str, Deposit], list[Sample]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """The pool holds the largest and hardly more, the host all of them several times."""
        slack = self.depot.pages(self.adapters[0].packed_bytes) // 2
        host_cache_bytes = 2 * sum(adapter.packed_bytes for adapter in (*self.adapters, self.pusher))
        return Sizes(
            self.depot.pages(self.pusher.packed_bytes) + slack, host_cache_bytes, self.pusher.details.rank
        )

    def measure(self, platform: Platform, tier: str, adapter: Deposit, read_s: Callable[[], float]) -> None:
        floor = read_s()
        num_loads = platform.count_loads()
        cold = platform.first_token_s(adapter)
        assert platform.count_loads() == num_loads + 1, (
            f"{adapter.name} was already resident before its cold start"
        )
        warm = statistics.median(platform.first_token_s(adapter) for _ in range(_WARM_ASKS))
        assert platform.count_loads() == num_loads + 1, f"{adapter.name} was evicted after its cold start"
        self.samples.setdefault((tier, adapter), []).append(Sample(warm, cold, floor))


def cold_start_tables(
    rounds: int, ranks: tuple[int, ...] = RANKS, setup: Setup = _SETUP
) -> dict[str, list[Row]]:
    """ranks: from small to large."""
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        folder = Path(directory)
        with running_redis(folder) as server, server.client() as client:
            depot = Depot(folder, setup.model, open_redis_store(server.url, durable=False))
            adapters = [depot.add(rank, [(TENANT, f"rank-{rank}")])[0] for rank in ranks[:-1]]
            adapters += depot.add(ranks[-1], [(TENANT, f"rank-{ranks[-1]}"), (TENANT, "pusher")])
            pusher = adapters.pop()
            rates = TierRates(depot.tensor_file(pusher).stat().st_size, setup.ring_bytes)
            scene = _Scene(depot, adapters, pusher, rates, setup.flags)
            _measure_files(scene, rounds)
            rates.fill_redis(client)
            _measure_redis(scene, server, client, rounds)
            depot.close()
            hash_s = {adapter: _median_hash_s(rates, adapter) for adapter in adapters}
    rows = [
        _row(tier, adapter, scene.samples[tier, adapter], None if tier == HOST else hash_s[adapter])
        for tier in (HOST, FILE, DISK, REDIS)
        for adapter in adapters
    ]
    return {"first token by tier": rows}


def _measure_files(scene: _Scene, rounds: int) -> None:
    rates = scene.rates
    with live_platform(scene.depot, scene.sizes, *scene.flags) as platform:
        for adapter in (*scene.adapters, scene.pusher):  # everything has run and every page was written to
            platform.first_token_s(adapter)
        for _ in track_progress("Rounds", range(rounds), "round"):
            for adapter in scene.adapters:
                path, num_bytes = scene.depot.tensor_file(adapter), adapter.num_bytes
                platform.make_cold([adapter])
                scene.measure(platform, FILE, adapter, lambda path=path: rates.file_s(path))
                platform.first_token_s(scene.pusher)
                scene.measure(platform, HOST, adapter, lambda count=num_bytes: rates.host_s(count))
                platform.make_cold([adapter])
                scene.measure(platform, DISK, adapter, lambda path=path: _read_from_disk(rates, path))


def _read_from_disk(rates: TierRates, path: Path) -> float:
    drop_from_page_cache(path)
    seconds = rates.file_s(path)
    drop_from_page_cache(path)
    return seconds


def _measure_redis(scene: _Scene, server: RedisServer, client: "redis.Redis[bytes]", rounds: int) -> None:
    with live_platform(scene.depot, scene.sizes, "--redis", server.url, *scene.flags) as platform:
        for adapter in (*scene.adapters, scene.pusher):
            platform.first_token_s(adapter)
        for _ in track_progress("Rounds", range(rounds), "round"):
            for adapter in scene.adapters:
                platform.make_cold([adapter])
                sent = client.info("stats")["total_net_output_bytes"]
                scene.measure(
                    platform,
                    REDIS,
                    adapter,
                    lambda count=adapter.num_bytes: scene.rates.redis_s(client, count),
                )
                sent = client.info("stats")["total_net_output_bytes"] - sent
                assert sent >= 1.5 * adapter.num_bytes, f"{adapter.name} was loaded from another tier"


def _row(tier: str, adapter: Deposit, samples: list[Sample], hash_s: float | None) -> Row:
    """hash_s: None where nothing is verified any more."""
    warm, cold, floor = (
        statistics.median(getattr(sample, name) for sample in samples) for name in ("warm", "cold", "floor")
    )
    later = statistics.median(sample.later for sample in samples)
    factor = FACTORS.get(tier)
    row: Row = {
        "tier": tier,
        "MB": adapter.num_bytes / 1e6,
        "warm ms": 1e3 * warm,
        "cold ms": 1e3 * cold,
        "later ms": 1e3 * later,
        "floor ms": 1e3 * floor,
        "GB/s": adapter.num_bytes / floor / 1e9,
        "over floor": later / floor,
        "hash ms": None if hash_s is None else 1e3 * hash_s,
        "over hash": None if hash_s is None else later / max(floor, hash_s),
        "allowed ms": None,
        "wanted": None,
        "verdict": None,
    }
    if factor is not None:
        least_s, grace_s = (hash_s or 0.0) if tier == FILE else 0.0, _GRACE_S[tier]
        # Of the rounds' own floors, because what slows down both is not the server's fault.
        of_allowed = statistics.median(
            sample.later / (factor * max(sample.floor, least_s) + grace_s) for sample in samples
        )
        row |= {
            "allowed ms": 1e3 * (factor * max(floor, least_s) + grace_s),
            "wanted": f"<= {factor:g} x" + (f" + {1e3 * grace_s:g} ms" if grace_s else ""),
            "verdict": "met" if of_allowed <= 1 else f"MISSED, {of_allowed:.2f} times",
        }
    return row


def _median_hash_s(rates: TierRates, adapter: Deposit) -> float:
    return statistics.median(rates.hash_s(adapter.num_bytes) for _ in range(3))
