"""A fast model of one replica: an engine at the granularity of requests.

The model has the costs of the scheduler's simulation. Steps without a prefill are computed in one go until the next
request starts or ends. Simplifications: requests are admitted in order of arrival, and prefixes are not cached.
"""

import heapq
import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slora.simulation.machine import Machine
from slora.simulation.virtual_source import FetchCosts

# Loads may always lengthen a step by this share; see `LoadBudget`.
MIN_LOAD_SHARE = 0.1


class ModelRequest(NamedTuple):
    """A request in a replica model.

    ready_s: the time from which it can be admitted. prompt_tokens: its context at admission.
    prefill_tokens: the tokens of the context that have to be computed; 0 after a swap.
    """

    ready_s: float
    number: int
    adapter: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens: int


@dataclass(slots=True)
class _Prefill:
    """An admitted request: the tokens to compute, and the pages of its adapter to load before."""

    request: ModelRequest
    tokens: int
    load_pages: int


class _Row(NamedTuple):
    """A decoding request. The context at step number `s` is offset + s tokens."""

    end_step: int
    order: int
    offset: int
    request: ModelRequest


@dataclass(slots=True)
class FleetLog:
    """The times of all requests by number; NaN until they are known."""

    first_token_s: "array[float]"
    end_s: "array[float]"

    @classmethod
    def empty(cls, count: int) -> "FleetLog":
        return cls(array("d", [math.nan]) * count, array("d", [math.nan]) * count)


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings that all replicas of a fleet share.

    ranks: adapter i has rank ranks[i % len(ranks)].
    num_slots: maximum number of adapters in the pool.
    short_prefill_steps: the prefill beside decoding requests takes at most this many times the fixed cost of a step.
    choose_victim: chooses the idle adapter to evict, from those in order of their last use; None: the first.
    """

    machine: Machine
    ranks: tuple[int, ...]
    fetch: FetchCosts = field(default_factory=FetchCosts)
    num_slots: int = 256
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    short_prefill_steps: float = 2.0
    choose_victim: Callable[[Sequence[int], "ReplicaModel"], int] | None = None


class ReplicaModel:
    """One replica. The caller calls `advance` to a time before it submits a request of that time.

    now: the end of the last step. It may be later than the time to which the replica was advanced.
    uses: for each resident adapter, how often it was requested since it was loaded.
    """

    def __init__(self, settings: ReplicaSettings, log: FleetLog) -> None:
        machine = settings.machine
        self.settings = settings
        self._log = log
        self._bytes = [machine.adapter_layout(rank).num_bytes for rank in settings.ranks]
        self._pages = [machine.pages_of(num_bytes) for num_bytes in self._bytes]
        self._short_tokens = int(settings.short_prefill_steps * machine.costs.step_s / machine.costs.token_s)
        self._page_load_s = machine.full_page_bytes * machine.costs.load_byte_s
        self._start()

    def _start(self) -> None:
        """Sets the state of a replica that has just started."""
        self.now = 0.0
        self.uses: dict[int, int] = {}
        self.unfinished_tokens = self.num_loads = self.num_hits = self.num_preemptions = 0
        self.residency_changed = True
        self._waiting: deque[ModelRequest] = deque()
        self._blocked: dict[int, list[ModelRequest]] = {}
        self._delivered: set[int] = set()  # Fetched, and not yet in the pool.
        self._fetches: list[tuple[float, int]] = []
        self._lanes = [0.0] * self.settings.fetch.num_lanes
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_pages = self._adapter_pages = 0
        self._prefilling: deque[_Prefill] = deque()
        self._prefill_context = 0
        self._rows: list[_Row] = []
        self._context = self._step = self._order = 0
        self._extra_s = 0.0  # Copies that the next step waits for.

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._blocked.values()))

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._prefilling)

    @property
    def resident(self) -> Sequence[int]:
        return list(self.uses)

    @property
    def active(self) -> Sequence[int]:
        """The adapters of running requests."""
        return list(self._users)

    @property
    def pool_use(self) -> float:
        """The share of pages that running requests hold."""
        held = self._count_kv_pages() + self._adapter_pages - self._idle_pages
        return held / self.settings.machine.num_pages

    def pages_of(self, adapter: int) -> int:
        return self._pages[adapter % len(self._pages)]

    def submit(self, now: float, index: int, adapter: int, prompt_tokens: int, output_tokens: int) -> None:
        self.unfinished_tokens += prompt_tokens + output_tokens
        request = ModelRequest(now, index, adapter, prompt_tokens, output_tokens, prompt_tokens)
        if adapter in self.uses:
            self.uses[adapter] += 1
            self.num_hits += 1
            if adapter in self._idle:
                self._idle.move_to_end(adapter)
            self._waiting.append(request)
        elif adapter in self._delivered:
            self._waiting.append(request)
        elif adapter in self._blocked:
            self._blocked[adapter].append(request)
        else:
            self._blocked[adapter] = [request]
            self._fetch(now, adapter)

    def advance(self, until_s: float) -> None:
        """Runs all steps that begin and end before `until_s`, and those with prefills that begin before it."""
        while True:
            if self._fetches and self._fetches[0][0] <= self.now:
                self._deliver()
            if self._waiting and self._waiting[0].ready_s <= self.now:
                self._admit()
            if self._prefilling or self._extra_s:
                if self.now >= until_s:
                    return
                self._run_prefill_step()
            elif self._rows:
                if not self._run_decode_steps(until_s):
                    return
            else:
                event_s = min(
                    self._waiting[0].ready_s if self._waiting else math.inf,
                    self._fetches[0][0] if self._fetches else math.inf,
                )
                if event_s == math.inf or event_s > until_s:
                    return
                assert event_s > self.now, "a request can't be admitted to an empty replica (deadlock)"
                self.now = event_s

    def fail(self) -> list[ModelRequest]:
        """Returns all unfinished requests, with the tokens that they have got as a part of their prompts."""
        lost = [*self._waiting, *(request for blocked in self._blocked.values() for request in blocked)]
        lost += [prefill.request for prefill in self._prefilling]
        for row in self._rows:
            left = max(1, row.end_step - self._step)
            got = row.request.output_tokens - left
            lost.append(
                row.request._replace(
                    prompt_tokens=row.request.prompt_tokens + got,
                    prefill_tokens=row.request.prompt_tokens + got,
                    output_tokens=left,
                )
            )
        self._start()
        return lost

    def _fetch(self, now: float, adapter: int) -> None:
        costs = self.settings.fetch
        num_bytes = self._bytes[adapter % len(self._bytes)]
        done = max(now, heapq.heappop(self._lanes)) + costs.latency_s + num_bytes / costs.bytes_per_s
        heapq.heappush(self._lanes, done)
        heapq.heappush(self._fetches, (done, adapter))
        self.num_loads += 1

    def _deliver(self) -> None:
        done, adapter = heapq.heappop(self._fetches)
        self._delivered.add(adapter)
        self._waiting.extend(request._replace(ready_s=done) for request in self._blocked.pop(adapter))

    def _count_kv_pages(self) -> float:
        """Each request wastes half of its last page on average."""
        tokens = self._context + self._prefill_context
        return tokens / self.settings.machine.block_tokens + 0.5 * self.num_running

    def _admit(self) -> None:
        settings, block = self.settings, self.settings.machine.block_tokens
        while self._waiting and self._waiting[0].ready_s <= self.now:
            request = self._waiting[0]
            if self.num_running >= settings.max_num_seqs:
                return
            is_resident = request.adapter in self.uses
            pages = 0 if is_resident else self.pages_of(request.adapter)
            needed = request.prompt_tokens / block + 1 + pages
            needed += (self.num_running // block + 1) if self.num_running else 0
            if not self._make_room(needed, request.adapter):
                return
            self._waiting.popleft()
            if not is_resident:
                self._delivered.discard(request.adapter)
                self.uses[request.adapter] = 1
                self.residency_changed = True
                self._adapter_pages += pages
                self._idle_pages += pages
                self._idle[request.adapter] = None
            if request.adapter in self._idle:
                del self._idle[request.adapter]
                self._idle_pages -= self.pages_of(request.adapter)
            self._users[request.adapter] = self._users.get(request.adapter, 0) + 1
            if request.prefill_tokens:
                self._prefilling.append(_Prefill(request, request.prefill_tokens, pages))
                self._prefill_context += request.prompt_tokens
            else:
                pages = -(-request.prompt_tokens // block)
                self._extra_s += pages * settings.machine.costs.page_copy_s
                self._start_row(request)

    def _make_room(self, needed: float, wanted: int) -> bool:
        """Evicts idle adapters until `needed` pages are free. Returns False if there are too few."""
        total = self.settings.machine.num_pages - self._count_kv_pages()
        idle_pages = self._idle_pages - (self.pages_of(wanted) if wanted in self._idle else 0)
        if total - self._adapter_pages + idle_pages < needed:
            return False
        while total - self._adapter_pages < needed or len(self.uses) >= self.settings.num_slots:
            if not self._evict(wanted):
                return total - self._adapter_pages >= needed
        return True

    def _evict(self, wanted: int) -> bool:
        candidates = (adapter for adapter in self._idle if adapter != wanted)
        choose = self.settings.choose_victim
        if choose is None:
            victim = next(candidates, None)
        else:
            idle = list(candidates)
            victim = choose(idle, self) if idle else None
        if victim is None:
            return False
        del self._idle[victim], self.uses[victim]
        self.residency_changed = True
        self._idle_pages -= self.pages_of(victim)
        self._adapter_pages -= self.pages_of(victim)
        # Requests that waited for a page now wait for their adapter again.
        if any(request.adapter == victim for request in self._waiting):
            self._block_again(victim)
        return True

    def _block_again(self, adapter: int) -> None:
        again = [request for request in self._waiting if request.adapter == adapter]
        self._waiting = deque(request for request in self._waiting if request.adapter != adapter)
        self._blocked[adapter] = again
        self._fetch(self.now, adapter)

    def _start_row(self, request: ModelRequest) -> None:
        """Adds a row whose context is the prompt and, after a prefill, one token."""
        has_token = 1 if request.prefill_tokens else 0
        self._order += 1
        offset = request.prompt_tokens + has_token - self._step
        end = self._step + request.output_tokens - has_token
        heapq.heappush(self._rows, _Row(end, self._order, offset, request))
        self._context += request.prompt_tokens + has_token

    def _run_prefill_step(self) -> None:
        costs, num_rows = self.settings.machine.costs, len(self._rows)
        seconds = (
            costs.step_s + num_rows * costs.decode_s + self._context * costs.context_token_s + self._extra_s
        )
        self._extra_s = 0.0
        budget = self._short_tokens if num_rows else self.settings.max_num_batched_tokens
        load_pages = self._count_load_pages()
        started: list[ModelRequest] = []
        waiting: deque[_Prefill] = deque()
        for prefill in self._prefilling:
            if prefill.load_pages:
                pages = min(prefill.load_pages, load_pages)
                load_pages -= pages
                prefill.load_pages -= pages
                seconds += pages * self._page_load_s
                waiting.append(prefill)
                continue
            tokens = min(budget, prefill.tokens)
            budget -= tokens
            prefill.tokens -= tokens
            seconds += tokens * costs.token_s
            if prefill.tokens:
                waiting.append(prefill)
            else:
                started.append(prefill.request)
        self._prefilling = waiting
        self.now += seconds
        self._step += 1
        self._context += num_rows
        for request in started:
            self._prefill_context -= request.prompt_tokens
            if math.isnan(self._log.first_token_s[request.number]):
                self._log.first_token_s[request.number] = self.now
            self._start_row(request)
        self._end_rows()

    def _count_load_pages(self) -> int:
        """Returns how many adapter pages a step may load: the rule of `LoadBudget`."""
        num_rows, costs = len(self._rows), self.settings.machine.costs
        if not num_rows or not self._page_load_s:
            return self.settings.machine.num_pages
        num_waiting = sum(1 for prefill in self._prefilling if prefill.load_pages)
        share = max(MIN_LOAD_SHARE, (num_waiting - 1) / num_rows)
        return max(1, int(share * (costs.step_s + num_rows * costs.decode_s) / self._page_load_s))

    def _run_decode_steps(self, until_s: float) -> bool:
        """Runs steps until a row ends, a request or fetch is due, or the pool is full. Returns False if `until_s` came
        first.
        """
        costs, num_rows = self.settings.machine.costs, len(self._rows)
        step_s = costs.step_s + num_rows * costs.decode_s + self._context * costs.context_token_s
        growth_s = num_rows * costs.context_token_s / 2
        steps = self._rows[0].end_step - self._step
        machine = self.settings.machine
        free_pages = machine.num_pages - self._count_kv_pages() - self._adapter_pages
        if free_pages < 0 and not self._evict(-1):
            return self._preempt()
        room = (free_pages + self._idle_pages) * machine.block_tokens / num_rows
        steps = min(steps, max(1, int(room)))
        event_s = self._fetches[0][0] if self._fetches else math.inf
        if self._waiting and self._waiting[0].ready_s > self.now:
            event_s = min(event_s, self._waiting[0].ready_s)
        if event_s < math.inf:
            steps = min(steps, 1 + _count_steps(event_s - self.now, step_s, growth_s))
        if until_s < math.inf:
            whole = _count_steps(until_s - self.now, step_s, growth_s)
            if whole < steps:
                self._skip_steps(whole, step_s, growth_s)
                return False
        self._skip_steps(steps, step_s, growth_s)
        self._end_rows()
        return True

    def _skip_steps(self, steps: int, step_s: float, growth_s: float) -> None:
        self.now += steps * step_s + growth_s * steps * (steps - 1)
        self._step += steps
        self._context += steps * len(self._rows)

    def _end_rows(self) -> None:
        while self._rows and self._rows[0].end_step <= self._step:
            row = heapq.heappop(self._rows)
            self._log.end_s[row.request.number] = self.now
            self.unfinished_tokens -= row.request.prompt_tokens + row.request.output_tokens
            self._leave(row)

    def _leave(self, row: _Row) -> None:
        self._context -= row.offset + self._step
        adapter = row.request.adapter
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._idle[adapter] = None
            self._idle_pages += self.pages_of(adapter)

    def _preempt(self) -> bool:
        """Swaps the newest row out."""
        row = max(self._rows, key=lambda row: row.order)
        if len(self._rows) == 1:
            # Even a single request gets more pages than the pool has. Production refuses such requests.
            self._skip_steps(1, self.settings.machine.costs.step_s, 0.0)
            self._end_rows()
            return True
        self._rows.remove(row)
        heapq.heapify(self._rows)
        self._leave(row)
        context, left = row.offset + self._step, row.end_step - self._step
        request = row.request
        self.unfinished_tokens += context + left - request.prompt_tokens - request.output_tokens
        pages = -(-context // self.settings.machine.block_tokens)
        self._extra_s += pages * self.settings.machine.costs.page_copy_s
        self._waiting.appendleft(ModelRequest(self.now, request.number, request.adapter, context, left, 0))
        self.num_preemptions += 1
        return True


def _count_steps(seconds: float, step_s: float, growth_s: float) -> int:
    """Returns the most steps that fit: n * step_s + n * (n - 1) * growth_s <= seconds."""
    if seconds < step_s:
        return 0
    if growth_s <= 0:
        return int(seconds / step_s)
    half = (step_s - growth_s) / (2 * growth_s)
    return int(math.sqrt(half * half + seconds / growth_s) - half)
