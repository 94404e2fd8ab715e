"""The adapters of a replica model: in the store, on the host and in the pool."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from bench.simulation.fleet.model_request import ModelRequest
from bench.simulation.machine import Machine
from bench.simulation.virtual_source import FetchCosts

# Seconds until a copy in the host cache is found.
HOST_FETCH_S = 0.001


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """ranks: adapter i has rank ranks[i % len(ranks)].

    num_slots: maximum number of adapters in the pool.
    host_bytes: the size of the host cache, which evicts the least recently fetched; 0: none.
    choose_victim: chooses the idle adapter to evict, from those in order of their last use; None: the first.
    """

    ranks: tuple[int, ...]
    fetch: FetchCosts
    num_slots: int = 256
    host_bytes: int = 0
    choose_victim: "Callable[[Sequence[int], ModelAdapters], int] | None" = None


class ModelAdapters:
    """What one replica knows of its adapters, by number. There is no clock: callers pass the time.

    uses: for each adapter in the pool, how often it was requested since its load began.
    active: for each adapter of running requests, their number.
    loading: for each adapter that is being copied into the pool, the pages still to copy.
    num_pages, num_idle_pages: pages of all adapters in the pool, and of those that neither run nor load.
    changed: set when an adapter enters or leaves the pool or the host cache.
    num_fetches: fetches from the store. num_host_fetches: copies found in the host cache.
    """

    def __init__(self, settings: AdapterSettings, machine: Machine) -> None:
        self._settings = settings
        self._bytes = [machine.adapter_layout(rank).num_bytes for rank in settings.ranks]
        self._pages = [machine.pages_of(num_bytes) for num_bytes in self._bytes]
        self.num_fetches = self.num_host_fetches = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all adapters, as when the replica restarts. The counters continue."""
        self.uses: dict[int, int] = {}
        self.active: dict[int, int] = {}
        self.loading: dict[int, int] = {}
        self.on_host: OrderedDict[int, None] = OrderedDict()
        self.num_pages = self.num_idle_pages = 0
        self.changed = True
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._fetched: set[int] = set()  # Held on the host for requests, and not yet in the pool.
        self._waiting: dict[int, list[ModelRequest]] = {}
        self._fetches: list[tuple[float, int]] = []
        self._lanes = [0.0] * self._settings.fetch.num_lanes
        self._host_bytes = 0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting(self) -> Iterator[ModelRequest]:
        return (request for group in self._waiting.values() for request in group)

    @property
    def next_fetched_s(self) -> float:
        return self._fetches[0][0] if self._fetches else float("inf")

    @property
    def has_free_slot(self) -> bool:
        return len(self.uses) < self._settings.num_slots

    def count_pages(self, adapter: int) -> int:
        return self._pages[adapter % len(self._pages)]

    def count_bytes(self, adapter: int) -> int:
        return self._bytes[adapter % len(self._bytes)]

    def is_missing(self, adapter: int) -> bool:
        """Whether the adapter is neither in the pool nor held on the host."""
        return adapter not in self.uses and adapter not in self._fetched

    def is_fetched(self, adapter: int) -> bool:
        """Whether the adapter is held on the host and not in the pool."""
        return adapter in self._fetched

    def wait(self, request: ModelRequest, now: float) -> None:
        """Keeps the request until `collect` returns it. Fetches its adapter unless a fetch is in progress."""
        adapter = request.adapter
        if adapter in self._waiting:
            self._waiting[adapter].append(request)
            return
        self._waiting[adapter] = [request]
        if adapter in self.on_host:
            self.on_host.move_to_end(adapter)
            self.num_host_fetches += 1
            done = now + HOST_FETCH_S
        else:
            costs = self._settings.fetch
            start = max(now, heapq.heappop(self._lanes))
            done = start + costs.latency_s + self.count_bytes(adapter) / costs.bytes_per_s
            heapq.heappush(self._lanes, done)
            self.num_fetches += 1
        heapq.heappush(self._fetches, (done, adapter))

    def collect(self, now: float) -> list[ModelRequest]:
        """Returns the requests whose adapter has been fetched by now."""
        found = []
        while self._fetches and self._fetches[0][0] <= now:
            adapter = heapq.heappop(self._fetches)[1]
            self._fetched.add(adapter)
            self._keep_on_host(adapter)
            found += self._waiting.pop(adapter)
        return found

    def start_load(self, adapter: int) -> None:
        """Takes the fetched copy. The caller has made room for its pages."""
        self._fetched.discard(adapter)
        pages = self.loading[adapter] = self.count_pages(adapter)
        self.num_pages += pages
        self.uses[adapter] = 1
        self.changed = True

    def advance_load(self, adapter: int, num_pages: int) -> None:
        self.loading[adapter] -= num_pages
        if not self.loading[adapter]:
            del self.loading[adapter]
            if adapter not in self.active:
                self._set_idle(adapter)

    def acquire(self, adapter: int) -> None:
        """Adds a running request of an adapter that is in the pool."""
        if adapter in self._idle:
            del self._idle[adapter]
            self.num_idle_pages -= self.count_pages(adapter)
        self.active[adapter] = self.active.get(adapter, 0) + 1

    def release(self, adapter: int) -> None:
        self.active[adapter] -= 1
        if not self.active[adapter]:
            del self.active[adapter]
            if adapter not in self.loading:
                self._set_idle(adapter)

    def make_slot(self) -> bool:
        """Evicts an idle adapter if as many adapters as allowed are in the pool. Returns False if none is idle."""
        return self.has_free_slot or self.evict(())

    def evict(self, kept: Container[int]) -> bool:
        """Evicts an idle adapter that is not in `kept`. Returns False if there is none."""
        candidates = (adapter for adapter in self._idle if adapter not in kept)
        choose = self._settings.choose_victim
        if choose is None:
            victim = next(candidates, None)
        else:
            idle = list(candidates)
            victim = choose(idle, self) if idle else None
        if victim is None:
            return False
        del self._idle[victim], self.uses[victim]
        self.num_idle_pages -= self.count_pages(victim)
        self.num_pages -= self.count_pages(victim)
        self.changed = True
        return True

    def _set_idle(self, adapter: int) -> None:
        self._idle[adapter] = None
        self.num_idle_pages += self.count_pages(adapter)

    def _keep_on_host(self, adapter: int) -> None:
        if not self._settings.host_bytes or adapter in self.on_host:
            return
        self.on_host[adapter] = None
        self._host_bytes += self.count_bytes(adapter)
        while self._host_bytes > self._settings.host_bytes:
            self._host_bytes -= self.count_bytes(self.on_host.popitem(last=False)[0])
        self.changed = True
