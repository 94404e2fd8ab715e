"""Ways to divide device memory among KV and adapters: the baselines beside our one pool.

Only sizes are simulated, by a serving loop of their own (`bench/serving_loop.py`), the same for all of them. Each
layout is given what a real one would not have: adapters without fragmentation, and splits that are chosen in hindsight.
All sizes are in tokens of KV.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.buddy import Buddy
from bench.simulation.traces import TraceRequest

# Llama-7B's context: what Orca (Max) reserves for each request.
MAX_CONTEXT = 2048


@dataclass(slots=True, eq=False)
class Job:
    """A request in the serving loop: num_held tokens of its KV are in memory, num_generated were answered."""

    request: TraceRequest
    num_held: int = 0
    num_generated: int = 0

    @property
    def num_uncomputed(self) -> int:
        return self.request.prompt_tokens + self.num_generated - self.num_held


class Layout(Protocol):
    """`start` and `grow` take all that is needed, or nothing."""

    def start(self, job: Job, num_tokens: int, num_running: int) -> int | None:
        """Memory for its adapter and the first tokens of its KV. Returns how much of an adapter is loaded for it;
        None: there is no room."""

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Memory for `num_tokens` of KV in all."""

    def stop(self, job: Job) -> None:
        """Gives back what it has; its adapter may stay as an idle one."""

    @property
    def num_taken(self) -> int:
        """Memory that running requests and their adapters take, whatever they put there."""

    @property
    def num_adapter(self) -> int:
        """Memory that the real bytes of running requests' adapters fill."""


class Budget:
    """Places that are counted, not numbered: for whoever can use any of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0

    def has(self, count: int) -> bool:
        return self.taken + count <= self.capacity


class AdapterShelf:
    """Adapters in a budget; idle ones stay until their room is wanted, least recently used first.

    size: what an adapter takes; real_size: what its bytes fill of that.
    """

    def __init__(self, budget: Budget, size: Callable[[int], int], real_size: Callable[[int], int]) -> None:
        self.num_used = 0
        self.num_real = 0
        self._budget = budget
        self._size = size
        self._real_size = real_size
        self._users: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_idle = 0

    def make_room(self, count: int) -> bool:
        """Idle adapters leave until `count` more fits, none of them in vain."""
        if not self._budget.has(count - self._num_idle):
            return False
        while not self._budget.has(count):
            adapter, _ = self._idle.popitem(last=False)
            self._num_idle -= self._size(adapter)
            self._budget.taken -= self._size(adapter)
        return True

    def missing(self, adapter: int) -> int:
        """What it would take that it has not."""
        return 0 if self._users[adapter] or adapter in self._idle else self._size(adapter)

    def acquire(self, adapter: int) -> None:
        """One user more; the caller has made room if it was missing."""
        size = self._size(adapter)
        if not self._users[adapter]:
            if adapter in self._idle:
                del self._idle[adapter]
                self._num_idle -= size
            else:
                self._budget.taken += size
            self.num_used += size
            self.num_real += self._real_size(adapter)
        self._users[adapter] += 1

    def release(self, adapter: int) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            self._idle[adapter] = None
            self._num_idle += self._size(adapter)
            self.num_used -= self._size(adapter)
            self.num_real -= self._real_size(adapter)


class PagedLayout:
    """KV in pages; adapters in a part of their own (a static split), or in the same budget (one pool)."""

    def __init__(
        self, kv: Budget, shelf: AdapterShelf, block_tokens: int, *, is_one_pool: bool = False
    ) -> None:
        self._kv = kv
        self._shelf = shelf
        self._block_tokens = block_tokens
        self._is_one_pool = is_one_pool
        self._held: dict[Job, int] = {}
        self._num_held = 0

    @property
    def num_taken(self) -> int:
        return self._num_held + self._shelf.num_used

    @property
    def num_adapter(self) -> int:
        return self._shelf.num_real

    def start(self, job: Job, num_tokens: int, num_running: int) -> int | None:
        wanted = self._round_up(num_tokens)
        # As in production: starting on the very last pages would preempt at once.
        spare = (num_running // self._block_tokens + 1) * self._block_tokens if num_running else 0
        load = _bring(self._shelf, job, wanted + spare if self._is_one_pool else 0)
        if load is None:
            return None
        if not self._is_one_pool and not self._kv.has(wanted + spare):
            _let_go(self._shelf, job)
            return None
        self._take(job, wanted)
        return load

    def grow(self, job: Job, num_tokens: int) -> bool:
        more = self._round_up(num_tokens) - self._held[job]
        if more <= 0:
            return True
        if not (self._shelf.make_room(more) if self._is_one_pool else self._kv.has(more)):
            return False
        self._take(job, more)
        return True

    def stop(self, job: Job) -> None:
        held = self._held.pop(job)
        self._kv.taken -= held
        self._num_held -= held
        _let_go(self._shelf, job)

    def _take(self, job: Job, count: int) -> None:
        self._held[job] = self._held.get(job, 0) + count
        self._kv.taken += count
        self._num_held += count

    def _round_up(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens) * self._block_tokens


class ContiguousLayout:
    """One contiguous piece of KV for each request, reserved when it starts: Orca's, by a buddy allocator.

    `reserve`: places for a request. Nothing grows, nobody gives way.
    """

    def __init__(self, max_running: int, shelf: AdapterShelf, reserve: Callable[[TraceRequest], int]) -> None:
        self._buddy = Buddy(max_running)
        self._shelf = shelf
        self._reserve = reserve
        self._starts: dict[Job, int] = {}

    @property
    def num_taken(self) -> int:
        return self._buddy.num_taken + self._shelf.num_used

    @property
    def num_adapter(self) -> int:
        return self._shelf.num_real

    def start(self, job: Job, num_tokens: int, num_running: int) -> int | None:
        load = _bring(self._shelf, job, 0)
        if load is None:
            return None
        start = self._buddy.allocate(self._reserve(job.request))
        if start is None:
            _let_go(self._shelf, job)
            return None
        self._starts[job] = start
        return load

    def grow(self, job: Job, num_tokens: int) -> bool:
        return True

    def stop(self, job: Job) -> None:
        self._buddy.release(self._starts.pop(job))
        _let_go(self._shelf, job)


def reserve_max(request: TraceRequest) -> int:
    """Orca (Max): the model's whole context."""
    return MAX_CONTEXT


def reserve_pow2(request: TraceRequest) -> int:
    """Orca (Pow2): at most twice the answer. 25 tokens of answer reserve 32."""
    output: int = 1 << (request.output_tokens - 1).bit_length()
    return min(MAX_CONTEXT, request.prompt_tokens + output)


def reserve_oracle(request: TraceRequest) -> int:
    """Orca (Oracle): it knows how long the answer will be."""
    return request.prompt_tokens + request.output_tokens


def _bring(shelf: AdapterShelf, job: Job, besides: int) -> int | None:
    """Takes the job's adapter, with room for `besides` in its budget. Returns what must be loaded; None: no room."""
    adapter = job.request.adapter
    if adapter is None:
        return 0 if shelf.make_room(besides) else None
    load = shelf.missing(adapter)
    if load:
        if not shelf.make_room(load + besides):
            return None
        shelf.acquire(adapter)
        return load
    shelf.acquire(adapter)  # before anything leaves: it must not be itself
    if shelf.make_room(besides):
        return 0
    shelf.release(adapter)
    return None


def _let_go(shelf: AdapterShelf, job: Job) -> None:
    if job.request.adapter is not None:
        shelf.release(job.request.adapter)
