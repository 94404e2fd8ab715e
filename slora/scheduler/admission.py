"""Starts those who wait: whose turn it is, what they need, and what they find there already.

The pages of a first chunk and of the adapter are taken together or not at all. A request whose adapter is on the host
takes its pages and place and computes nothing until the last slice is in the pool; others start behind it.
"""

from typing import NamedTuple

from slora.pool.residency import Resident
from slora.pool.tenant import Tenant
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.charges import Charges
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.load_pace import LoadPace
from slora.scheduler.prefix_cache import PrefixCache
from slora.scheduler.reclaim import Reclaim
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.swapping import Swapping
from slora.scheduler.unified_memory import UnifiedMemory
from slora.scheduler_config import SchedulerConfig
from slora_adapters.version import AdapterVersion


class _Needs(NamedTuple):
    """num_found: blocks of its KV that are in the prefix cache. num_tokens: of its first chunk; num_held: tokens that
    it gets pages for. new_pages: what must be free. most_pages: by how much its tenant's held pages may grow. loads:
    its adapter is on the host only."""

    num_found: int
    num_tokens: int
    num_held: int
    new_pages: int
    most_pages: int
    loads: bool


class Admission:
    """Serves one step after the other."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: UnifiedMemory,
        supply: AdapterSupply,
        lifecycle: Lifecycle,
        reclaim: Reclaim,
        prefixes: PrefixCache,
        swapping: Swapping,
        charges: Charges,
        pace: LoadPace,
    ) -> None:
        self._config = config
        self._memory = memory
        self._supply = supply
        self._lifecycle = lifecycle
        self._queue, self._batch = lifecycle.queue, lifecycle.batch
        self._reclaim = reclaim
        self._prefixes = prefixes
        self._swapping = swapping
        self._charges = charges
        self._pace = pace
        self._is_alone = False  # whoever starts first in this step: nobody decodes beside it
        self._load_pages = 0  # of adapters that may still be loaded in this step

    def continue_loads(self, plan: StepPlan) -> None:
        """Beside those who decode, a slice in each step; alone, all at once."""
        num_waiting = sum(one.resident is not None and not one.resident.is_loaded for one in self._batch)
        num_decoding = len(self._batch) - num_waiting
        self._is_alone = not num_decoding
        most = self._memory.pool.num_pages if self._is_alone else self._pace.pages(num_decoding, num_waiting)
        self._load_pages = self._supply.advance(plan, most)

    def admit(self, plan: StepPlan, budget: int) -> None:
        """Starts those whose turn it is, until one does not fit: nobody overtakes it to its pages.

        Two exceptions: a tenant at its ceiling is passed over, and one below its floor goes ahead.
        """
        passed_over: set[Tenant] = set()
        while budget > 0 and len(self._queue):
            sequence = self._queue.next(passed_over)
            if sequence is None or sequence.num_choices > self._batch.num_free_places:
                break
            version = sequence.request.adapter
            if version is not None and self._supply.num_pages(version) is None:
                self._lifecycle.move_aside(sequence)
                continue
            needs = self._needs(sequence, budget)
            if sequence.tenant.exceeds(needs.most_pages):
                passed_over.add(sequence.tenant)
            elif self._take(sequence, needs, plan):
                budget -= self._start(sequence, needs, plan)
            elif self._memory.tenants.has_floors:
                passed_over.update(t for t in self._memory.tenants if t.num_pages >= t.min_pages)
                passed_over.add(sequence.tenant)
            else:
                break

    def _needs(self, sequence: Sequence, budget: int) -> _Needs:
        """What it takes to start now: the pages of its first chunk and of its adapter together."""
        self._lifecycle.switch_rope(sequence)
        swapped, block_tokens = sequence.swapped, self._config.footprint.block_tokens
        num_found = self._prefixes.count(sequence) if swapped is None else 0
        num_computed = num_found * block_tokens if swapped is None else swapped.num_computed
        num_tokens = min(len(sequence.token_ids) - num_computed, sequence.chunk_limit, budget)
        num_held = num_computed + num_tokens
        if sequence.is_overdue:
            num_held = self._most_held(sequence, num_computed)
        num_blocks = -(-num_held // block_tokens)
        num_present = num_found if swapped is None else swapped.num_freed
        version = sequence.request.adapter
        resident = self._supply.find(version) if version is not None else None
        adapter_pages = (self._supply.num_pages(version) or 0) if version is not None else 0
        loads = version is not None and resident is None
        new_pages = num_blocks - num_present + (adapter_pages if loads else 0)
        # What is cached so far, and will be held.
        taken = self._prefixes.num_pages(num_found)
        taken += adapter_pages if resident is not None and not resident.num_users else 0
        return _Needs(num_found, num_tokens, num_held, new_pages, new_pages + taken, loads)

    def _most_held(self, sequence: Sequence, num_computed: int) -> int:
        """Tokens whose pages are as many as it ever needs at once until its next token: with a window it then takes
        one ahead for each that it gives back."""
        footprint, num_tokens = self._config.footprint, len(sequence.token_ids)
        first_block = footprint.first_token_seen(num_computed) // footprint.block_tokens
        most_blocks = first_block + footprint.pages(num_tokens, sequence.chunk_limit)
        return min(num_tokens, most_blocks * footprint.block_tokens)

    def _take(self, sequence: Sequence, needs: _Needs, plan: StepPlan) -> bool:
        """Holds what is there of it and makes room for the rest; or nothing at all."""
        tenant, residency = sequence.tenant, self._memory.residency
        within_floor = tenant.num_pages + needs.new_pages <= tenant.min_pages
        alone = self._batch.is_left_to(sequence)
        # Running sequences will soon want a page each, and choices one as soon as they fork: starting on the very last
        # ones would preempt at once.
        spare_pages = len(self._batch) // self._config.footprint.block_tokens + sequence.num_choices
        spare_pages = 0 if alone or within_floor else spare_pages
        num_pages = needs.new_pages + spare_pages
        if not within_floor and not self._memory.could_free(
            num_pages, tenant, ignore_pins=self._reclaim.may_take_pins(sequence)
        ):
            return False
        version = sequence.request.adapter
        resident = self._supply.find(version) if version is not None else None
        if resident is not None:
            residency.acquire(resident)
        if needs.num_found:
            self._prefixes.adopt(sequence, needs.num_found)
        has_room = not needs.loads or residency.can_make_room()
        over_pins = False
        while has_room and not self._reclaim.make_room(needs.new_pages, sequence, over_pins=over_pins):
            others = [s for s in self._batch if s.tenant is not tenant and s.tenant.is_above_floor]
            has_room = within_floor and not over_pins
            if has_room and others:
                self._reclaim.preempt(self._queue.victim(others), plan)
            else:
                over_pins = True
        if not has_room:
            sequence.blocks.release(self._memory.kv)
            sequence.num_computed = sequence.num_named = 0
            if resident is not None:
                residency.release(resident)
            return False
        sequence.resident = resident
        return True

    def _start(self, sequence: Sequence, needs: _Needs, plan: StepPlan) -> int:
        """It runs from now on. Returns how many tokens this step computes of it: none while its adapter loads."""
        version = sequence.request.adapter
        if version is not None and sequence.resident is None:
            sequence.resident = self._load(version, sequence.tenant, plan)
            self._memory.residency.acquire(sequence.resident)
        self._lifecycle.leave_queue(sequence)
        if sequence.swapped is not None:
            self._swapping.restore(sequence, plan)
        elif not sequence.num_preemptions:
            self._prefixes.count_hits(sequence)
        missing = sequence.blocks.pages_missing(needs.num_held)
        sequence.blocks.extend(self._memory.kv.allocate(missing, sequence.tenant))
        self._batch.seat(sequence)
        plan.started.append(sequence)
        self._batch.join(sequence)
        if sequence.resident is not None and not self._supply.is_ready(sequence.resident):
            return 0
        if self._is_alone:
            self._is_alone = False
            self._load_pages = min(self._load_pages, self._pace.pages(num_decoding=1, num_waiting=1))
        plan.add(sequence, needs.num_tokens)
        self._charges.prompt(sequence, needs.num_tokens)
        return needs.num_tokens

    def _load(self, version: AdapterVersion, tenant: Tenant, plan: StepPlan) -> Resident:
        """The tenant pays for the bytes, unless another one that had more than its share pushed the adapter out."""
        self._memory.residency.make_room(tenant)
        is_charged = not self._memory.residency.was_pushed_out(version)
        resident = self._supply.begin(version, self._memory.tenants.find(version.tenant))
        if is_charged:
            self._charges.load(tenant, resident.num_bytes)
        self._load_pages = self._supply.advance(plan, self._load_pages)
        return resident

    def make_way(self, plan: StepPlan) -> bool:
        """Nobody computes, for all who run are beams that wait for one who gave way, and it found no place or pages:
        another request gives way to whoever is next. False if there is none.

        Each time somebody can start then, so it goes on; at the latest when only its own search runs, which fits.
        """
        sequence = self._queue.next()
        if sequence is None:
            return False
        others = [one for one in self._batch if one.search is not sequence.search or one.search is None]
        if sequence.tenant.max_pages is not None:  # at its ceiling, it is its tenant's own pages that count
            others = [one for one in others if one.tenant is sequence.tenant] or others
        if not others:
            return False
        self._reclaim.preempt(self._queue.victim(others), plan)
        return True

    def load_ahead(self, plan: StepPlan) -> int:
        """Brings adapters of those who are next to the pool while pages are free that nobody else wants soon. Returns
        how many pages of adapters may still be loaded in this step."""
        free_pages = self._memory.pool.num_free - len(self._batch)
        if self._load_pages <= 0 or free_pages <= 0 or not len(self._queue):
            return self._load_pages
        for sequence in self._reclaim.upcoming:
            version = sequence.request.adapter
            if version is None or sequence not in self._queue or self._supply.find(version) is not None:
                continue
            num_pages = self._supply.num_pages(version)
            if num_pages is None or num_pages > free_pages or sequence.tenant.exceeds(num_pages):
                continue
            if self._load_pages <= 0 or not self._memory.residency.has_free_slot:
                break
            self._load(version, sequence.tenant, plan)
            free_pages -= num_pages
        return self._load_pages
