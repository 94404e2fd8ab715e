"""Admission: moves waiting sequences into the batch.

The pages of the first chunk and of all adapters of the request are allocated together or not at all. A request is also
admitted if an adapter is on the host but not in the pool. It gets its pages and its place in the batch, but computes
nothing until the last slice of its last adapter is loaded. Meanwhile later sequences can be admitted.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from slora.memory.tenant_account import TenantAccount
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.adapter_loading import AdapterLoading
from slora.scheduler.budgets import BackgroundBudget, PrefillBudget
from slora.scheduler.charges import charge_prompt
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.preemption import Preemption
from slora.scheduler.prefix_cache import PrefixCache
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora_adapters.version import AdapterVersion


class _Needs(NamedTuple):
    """What a sequence needs to be admitted."""

    num_cached_blocks: int  # Number of leading blocks that the prefix cache covers.
    num_tokens: int  # Number of tokens in the first chunk.
    num_reserved_tokens: int  # Number of tokens for which pages are allocated.
    new_pages: int  # Number of pages that must be free.
    num_more_held: int  # Number of additional pages that the tenant will hold.
    to_load: list[AdapterVersion]  # The sequence's adapters that are on the host but not in the pool.


class Admission:
    """Admits sequences step by step: `admit`, then `admit_background`, then `load_upcoming`."""

    def __init__(
        self,
        paging: UnifiedPaging,
        adapters: AdapterLoading,
        prefixes: PrefixCache,
        lifecycle: Lifecycle,
        preemption: Preemption,
    ) -> None:
        self._paging = paging
        self._adapters = adapters
        self._prefixes = prefixes
        self._lifecycle = lifecycle
        self._queue, self._batch = lifecycle.queue, lifecycle.batch
        self._preemption = preemption
        self._at_ceiling: set[TenantAccount] = set()

    def has_place(self, sequence: Sequence) -> bool:
        """Whether the batch has a place for a sequence, or another tenant has to yield one."""
        if self._batch.free_capacity:
            return True
        return self._queue.choose_displaced(self._batch, sequence, 0) is not None

    def count_tokens(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Returns how many of `num_tokens` tokens a waiting sequence that has a place would compute in this step. None
        if it can't be admitted now.
        """
        if sequence.num_pending or self._adapters.find_missing(sequence):
            return None
        needs = self._measure_needs(sequence, lambda start: num_tokens)
        if sequence.tenant.would_exceed_ceiling(needs.num_more_held) or not self._has_room(sequence, needs):
            return None
        return needs.num_tokens

    def admit(self, plan: StepPlan, budget: PrefillBudget) -> None:
        """Admits interactive sequences in the queue's order until a sequence does not fit. All later sequences then
        wait, so that they do not take the pages that this sequence needs.

        There are exceptions: a tenant at its ceiling is skipped, and so is a tenant that has used its part of the
        budget. A tenant below its floor goes ahead. A sequence that does not fit preempts background sequences. If all
        places are taken, tenants with more than their share yield some of them to the sequence.
        """
        self._at_ceiling = set()
        skipped: set[TenantAccount] = set()
        while len(self._queue):
            sequence = self._queue.peek(skipped)
            # If every token of the step is a decode row, a row that yields its place also yields its token.
            is_full = budget.num_tokens <= 0 and not self._batch.free_capacity
            if sequence is None or sequence.is_background:
                break
            if budget.left(sequence.tenant) <= 0 and not is_full:
                break
            if (
                sequence.num_pending
            ):  # Preempted while a step computes its last token, which is known after this step.
                break
            fit = partial(_fit_prompt, budget, sequence, at_least=int(is_full))
            if fit(0) <= 0:
                skipped.add(sequence.tenant)
                continue
            if self._adapters.find_missing(sequence):
                self._lifecycle.wait_for_adapters(sequence)
                continue
            needs = self._measure_needs(sequence, fit)
            has_room = self._has_room(sequence, needs)
            if sequence.tenant.would_exceed_ceiling(needs.num_more_held):
                skipped.add(sequence.tenant)
                self._at_ceiling.add(sequence.tenant)
            elif has_room and not self._take_places(sequence, plan, budget):
                # Another tenant may have no place at all. Then others have to yield one to it.
                running = self._batch.num_places.keys()
                if sequence.tenant not in running or running <= skipped:
                    break
                skipped.update(running)
            elif has_room and self._reserve(sequence, needs, plan):
                num_tokens = self._start(sequence, needs, plan)
                budget.spend(sequence.tenant, num_tokens, sequence.num_computed)
            elif self._preemption.preempt_background(plan):
                continue
            elif self._paging.tenants.has_floors:
                skipped.update(t for t in self._paging.tenants if t.num_pages >= t.min_pages)
                skipped.add(sequence.tenant)
            else:
                break

    def admit_background(self, plan: StepPlan, budget: BackgroundBudget) -> None:
        """Admits background sequences, unless an interactive sequence of a tenant below its ceiling waits.

        Called after `admit`.
        """
        skipped = self._at_ceiling.copy()
        while len(self._queue):
            sequence = self._queue.peek(skipped)
            if sequence is None or not sequence.is_background or sequence.num_pending:
                break
            if self._adapters.find_missing(sequence):
                self._lifecycle.wait_for_adapters(sequence)
                continue
            fit = partial(budget.fit, sequence, sequence.max_chunk_tokens)
            if not fit(0):
                break
            needs = self._measure_needs(sequence, fit)
            if not needs.num_tokens:
                break
            if sequence.tenant.would_exceed_ceiling(needs.num_more_held):
                skipped.add(sequence.tenant)
            elif not (self._has_room(sequence, needs) and self._take_places(sequence, plan)):
                break
            elif self._reserve(sequence, needs, plan):
                budget.spend(sequence, self._start(sequence, needs, plan))
            else:
                break

    def _has_room(self, sequence: Sequence, needs: _Needs) -> bool:
        """Returns False if the sequence could not get its pages even by evicting all evictable items."""
        if _is_within_floor(sequence.tenant, needs):
            return True
        # Running sequences will soon need further pages, and each choice needs one when it forks, and a recurrent state
        # of its own. A sequence that took the very last pages would immediately cause a preemption.
        footprint = self._paging.footprint
        spare_pages = len(self._batch) // footprint.block_tokens + sequence.num_places
        spare_pages += max(0, sequence.num_places - 1) * footprint.state_pages
        if self._batch.runs_alone(sequence):
            spare_pages = 0
        return self._paging.could_free(
            needs.new_pages + spare_pages,
            sequence.tenant,
            ignore_pins=self._preemption.may_evict_pinned(sequence),
        )

    def _take_places(self, sequence: Sequence, plan: StepPlan, budget: PrefillBudget | None = None) -> bool:
        """Takes a place for each choice of the sequence, or as many as there are. Returns False if there is none.

        Tenants that hold more than their share of the places yield some of them. budget: gets the tokens of the rows
        that are removed from the plan. Returns False also if it has no token even then.
        """
        while self._batch.free_capacity < sequence.num_choices:
            num_tokens = plan.num_tokens
            if not self._preemption.displace(sequence, plan):
                break
            if budget is not None:
                budget.num_tokens += num_tokens - plan.num_tokens
        if budget is not None and budget.num_tokens <= 0:
            return False
        sequence.num_places = min(sequence.num_choices, self._batch.free_capacity)
        return sequence.num_places > 0

    def _measure_needs(self, sequence: Sequence, fit: Callable[[int], int]) -> _Needs:
        """Returns what the sequence needs to be admitted now: the pages of its first chunk and of its adapters.

        fit: returns how many of its tokens fit into the step from a position on.
        """
        self._lifecycle.restart_if_needed(sequence)
        footprint, swapped = self._paging.footprint, sequence.swapped
        block_tokens = footprint.block_tokens
        num_cached_blocks = self._prefixes.count_cached(sequence) if swapped is None else 0
        num_computed = num_cached_blocks * block_tokens if swapped is None else swapped.num_computed
        num_tokens = min(len(sequence.token_ids) - num_computed, sequence.max_chunk_tokens, fit(num_computed))
        num_tokens = self._prefixes.limit_chunk(sequence, num_computed, num_tokens)
        num_reserved_tokens = num_computed + num_tokens
        if sequence.is_starving:
            num_reserved_tokens = self._count_reserved_tokens(sequence, num_computed)
        num_blocks = -(-num_reserved_tokens // block_tokens)
        num_present = num_cached_blocks if swapped is None else swapped.num_freed
        # A state of the prefix cache is copied.
        new_pages = num_blocks - num_present + footprint.state_pages
        # Pages that are cached now and will be held by this sequence.
        taken = self._prefixes.num_pages(num_cached_blocks)
        to_load = []
        for version in sequence.request.versions:
            resident = self._adapters.find(version)
            if resident is None:
                to_load.append(version)
                new_pages += self._adapters.num_pages(version) or 0
            elif not resident.num_users:
                taken += len(resident.pages)
        return _Needs(
            num_cached_blocks, num_tokens, num_reserved_tokens, new_pages, new_pages + taken, to_load
        )

    def _count_reserved_tokens(self, sequence: Sequence, num_computed: int) -> int:
        """Returns the number of tokens for which a starving sequence allocates pages when it is admitted.

        With these pages, the sequence needs no further free page until its next token. With a sliding window, this
        number may be less than the number of its tokens, because the sequence frees pages while it allocates others.
        """
        footprint, num_tokens = self._paging.footprint, len(sequence.token_ids)
        first_block = footprint.first_token_seen(num_computed) // footprint.block_tokens
        most_pages = footprint.pages(num_tokens, sequence.max_chunk_tokens)
        most_blocks = first_block + most_pages - footprint.state_pages
        return min(num_tokens, most_blocks * footprint.block_tokens)

    def _reserve(self, sequence: Sequence, needs: _Needs, plan: StepPlan) -> bool:
        """Acquires the needed prefix blocks and adapters that are in the pool, and makes room for everything else.

        On failure it acquires nothing. Called after `_has_room` and `_take_places`.
        """
        tenant, residency = sequence.tenant, self._paging.residency
        within_floor = _is_within_floor(tenant, needs)
        found = (self._adapters.find(version) for version in sequence.request.versions)
        residents = [resident for resident in found if resident is not None]
        for resident in residents:
            residency.acquire(resident)
        if needs.num_cached_blocks:
            self._prefixes.adopt(sequence, needs.num_cached_blocks)
        has_room = residency.can_free_slots(len(needs.to_load))
        new_pages, evict_pinned = needs.new_pages, False
        while has_room and not self._preemption.make_room(new_pages, sequence, evict_pinned=evict_pinned):
            if self._claim_state(sequence, new_pages):
                new_pages -= self._paging.footprint.state_pages
                continue
            others = [s for s in self._batch if s.tenant is not tenant and s.tenant.is_above_floor]
            has_room = within_floor and not evict_pinned
            if has_room and others:
                self._preemption.preempt(self._queue.choose_victim(others), plan)
            else:
                evict_pinned = True
        if not has_room:
            sequence.blocks.release(self._paging.kv)
            sequence.num_computed = sequence.num_named = 0
            for resident in residents:
                residency.release(resident)
        return has_room

    def _claim_state(self, sequence: Sequence, new_pages: int) -> bool:
        """Takes a state from the prefix cache instead of copying it, if the sequence would not fit otherwise."""
        num_pages = new_pages - self._paging.footprint.state_pages
        helps = self._paging.evictor.can_make_room(num_pages, sequence.tenant)
        return (helps or self._batch.runs_alone(sequence)) and sequence.blocks.claim_state(self._paging.kv)

    def _start(self, sequence: Sequence, needs: _Needs, plan: StepPlan) -> int:
        """Adds the sequence to the batch.

        `_reserve` has acquired its adapters that are in the pool. Returns the number of its tokens that this step
        computes: 0 while an adapter is loading.
        """
        for version in needs.to_load:
            self._paging.residency.acquire(self._adapters.load_for(sequence, version, plan))
        found = (self._adapters.find(version) for version in sequence.request.versions)
        sequence.set_residents(tuple(resident for resident in found if resident is not None))
        # The whole prompt of a resumed sequence counts as charged.
        if not (sequence.num_preemptions or sequence.num_charged):
            self._prefixes.count_hits(sequence)
        self._lifecycle.start_running(sequence, needs.num_reserved_tokens, plan)
        if not self._adapters.are_ready(sequence.residents):
            sequence.times.is_cold |= sequence.times.computed_at is None
            return 0
        if sequence.times.computed_at is None:
            sequence.times.computed_at = self._paging.pool.now
        self._adapters.budget.add_sequence(is_background=sequence.is_background)
        plan.add(sequence, needs.num_tokens)
        charge_prompt(sequence, needs.num_tokens)
        return needs.num_tokens

    def load_upcoming(self, plan: StepPlan) -> None:
        """Loads adapters of the next sequences in the queue into pages that no running sequence needs soon."""
        budget, residency = self._adapters.budget, self._paging.residency
        free_pages = self._paging.pool.num_free - len(self._batch)
        if budget.num_pages <= 0 or free_pages <= 0 or not (len(self._queue) and self._adapters.has_copies):
            return
        queued = [sequence for sequence in self._preemption.upcoming if sequence in self._queue]
        for sequence, version in [
            (waiting, version) for waiting in queued for version in waiting.request.versions
        ]:
            if self._adapters.find(version) is not None:
                continue
            num_pages = self._adapters.num_pages(version)
            if num_pages is None or num_pages > free_pages or sequence.tenant.would_exceed_ceiling(num_pages):
                continue
            if budget.num_pages <= 0 or not residency.has_free_slot:
                break
            self._adapters.load_for(sequence, version, plan)
            free_pages -= num_pages


def _fit_prompt(budget: PrefillBudget, sequence: Sequence, start: int, *, at_least: int) -> int:
    return max(budget.fit(sequence.tenant, start), at_least)


def _is_within_floor(tenant: TenantAccount, needs: _Needs) -> bool:
    return tenant.num_pages + needs.new_pages <= tenant.min_pages
