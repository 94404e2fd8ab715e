"""Many different cold adapters asked for at once, by one tenant and by several: when the last one has its first token.

    wanted: at most 1.5 times what the plainest program takes to read as many bytes from that tier, one after another,
            or to hash them on one core, if that takes longer

The requests themselves are part of it; the same again with all adapters in the pool ("warm") tells how much. Loads of
several adapters can share the hashing among the cores.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.adapter_depot import Deposit, Depot
from bench.live_platform import Platform, Setup, Sizes, live_platform, running_redis
from bench.table import Row
from bench.tier_rates import TierRates
from slora_adapters.process.progress_bar import track_progress
from slora_adapters.store.redis_store import open_redis_store

NUM_ADAPTERS = 32
RANK = 32
NUM_TENANTS = 8
FACTOR = 1.5
FILE, REDIS = "file", "redis"
_SETUP = Setup()


def storm_tables(
    rounds: int,
    count: int = NUM_ADAPTERS,
    rank: int = RANK,
    setup: Setup = _SETUP,
    tiers: Sequence[str] = (FILE, REDIS),
) -> dict[str, list[Row]]:
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        folder = Path(directory)
        with running_redis(folder) as server, server.client() as client:
            depot = Depot(folder, setup.model, open_redis_store(server.url, durable=False))
            of_one = depot.add(rank, [("one", f"cold-{number}") for number in range(count)])
            of_many = [
                depot.share(deposit, f"many-{number % NUM_TENANTS}", deposit.name)
                for number, deposit in enumerate(of_one)
            ]
            storms = {1: of_one, NUM_TENANTS: of_many}
            num_bytes = sum(deposit.num_bytes for deposit in of_one)
            paths = [depot.tensor_file(deposit) for deposit in of_one]
            rates = TierRates(sum(path.stat().st_size for path in paths), setup.ring_bytes)
            rates.fill_redis(client)
            plainest = {
                FILE: lambda: rates.files_s(paths),
                REDIS: lambda: rates.redis_s(client, num_bytes),
            }
            hash_s = statistics.median(rates.hash_s(num_bytes) for _ in range(3))
            rows = []
            for tier in tiers:
                flags = (*setup.flags, *(("--redis", server.url) if tier == REDIS else ()))
                with live_platform(depot, _sizes(depot, of_one), *flags) as platform:
                    rows += _measure(platform, tier, storms, rounds, plainest[tier], hash_s)
            depot.close()
    return {f"{count} cold adapters at once": rows}


def _sizes(depot: Depot, deposits: list[Deposit]) -> Sizes:
    """Room for all adapters at once and some blocks of each request; of the host, which leaves half of itself to gaps,
    for a good twice as much."""
    largest = max(deposit.packed_bytes for deposit in deposits)
    pages = len(deposits) * (depot.pages(largest) + 4)
    return Sizes(pages, 5 * len(deposits) * largest // 2, deposits[0].details.rank)


def _measure(
    platform: Platform,
    tier: str,
    storms: dict[int, list[Deposit]],
    rounds: int,
    read_s: Callable[[], float],
    hash_s: float,
) -> list[Row]:
    for deposits in storms.values():  # everything has run and every page was written to
        platform.last_first_token_s(deposits)
    cold: dict[int, list[float]] = {tenants: [] for tenants in storms}
    warm: dict[int, list[float]] = {tenants: [] for tenants in storms}
    floors: list[float] = []
    for _ in track_progress("Rounds", range(rounds), "round"):
        for tenants, deposits in storms.items():
            for others in storms.values():
                platform.make_cold(others)
            num_loads = platform.count_loads()
            cold[tenants].append(platform.last_first_token_s(deposits))
            assert platform.count_loads() == num_loads + len(deposits), "not all adapters were cold"
            warm[tenants].append(platform.last_first_token_s(deposits))
            assert platform.count_loads() == num_loads + len(deposits), "some adapters were evicted"
        floors.append(read_s())
    return [
        _row(tier, tenants, storms[tenants], cold[tenants], warm[tenants], floors, hash_s)
        for tenants in storms
    ]


def _row(
    tier: str,
    tenants: int,
    deposits: list[Deposit],
    cold: list[float],
    warm: list[float],
    floors: list[float],
    hash_s: float,
) -> Row:
    num_bytes = sum(deposit.num_bytes for deposit in deposits)
    over = statistics.median(
        seconds / max(floor, hash_s) for seconds, floor in zip(cold, floors, strict=True)
    )
    later = statistics.median(
        (seconds - computing) / floor for seconds, computing, floor in zip(cold, warm, floors, strict=True)
    )
    return {
        "tier": tier,
        "tenants": tenants,
        "MB": num_bytes / 1e6,
        "last first token ms": 1e3 * statistics.median(cold),
        "warm ms": 1e3 * statistics.median(warm),
        "floor ms": 1e3 * statistics.median(floors),
        "GB/s": num_bytes / statistics.median(floors) / 1e9,
        "hash ms": 1e3 * hash_s,
        "over floor and hash": over,
        "later than warm over floor": later,
        "wanted": f"<= {FACTOR:g}",
        "verdict": "met" if over <= FACTOR else f"MISSED, {over / FACTOR:.2f} times",
    }
