"""An AdapterSource on a virtual clock. A fetch takes a fixed latency plus the time to copy its bytes. A few fetches run
in parallel.

The simulation advances `now`. `poll` returns the fetches that have ended by then.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from bench.simulation.adapter_fleet import AdapterFleet
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """The costs of fetches. bytes_per_s: the bandwidth of each fetch.

    num_lanes: maximum number of concurrent fetches. Further fetches wait.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    num_lanes: int = 5


class VirtualSource:
    """An adapter source that is limited only by `costs`. The capacity of its host cache is unlimited."""

    def __init__(self, fleet: AdapterFleet, costs: FetchCosts) -> None:
        self.now = 0.0
        self.num_fetches = 0
        self.fetched_bytes = 0
        self.capacity_bytes: int | None = None
        self.paces: dict[str, float] = {}
        self._fleet = fleet
        self._costs = costs
        self._lanes = [0.0] * costs.num_lanes  # A heap of the times at which the lanes become free.
        self._arrivals: list[tuple[float, int, AdapterVersion]] = []  # A heap by time of arrival.
        self._in_flight: set[AdapterVersion] = set()
        self._order = itertools.count()
        self._pins: Counter[AdapterVersion] = Counter()

    @property
    def next_arrival(self) -> float | None:
        return self._arrivals[0][0] if self._arrivals else None

    @property
    def num_pinned(self) -> int:
        return self._pins.total()

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        return frozenset()

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        return CacheCounts()

    def request(self, version: AdapterVersion) -> None:
        if version in self._in_flight:
            return
        num_bytes = self._fleet.num_bytes(version)
        start = max(self.now, heapq.heappop(self._lanes))
        done = start + self._costs.latency_s + num_bytes / self._costs.bytes_per_s
        heapq.heappush(self._lanes, done)
        heapq.heappush(self._arrivals, (done, next(self._order), version))
        self._in_flight.add(version)
        self.num_fetches += 1
        self.fetched_bytes += num_bytes

    def poll(self) -> list[Fetched | FetchFailed]:
        arrived: list[Fetched | FetchFailed] = []
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, version = heapq.heappop(self._arrivals)
            self._in_flight.remove(version)
            self._pins[version] += 1
            arrived.append(Fetched(version, self._fleet.packed(version)))
        return arrived

    def release(self, version: AdapterVersion) -> None:
        assert self._pins[version] > 0, f"{version} was released more often than it was fetched"
        self._pins[version] -= 1

    def discard(self, version: AdapterVersion) -> None:
        """Does nothing, because no copy is kept."""

    def purge(self, tenant: str) -> None:
        """Does nothing, because no copy is kept."""
