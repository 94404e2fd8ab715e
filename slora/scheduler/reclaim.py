"""Reclaim: makes pages free. It evicts idle items first, then it preempts running sequences."""

from slora.kv_footprint import KVFootprint
from slora.pool.residency import Resident
from slora.pool.tenant_account import TenantAccount
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.swapping import Swapping
from slora.scheduler.unified_memory import UnifiedMemory

# Idle adapters of this many next sequences are spared while others can be evicted.
_LOOK_AHEAD = 8


class Reclaim:
    """Evicts and preempts on behalf of the step being planned. `begin_step` resets its list of the next sequences."""

    def __init__(
        self,
        footprint: KVFootprint,
        memory: UnifiedMemory,
        supply: AdapterSupply,
        lifecycle: Lifecycle,
        swapping: Swapping,
    ) -> None:
        self.num_preemptions = 0
        self._footprint = footprint
        self._memory = memory
        self._supply = supply
        self._lifecycle = lifecycle
        self._queue, self._batch = lifecycle.queue, lifecycle.batch
        self._swapping = swapping
        self._next: list[Sequence] | None = None

    def begin_step(self) -> None:
        self._next = None

    @property
    def upcoming(self) -> list[Sequence]:
        """The next sequences of the queue, as of this step's first access."""
        if self._next is None:
            self._next = self._queue.upcoming(_LOOK_AHEAD)
        return self._next

    def make_room(self, num_pages: int, sequence: Sequence, *, over_pins: bool = False) -> bool:
        """Makes room for `sequence` by eviction only. Returns False if that can't be done.

        Idle adapters of the next sequences are evicted only after all other unprotected items. Items that a floor or a
        pin protects come last.

        If no other sequence runs, floors of other tenants are ignored. Floors are enforced in whole adapters, so the
        pages beside them can be fewer than the request was accepted for. Without this exception the request would wait
        forever.

        over_pins: pinned adapters may be evicted.
        """
        tenant = sequence.tenant
        if num_pages <= self._memory.pool.num_free and tenant.max_pages is None:
            return True
        evictor = self._memory.evictor
        if evictor.make_room(num_pages, tenant, self.next_adapters()) or evictor.make_room(num_pages, tenant):
            return True
        if not over_pins and not self.may_take_pins(sequence):
            return False
        alone = self._batch.is_left_to(sequence)
        return evictor.make_room(num_pages, tenant, ignore_floors=alone, ignore_pins=True)

    def may_take_pins(self, sequence: Sequence) -> bool:
        """Whether `sequence` may evict pinned adapters, because waiting would not help or because it is overdue.

        Waiting does not help if no other sequence runs. Nor does it help if all other running sequences belong to other
        tenants with a floor: those tenants go ahead of it as long as they are below their floors. Pins are not
        considered when a request is accepted.
        """
        if sequence.is_overdue:
            return True
        return self._batch.is_left_to(sequence) or all(
            one is sequence or (one.tenant.min_pages > 0 and one.tenant is not sequence.tenant)
            for one in self._batch
        )

    @property
    def is_short(self) -> bool:
        """Whether an overdue sequence runs or is next. Then no adapter is loaded for a pin or for prewarming."""
        return any(one.is_overdue for one in (*self._batch, *self.upcoming))

    def victim(self, num_pages: int, tenant: TenantAccount) -> Sequence:
        """The sequence to preempt so that `tenant` gets `num_pages`.

        For a tenant at its ceiling it is one of the tenant's own.
        """
        own_limit = tenant.would_exceed_ceiling(num_pages)
        return self._queue.victim(s for s in self._batch if s.tenant is tenant or not own_limit)

    def preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Preempts a sequence: it returns to the queue with its tokens but without pages.

        If it can't be queued again, its request ends.
        """
        self.num_preemptions += 1
        # The last token of a beam is recomputed, because its proposal must be made again.
        sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids) - 1)
        if plan.withdraw(sequence):
            self.free_behind_window(sequence)
            self._swapping.save(sequence, plan)
        error = self._lifecycle.back_to_queue(sequence)
        if error is not None:
            # The whole request ends, including what this step was to compute of its other choices, because their pages
            # become free.
            for choice in self._lifecycle.unfinished.find(sequence.request.request_id):
                plan.withdraw(choice)
            plan.ended.append(self._lifecycle.end(sequence, error))

    def free_behind_window(self, sequence: Sequence) -> None:
        footprint = self._footprint
        if footprint.window is not None:
            sequence.blocks.free_before(footprint.first_token_seen(sequence.num_computed), self._memory.kv)

    def next_adapters(self) -> list[Resident]:
        """The idle adapters of the next sequences."""
        versions = {one.request.adapter for one in self.upcoming} - {None}
        found = (self._supply.find(version) for version in versions if version is not None)
        return [resident for resident in found if resident is not None and not resident.num_users]
