"""An AdapterSource whose fetches take as long as from a remote store, on the real clock."""

import heapq
import itertools
import time
from collections.abc import Collection

from bench.simulation.virtual_source import FetchCosts
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.loader.source import AdapterSource, Fetched, FetchFailed
from slora_adapters.version import AdapterVersion


class PacedSource:
    """Delays the fetches of `source`. Each takes a latency plus its bytes at a bandwidth; a few run at a time."""

    capacity_bytes: int | None = None

    @property
    def paces(self) -> dict[str, float]:
        return {}

    def __init__(self, source: AdapterSource, costs: FetchCosts) -> None:
        self._source = source
        self._costs = costs
        self._lanes = [0.0] * costs.num_lanes  # when each is free again: a heap
        self._arrivals: list[tuple[float, int, Fetched | FetchFailed]] = []  # a heap by time
        self._order = itertools.count()

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        return frozenset()

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        return CacheCounts()

    def request(self, version: AdapterVersion) -> None:
        self._source.request(version)
        for fetch in self._source.poll():
            seconds = self._costs.latency_s
            if isinstance(fetch, Fetched):
                seconds += fetch.packed.layout.num_bytes / self._costs.bytes_per_s
            done = max(time.monotonic(), heapq.heappop(self._lanes)) + seconds
            heapq.heappush(self._lanes, done)
            heapq.heappush(self._arrivals, (done, next(self._order), fetch))

    def poll(self) -> list[Fetched | FetchFailed]:
        arrived = []
        while self._arrivals and self._arrivals[0][0] <= time.monotonic():
            arrived.append(heapq.heappop(self._arrivals)[2])
        return arrived

    def release(self, version: AdapterVersion) -> None:
        self._source.release(version)

    def discard(self, version: AdapterVersion) -> None:
        self._source.discard(version)

    def purge(self, tenant: str) -> None:
        self._source.purge(tenant)
