"""Admission: moves waiting sequences into the batch.

The pages of the first chunk and of the adapter are allocated together or not at all. A request whose adapter is on the
host but not in the pool is admitted, and gets its pages and its place in the batch. It computes nothing until the last
slice of the adapter is loaded. Meanwhile later sequences can be admitted.
"""

from typing import NamedTuple

from slora.pool.residency import Resident
from slora.pool.tenant_account import TenantAccount
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
    """What a sequence needs to be admitted.

    num_found: number of its leading blocks that the prefix cache covers.
    num_tokens: tokens of its first chunk.
    num_held: tokens that pages are allocated for.
    new_pages: number of pages that must be free.
    most_pages: growth of its tenant's held pages.
    loads: whether its adapter is on the host but not in the pool.
    """

    num_found: int
    num_tokens: int
    num_held: int
    new_pages: int
    most_pages: int
    loads: bool


class Admission:
    """Admits sequences step by step: `continue_loads`, then `admit`, then `load_ahead`."""

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
        self._is_alone = False  # no sequence decodes in this step: the first one admitted runs alone
        self._load_pages = 0  # adapter pages that this step may still load

    def continue_loads(self, plan: StepPlan) -> None:
        """Continues the loads under way: one slice per step beside decoding sequences, or all at once if no sequence
        decodes.
        """
        num_waiting = sum(one.resident is not None and not one.resident.is_loaded for one in self._batch)
        num_decoding = len(self._batch) - num_waiting
        self._is_alone = not num_decoding
        most = self._memory.pool.num_pages if self._is_alone else self._pace.pages(num_decoding, num_waiting)
        self._load_pages = self._supply.advance(plan, most)

    def admit(self, plan: StepPlan, budget: int) -> None:
        """Admits sequences in the queue's order until one does not fit. No sequence overtakes it to get its pages.

        There are two exceptions: a tenant at its ceiling is passed over, and a tenant below its floor goes ahead.
        """
        passed_over: set[TenantAccount] = set()
        while budget > 0 and len(self._queue):
            sequence = self._queue.next(passed_over)
            if sequence is None or sequence.num_choices > self._batch.num_free_places:
                break
            version = sequence.request.adapter
            if version is not None and self._supply.num_pages(version) is None:
                self._lifecycle.move_aside(sequence)
                continue
            needs = self._needs(sequence, budget)
            if sequence.tenant.would_exceed_ceiling(needs.most_pages):
                passed_over.add(sequence.tenant)
            elif self._take(sequence, needs, plan):
                budget -= self._start(sequence, needs, plan)
            elif self._memory.tenants.has_floors:
                passed_over.update(t for t in self._memory.tenants if t.num_pages >= t.min_pages)
                passed_over.add(sequence.tenant)
            else:
                break

    def _needs(self, sequence: Sequence, budget: int) -> _Needs:
        """What the sequence needs to be admitted now: the pages of its first chunk and of its adapter."""
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
        # Cached pages that will become held.
        taken = self._prefixes.num_pages(num_found)
        taken += adapter_pages if resident is not None and not resident.num_users else 0
        return _Needs(num_found, num_tokens, num_held, new_pages, new_pages + taken, loads)

    def _most_held(self, sequence: Sequence, num_computed: int) -> int:
        """The tokens whose pages cover all that an overdue sequence needs at once until its next token.

        With a sliding window these are fewer than all of its tokens: it then allocates one new page for each page that
        it frees.
        """
        footprint, num_tokens = self._config.footprint, len(sequence.token_ids)
        first_block = footprint.first_token_seen(num_computed) // footprint.block_tokens
        most_blocks = first_block + footprint.pages(num_tokens, sequence.chunk_limit)
        return min(num_tokens, most_blocks * footprint.block_tokens)

    def _take(self, sequence: Sequence, needs: _Needs, plan: StepPlan) -> bool:
        """Acquires what the sequence needs and already is in the pool, and makes room for the rest.

        On failure it acquires nothing.
        """
        tenant, residency = sequence.tenant, self._memory.residency
        within_floor = tenant.num_pages + needs.new_pages <= tenant.min_pages
        alone = self._batch.is_left_to(sequence)
        # Running sequences will soon need one more page each, and choices one as soon as they fork. Admitting a
        # sequence to the very last pages would cause a preemption at once.
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
        has_room = not needs.loads or residency.can_free_slot()
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
        """Adds the sequence to the batch.

        Returns the number of its tokens that this step computes: 0 while its adapter is loading.
        """
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

    def _load(self, version: AdapterVersion, tenant: TenantAccount, plan: StepPlan) -> Resident:
        """Starts loading an adapter.

        Its load is charged to `tenant`, unless the adapter was evicted for a tenant that exceeded its share.
        """
        self._memory.residency.ensure_free_slot(tenant)
        is_charged = not self._memory.residency.was_displaced(version)
        resident = self._supply.begin(version, self._memory.tenants.find(version.tenant))
        if is_charged:
            self._charges.load(tenant, resident.num_bytes)
        self._load_pages = self._supply.advance(plan, self._load_pages)
        return resident

    def make_way(self, plan: StepPlan) -> bool:
        """Resolves a deadlock of beams: every running sequence is a beam that waits for a preempted beam, which finds
        no room.

        Preempts a sequence of another request in favour of the next sequence in the queue. Returns False if there is
        none to preempt.

        The caller may repeat this. It ends at the latest when only one search runs, and `Lifecycle` guarantees that one
        search fits.
        """
        sequence = self._queue.next()
        if sequence is None:
            return False
        others = [one for one in self._batch if one.search is not sequence.search or one.search is None]
        if sequence.tenant.max_pages is not None:  # at its ceiling only pages of its own tenant help
            others = [one for one in others if one.tenant is sequence.tenant] or others
        if not others:
            return False
        self._reclaim.preempt(self._queue.victim(others), plan)
        return True

    def load_ahead(self, plan: StepPlan) -> int:
        """Loads adapters of the next sequences in the queue into pages that no running sequence needs soon.

        Returns how many adapter pages this step may still load.
        """
        free_pages = self._memory.pool.num_free - len(self._batch)
        if self._load_pages <= 0 or free_pages <= 0 or not len(self._queue):
            return self._load_pages
        for sequence in self._reclaim.upcoming:
            version = sequence.request.adapter
            if version is None or sequence not in self._queue or self._supply.find(version) is not None:
                continue
            num_pages = self._supply.num_pages(version)
            if num_pages is None or num_pages > free_pages or sequence.tenant.would_exceed_ceiling(num_pages):
                continue
            if self._load_pages <= 0 or not self._memory.residency.has_free_slot:
                break
            self._load(version, sequence.tenant, plan)
            free_pages -= num_pages
        return self._load_pages
