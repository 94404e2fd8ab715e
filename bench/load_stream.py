"""What others notice while one adapter of 400 MB comes from Redis: those who decode, and who asks the same Redis.

Four requests decode all the time on small adapters that are in the pool. In each round they are watched alone, and then
while the large one is prewarmed, from the store into the pool, several times; nobody computes with it, since a request
that does would be noticed for its computing. Told are 99th percentiles, medians of rounds: of the time between two
tokens of those who decode, and of a PING on a connection of its own.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.adapter_depot import BLOCK_TOKENS, Deposit, Depot
from bench.live_platform import Platform, Setup, Sizes, live_platform, running_redis
from bench.ping_redis import RedisPinger
from bench.simulation.request_log import percentile
from bench.table import Row
from slora_adapters.process.progress_bar import track_progress
from slora_adapters.store.redis_store import open_redis_store

NUM_DECODING = 4
SMALL_RANK, LARGE_RANK = 16, 640
GAPS_FACTOR = 1.2
MOST_PING_S = 0.005
_SETUP = Setup()
_TOKENS = 1000
_FIRST_WATCH_S = 2.0
# After a deletion, until what it frees is free.
_SETTLE_S = 0.2
Span = tuple[float, float]


@dataclass(slots=True)
class _Round:
    """When they were watched, on `time.perf_counter`."""

    alone: list[Span] = field(default_factory=list)
    beside: list[Span] = field(default_factory=list)


def stream_tables(
    rounds: int,
    loads: int = 3,
    ranks: tuple[int, int] = (SMALL_RANK, LARGE_RANK),
    setup: Setup = _SETUP,
    threads: Sequence[int | None] = (None, 1),
) -> dict[str, list[Row]]:
    """loads: of the large adapter in each round. threads: of the engine, one row for each."""
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        folder = Path(directory)
        with running_redis(folder) as server:
            depot = Depot(folder, setup.model, open_redis_store(server.url, durable=False))
            small = depot.add(ranks[0], [("small", f"small-{number}") for number in range(NUM_DECODING)])
            large = depot.add(ranks[1], [("large", "large")])[0]
            rows = []
            for count in threads:
                flags = ("--redis", server.url, *setup.flags)
                with live_platform(depot, _sizes(depot, small, large), *flags, threads=count) as platform:
                    pinger = RedisPinger(server.url)
                    watch = _Watch(platform, small, large)
                    asyncio.run(watch.run(rounds, loads))
                    row = {"engine threads": count or "all cores", "MB": large.num_bytes / 1e6}
                    rows.append(row | watch.row(pinger.stop()))
            depot.close()
    return {"beside an adapter that comes from Redis, p99": rows}


def _sizes(depot: Depot, small: list[Deposit], large: Deposit) -> Sizes:
    """Room for all of them, for those who decode, and as much again beside."""
    adapters = depot.pages(large.packed_bytes) + len(small) * depot.pages(small[0].packed_bytes)
    sequences = len(small) * (_TOKENS // BLOCK_TOKENS + 2)
    host_cache_bytes = 2 * large.packed_bytes + 4 * len(small) * small[0].packed_bytes
    return Sizes(adapters + 2 * sequences, host_cache_bytes, large.details.rank)


class _Watch:
    def __init__(self, platform: Platform, small: list[Deposit], large: Deposit) -> None:
        self._platform = platform
        self._small = small
        self._large = large
        self._gaps: list[Span] = []
        self._rounds: list[_Round] = []

    async def run(self, rounds: int, loads: int) -> None:
        for deposit in (*self._small, self._large):
            await asyncio.to_thread(self._platform.first_token_s, deposit)
        async with self._platform.open_client() as client:
            decoding = [asyncio.create_task(self._decode(client, deposit)) for deposit in self._small]
            try:
                alone_s = _FIRST_WATCH_S
                for _ in track_progress("Rounds", range(rounds), "round"):
                    found = _Round()
                    start = time.perf_counter()
                    await asyncio.sleep(alone_s)
                    found.alone.append((start, time.perf_counter()))
                    for _ in range(loads):
                        await asyncio.to_thread(self._platform.make_cold, [self._large])
                        await asyncio.sleep(_SETTLE_S)
                        start = time.perf_counter()
                        await asyncio.to_thread(self._platform.prewarm, self._large)
                        found.beside.append((start, time.perf_counter()))
                    alone_s = sum(end - start for start, end in found.beside)
                    self._rounds.append(found)
                    for task in decoding:
                        if task.done():
                            task.result()
            finally:
                for task in decoding:
                    task.cancel()
                await asyncio.gather(*decoding, return_exceptions=True)

    async def _decode(self, client: httpx.AsyncClient, deposit: Deposit) -> None:
        """One stream after another."""
        while True:
            last_at: float | None = None
            async for at in self._platform.tokens_at(client, deposit, _TOKENS):
                if last_at is not None:
                    self._gaps.append((last_at, at))
                last_at = at

    def row(self, pings: list[Span]) -> Row:
        gaps = [(self._gaps_in(found.alone), self._gaps_in(found.beside)) for found in self._rounds]
        pinged = [
            (_seconds_in(found.alone, pings), _seconds_in(found.beside, pings)) for found in self._rounds
        ]
        over = statistics.median(_p99(beside) / _p99(alone) for alone, beside in gaps)
        ping_s = statistics.median(_p99(beside) for _, beside in pinged)
        return {
            "takes ms": 1e3 * statistics.median(e - s for found in self._rounds for s, e in found.beside),
            "gaps": sum(len(beside) for _, beside in gaps),
            "gap p50 ms": 1e3 * statistics.median(percentile(alone, 50) for alone, _ in gaps),
            "p99 ms": 1e3 * statistics.median(_p99(alone) for alone, _ in gaps),
            "beside p50 ms": 1e3 * statistics.median(percentile(beside, 50) for _, beside in gaps),
            "beside p99 ms": 1e3 * statistics.median(_p99(beside) for _, beside in gaps),
            "over alone": over,
            f"<= {GAPS_FACTOR:g}": "met" if over <= GAPS_FACTOR else "MISSED",
            "ping ms": 1e3 * statistics.median(_p99(alone) for alone, _ in pinged),
            "beside ping ms": 1e3 * ping_s,
            f"<= {1e3 * MOST_PING_S:g} ms": "met" if ping_s <= MOST_PING_S else "MISSED",
        }

    def _gaps_in(self, spans: list[Span]) -> list[float]:
        return _seconds_in(spans, [(start, end - start) for start, end in self._gaps])


def _seconds_in(spans: list[Span], timed: list[Span]) -> list[float]:
    """Of (start, seconds), those that lie in one of the spans, by length."""
    inside = (
        seconds
        for start, seconds in timed
        if any(begin <= start and start + seconds <= end for begin, end in spans)
    )
    return sorted(inside)


def _p99(ordered: list[float]) -> float:
    assert ordered, "no gap was measured"
    return percentile(ordered, 99)
