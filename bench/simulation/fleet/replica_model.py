"""A fast model of one replica: the decisions of the production scheduler, without tokens, pages and plans.

While requests wait, compute their prompts or load adapters, the model goes step by step, and decides as the scheduler
does: fair among tenants, with its budgets for prompts and loads. All other steps are computed in one go until the next
request ends or arrives. It has the costs of the scheduler's simulation. Prefixes are not cached.
"""

import heapq
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.fleet.model_adapters import AdapterSettings, ModelAdapters
from bench.simulation.fleet.model_queue import ModelQueue
from bench.simulation.fleet.model_request import FleetLog, ModelRequest
from bench.simulation.machine import Machine
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.budgets import LoadBudget, PrefillBudget, short_prefill_s
from slora.scheduler.charges import OUTPUT_PRICE
from slora.scheduler.preemption import LOOK_AHEAD

# A decoding request: (step at which it ends, number, offset, request). Its context at step s is offset + s tokens.
_Row = tuple[int, int, int, ModelRequest]


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings that all replicas of a fleet share.

    num_tenants: adapter i belongs to tenant i % num_tenants.
    swap_share: the number of host pages for swapping, as a fraction of the pool's pages.
    """

    machine: Machine
    adapters: AdapterSettings
    num_tenants: int = 1000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    swap_share: float = 0.25


class ReplicaModel:
    """One replica. The caller calls `advance` to a time before it submits a request of that time.

    now: the end of the last step. It may be later than the time to which the replica was advanced.
    unfinished_tokens: prompt and answer tokens of unfinished requests, computed ones included.
    """

    def __init__(self, settings: ReplicaSettings, log: FleetLog) -> None:
        machine = settings.machine
        self.settings = settings
        self.adapters = ModelAdapters(settings.adapters, machine)
        self.num_hits = self.num_preemptions = 0
        self._log = log
        self._load_budget = LoadBudget(machine.costs, machine.full_page_bytes, machine.num_pages, None)
        self._short_tokens = round(machine.costs.tokens(short_prefill_s(machine.costs)))
        self._page_load_s = machine.costs.load_s(machine.full_page_bytes)
        self._clear()

    def _clear(self) -> None:
        self.now = 0.0
        self.unfinished_tokens = 0
        self._arriving: deque[ModelRequest] = deque()
        self._queue = ModelQueue()
        self._tenants: dict[int, TenantAccount] = {}
        self._prefilling: list[ModelRequest] = []  # Sorted by number.
        self._rows: list[_Row] = []  # A heap.
        self._row_counts: Counter[TenantAccount] = Counter()
        # For each remainder of step / block_tokens: the rows that need a new page in these steps.
        self._crossings = [0] * self.settings.machine.block_tokens
        self._context = self._step = self._kv_pages = 0
        self._swap_pages = int(self.settings.swap_share * self.settings.machine.num_pages)
        self._copied_pages = self._loaded_pages = self._prefill_tokens = 0  # Of the next step.

    @property
    def num_waiting(self) -> int:
        return len(self._arriving) + len(self._queue) + self.adapters.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._prefilling)

    @property
    def pool_use(self) -> float:
        """The share of pages that running requests hold."""
        held = self._kv_pages + self.adapters.num_pages - self.adapters.num_idle_pages
        return held / self.settings.machine.num_pages

    @property
    def _num_free(self) -> int:
        """Free pages, less those that decoding requests need in the next step. May be negative."""
        held = self._kv_pages + self.adapters.num_pages + self._crossings[self._step % len(self._crossings)]
        return self.settings.machine.num_pages - held

    def submit(self, now: float, number: int, adapter: int, prompt_tokens: int, output_tokens: int) -> None:
        self.unfinished_tokens += prompt_tokens + output_tokens
        name = adapter % self.settings.num_tenants
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = TenantAccount(f"tenant-{name}")
        self._arriving.append(ModelRequest(number, now, tenant, adapter, prompt_tokens, output_tokens))

    def advance(self, until_s: float) -> None:
        """Runs all steps that begin before `until_s`."""
        adapters = self.adapters
        while True:
            while self._arriving and self._arriving[0].ready_s <= self.now:
                self._take_in(self._arriving.popleft())
            if adapters.next_fetched_s <= self.now:
                for request in adapters.collect(self.now):
                    self._queue.push(request)
            if len(self._queue) or self._prefilling or adapters.loading or self._copied_pages:
                if self.now >= until_s:
                    return
                if self._run_step():
                    continue
            elif self._rows:
                if self.now >= until_s:
                    return
                self._run_decode_steps(until_s)
                continue
            event_s = min(self._arriving[0].ready_s if self._arriving else math.inf, adapters.next_fetched_s)
            if event_s == math.inf or event_s > until_s:
                return
            self.now = max(self.now, event_s)

    def fail(self) -> Sequence[ModelRequest]:
        """Returns all unfinished requests. The replica is empty afterwards; its counters continue."""
        self._sync_rows()
        lost = [*self._arriving, *self._queue, *self.adapters.waiting, *self._prefilling]
        lost += [row[3] for row in self._rows]
        self.adapters.clear()
        self._clear()
        return lost

    def _take_in(self, request: ModelRequest) -> None:
        uses = self.adapters.uses
        if request.adapter in uses:
            uses[request.adapter] += 1
            self.num_hits += 1
        self._enqueue(request)

    def _enqueue(self, request: ModelRequest) -> None:
        if self.adapters.is_missing(request.adapter):
            self.adapters.wait(request, self.now)
        else:
            self._queue.push(request)

    # -- one step as the scheduler plans it -------------------------------------------------------------------------

    def _run_step(self) -> bool:
        """Plans and runs one step. Returns False if there is nothing to compute or to copy."""
        adapters = self.adapters
        if adapters.loading or len(self._queue):
            num_loading = sum(request.adapter in adapters.loading for request in self._prefilling)
            self._load_budget.begin_step(self.num_running - num_loading, num_loading)
            self._load_slices()
        while self._num_free < 0 and self._free_pages():
            pass
        budget = self._begin_budget()
        for request in self._prefilling.copy():
            # A request before this one may have preempted it.
            if request.adapter in adapters.loading or request not in self._prefilling:
                continue
            num_tokens = min(request.num_tokens - request.num_computed, budget.fit(request.tenant))
            if num_tokens > 0 and self._allocate(request, num_tokens):
                budget.spend(request.tenant, num_tokens)
                self._compute(request, num_tokens)
        if len(self._queue):
            self._admit(budget)
            self._load_upcoming()
        if not (self._rows or self._prefill_tokens or self._loaded_pages or self._copied_pages):
            return False
        self._finish_step()
        return True

    def _finish_step(self) -> None:
        costs = self.settings.machine.costs
        self.now += (
            self._decode_step_s
            + self._prefill_tokens * costs.token_s
            + self._loaded_pages * self._page_load_s
            + self._copied_pages * costs.page_copy_s
        )
        prefilled = self._prefill_tokens > 0
        self._copied_pages = self._loaded_pages = self._prefill_tokens = 0
        self._count_steps(1)
        if prefilled:
            self._start_rows()
        self._end_rows()

    @property
    def _decode_step_s(self) -> float:
        costs = self.settings.machine.costs
        return costs.step_s + len(self._rows) * costs.decode_s + self._context * costs.context_token_s

    def _begin_budget(self) -> PrefillBudget:
        loading = self.adapters.loading
        prefilling = {request.tenant for request in self._prefilling if request.adapter not in loading}
        following = self._queue.peek(prefilling)
        if following is not None and self.num_running < self.settings.max_num_seqs:
            prefilling.add(following.tenant)
        num_tokens = self.settings.max_num_batched_tokens - len(self._rows)
        return PrefillBudget(
            self.settings.machine.costs, num_tokens, self._short_tokens, set(self._row_counts), prefilling
        )

    def _admit(self, budget: PrefillBudget) -> None:
        adapters, queue = self.adapters, self._queue
        skipped: set[TenantAccount] = set()
        while budget.num_tokens > 0:
            request = queue.peek(skipped)
            if request is None or budget.left(request.tenant) <= 0:
                return
            tenant = request.tenant
            fitting = budget.fit(tenant)
            if fitting <= 0:
                skipped.add(tenant)
                continue
            if self.num_running >= self.settings.max_num_seqs:
                return
            if adapters.is_missing(request.adapter):
                queue.remove_first(tenant)
                adapters.wait(request, self.now)
                continue
            num_tokens = min(request.num_tokens - request.num_computed, fitting)
            num_reserved = request.num_tokens if request.is_starving else request.num_computed + num_tokens
            num_pages = self._count_pages(num_reserved)
            if not self._reserve(request, num_pages):
                return
            queue.remove_first(tenant)
            budget.spend(tenant, self._start(request, num_tokens, num_pages))

    def _reserve(self, request: ModelRequest, num_pages: int) -> bool:
        """Makes room for KV pages and the adapter, and acquires the adapter if it is in the pool."""
        adapters, adapter = self.adapters, request.adapter
        is_resident = adapter in adapters.uses
        needed = num_pages if is_resident else num_pages + adapters.count_pages(adapter)
        spare = self.num_running // self.settings.machine.block_tokens + 1 if self.num_running else 0
        if needed + spare > self._num_free + adapters.num_idle_pages:
            return False
        if is_resident:
            adapters.acquire(adapter)
        if (is_resident or adapters.make_slot()) and self._evict(needed):
            return True
        if is_resident:
            adapters.release(adapter)
        return False

    def _start(self, request: ModelRequest, num_tokens: int, num_pages: int) -> int:
        """Adds a request to the batch. Returns how many tokens it computes in this step."""
        adapters = self.adapters
        if adapters.is_fetched(request.adapter):
            self._start_load(request)
            adapters.acquire(request.adapter)
            self._load_slices()
        self._kv_pages += num_pages
        request.num_pages = num_pages
        if request.num_host_pages:
            self._copied_pages += request.num_host_pages
            self._swap_pages += request.num_host_pages
            request.num_host_pages = 0
        if request.adapter in adapters.loading:
            insort(self._prefilling, request)
            return 0
        self._load_budget.add_sequence(is_background=False)
        if request.num_generated and num_tokens == request.num_tokens - request.num_computed == 1:
            self._start_row(request)
        else:
            insort(self._prefilling, request)
            self._compute(request, num_tokens)
        return num_tokens

    def _compute(self, request: ModelRequest, num_tokens: int) -> None:
        request.charge_prompt(num_tokens)
        request.num_computed += num_tokens
        self._prefill_tokens += num_tokens

    def _start_load(self, request: ModelRequest) -> None:
        costs = self.settings.machine.costs
        num_bytes = self.adapters.count_bytes(request.adapter)
        request.tenant.charge(costs.tokens(costs.load_s(num_bytes)))
        self.adapters.start_load(request.adapter)

    def _load_slices(self) -> None:
        budget = self._load_budget
        for adapter, left in list(self.adapters.loading.items()):
            count = min(max(0, budget.num_pages), left)
            if not count:
                return
            budget.spend(count)
            self._loaded_pages += count
            self.adapters.advance_load(adapter, count)

    def _load_upcoming(self) -> None:
        """Loads adapters of the next requests into pages that no running request needs soon."""
        free_pages = self._num_free - self.num_running
        if self._load_budget.num_pages <= 0 or free_pages <= 0 or not len(self._queue):
            return
        for request in self._queue.upcoming(LOOK_AHEAD):
            num_pages = self.adapters.count_pages(request.adapter)
            if not self.adapters.is_fetched(request.adapter) or num_pages > free_pages:
                continue
            if self._load_budget.num_pages <= 0 or not self.adapters.has_free_slot:
                return
            self._start_load(request)
            self._load_slices()
            free_pages -= num_pages

    # -- pages ------------------------------------------------------------------------------------------------------

    def _count_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.machine.block_tokens)

    def _allocate(self, request: ModelRequest, num_tokens: int) -> bool:
        """Allocates the pages of the next tokens of a prompt. Returns False if the request itself was preempted."""
        missing = self._count_pages(request.num_computed + num_tokens) - request.num_pages
        if missing <= 0:
            return True
        while missing > self._num_free and self._free_pages():
            if request not in self._prefilling:
                return False
        self._kv_pages += missing
        request.num_pages += missing
        return True

    def _evict(self, num_pages: int) -> bool:
        """Makes `num_pages` free by eviction only. Adapters of the next requests are evicted last."""
        if num_pages <= self._num_free:
            return True
        if num_pages > self._num_free + self.adapters.num_idle_pages:
            return False
        kept = {request.adapter for request in self._queue.upcoming(LOOK_AHEAD)}
        while num_pages > self._num_free:
            if not (self.adapters.evict(kept) or self.adapters.evict(())):
                return False
        return True

    def _free_pages(self) -> bool:
        """Evicts an idle adapter or preempts a request. Returns False if there is neither.

        A single request may get more pages than the pool has. Production refuses such requests.
        """
        if self._evict(self._num_free + 1):
            return True
        if self.num_running == 1:
            return False
        self._sync_rows()
        running = [*self._prefilling, *(row[3] for row in self._rows)]
        self._preempt(self._queue.choose_victim(running, self._count_tenant_pages(running)))
        return True

    def _count_tenant_pages(self, running: list[ModelRequest]) -> dict[TenantAccount, int]:
        """Returns the pages that running requests hold, with their adapters."""
        num_pages: dict[TenantAccount, int] = {}
        adapters = {}
        for request in running:
            adapters[request.adapter] = request.tenant
            held = num_pages.get(request.tenant, 0)
            num_pages[request.tenant] = held + max(request.num_pages, self._count_pages(request.num_computed))
        for adapter, tenant in adapters.items():
            num_pages[tenant] += self.adapters.count_pages(adapter)
        return num_pages

    def _preempt(self, request: ModelRequest) -> None:
        if request in self._prefilling:
            self._prefilling.remove(request)
            self._kv_pages -= request.num_pages
            request.num_pages = 0
            self.adapters.release(request.adapter)
        else:
            row = next(row for row in self._rows if row[3] is request)
            self._rows.remove(row)
            heapq.heapify(self._rows)
            self._remove_row(row)
        self.num_preemptions += 1
        request.record_preemption()
        costs = self.settings.machine.costs
        request.num_computed = min(request.num_computed, request.num_tokens - 1)
        pages = self._count_pages(request.num_computed)
        if 0 < pages <= self._swap_pages and costs.swap_s(pages) < costs.prefill_s(request.num_computed):
            self._swap_pages -= pages
            self._copied_pages += pages
            request.num_host_pages = pages
        else:
            request.num_computed = 0
        self._enqueue(request)

    # -- decoding requests ------------------------------------------------------------------------------------------

    def _start_rows(self) -> None:
        """Samples the first token of the requests whose context has been computed."""
        done = [request for request in self._prefilling if request.num_computed == request.num_tokens]
        for request in done:
            self._prefilling.remove(request)
            request.num_generated += 1
            request.tenant.charge(OUTPUT_PRICE)
            if math.isnan(self._log.first_token_s[request.number]):
                self._log.first_token_s[request.number] = self.now
            self._start_row(request)

    def _start_row(self, request: ModelRequest) -> None:
        """Adds a row that decodes from the step `_step` on. Its last token is not computed yet."""
        offset = request.num_tokens - self._step
        end = self._step + request.output_tokens - request.num_generated
        heapq.heappush(self._rows, (end, request.number, offset, request))
        self._context += request.num_tokens
        self._row_counts[request.tenant] += 1
        self._crossings[(1 - offset) % len(self._crossings)] += 1
        self._kv_pages += self._count_pages(request.num_computed) - request.num_pages
        request.num_pages = 0

    def _remove_row(self, row: _Row) -> None:
        _, _, offset, request = row
        self._context -= offset + self._step
        self._row_counts[request.tenant] -= 1
        if not self._row_counts[request.tenant]:
            del self._row_counts[request.tenant]
        self._crossings[(1 - offset) % len(self._crossings)] -= 1
        self._kv_pages -= self._count_pages(offset + self._step - 1)
        self.adapters.release(request.adapter)

    def _sync_rows(self) -> None:
        """Writes the progress of the rows into their requests."""
        for end, _, offset, request in self._rows:
            request.num_generated = request.output_tokens - (end - self._step)
            request.num_computed = offset + self._step - 1

    def _end_rows(self) -> None:
        while self._rows and self._rows[0][0] <= self._step:
            row = heapq.heappop(self._rows)
            request = row[3]
            self._log.end_s[request.number] = self.now
            self.unfinished_tokens -= request.prompt_tokens + request.output_tokens
            self._remove_row(row)

    def _run_decode_steps(self, until_s: float) -> None:
        """Runs steps until a row ends, an adapter is fetched, the pool is full, or the clock reaches `until_s`."""
        step_s = self._decode_step_s
        growth_s = len(self._rows) * self.settings.machine.costs.context_token_s / 2
        steps = self._rows[0][0] - self._step
        event_s = min(until_s, self.adapters.next_fetched_s)
        if event_s < math.inf:
            steps = min(steps, 1 + _count_steps(event_s - self.now, step_s, growth_s))
        steps = self._limit_to_pages(steps)
        if not steps:
            if self._free_pages():
                return
            steps = 1
        self.now += steps * step_s + growth_s * steps * (steps - 1)
        self._count_steps(steps)
        self._end_rows()

    def _limit_to_pages(self, steps: int) -> int:
        """Returns how many of the next steps the free pages suffice for."""
        num_rows, block = len(self._rows), len(self._crossings)
        free = self._num_free + self._crossings[self._step % block]
        if (steps // block + 1) * num_rows <= free:
            return steps
        whole = max(0, free) // num_rows
        free -= whole * num_rows
        for more in range(block):
            free -= self._crossings[(self._step + more) % block]
            if free < 0:
                return min(steps, whole * block + more)
        return min(steps, (whole + 1) * block)

    def _count_steps(self, steps: int) -> None:
        """Counts steps in which each row has computed one token."""
        block = len(self._crossings)
        whole, rest = divmod(steps, block)
        pages = whole * len(self._rows)
        for step in range(self._step, self._step + rest):
            pages += self._crossings[step % block]
        self._kv_pages += pages
        self._context += steps * len(self._rows)
        self._step += steps
        for tenant, count in self._row_counts.items():
            tenant.service += OUTPUT_PRICE * count * steps


def _count_steps(seconds: float, step_s: float, growth_s: float) -> int:
    """Returns the most steps that fit: n * step_s + n * (n - 1) * growth_s <= seconds."""
    if seconds < step_s:
        return 0
    if growth_s <= 0:
        return int(seconds / step_s)
    half = (step_s - growth_s) / (2 * growth_s)
    return int(math.sqrt(half * half + seconds / growth_s) - half)
