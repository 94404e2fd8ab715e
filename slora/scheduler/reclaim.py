"""Finds pages for those who need them: what is idle leaves first, then running sequences give way."""

from slora.kv_footprint import KVFootprint
from slora.pool.residency import Resident
from slora.pool.tenant import Tenant
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.swapping import Swapping
from slora.scheduler.unified_memory import UnifiedMemory

# Adapters of this many of those who are next are spared while others can leave.
_LOOK_AHEAD = 8


class Reclaim:
    """Serves one step after the other: what it knows of those who are next is of the step under way."""

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
        """Those who are next, as of the first time that this step asks."""
        if self._next is None:
            self._next = self._queue.upcoming(_LOOK_AHEAD)
        return self._next

    def make_room(self, num_pages: int, sequence: Sequence, *, over_pins: bool = False) -> bool:
        """By eviction alone. Adapters of those who are next stay as long as others can leave, pins and floors longer.

        Where nobody else runs, not even floors protect what is idle: they are kept by whole adapters, so what is left
        beside them may be less than a request was told, and it would wait for good. over_pins: pins don't protect.
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
        """Whether it has nobody to wait for: others leave sooner or later, but not those of tenants with a floor, who
        go ahead of it as long as they are below; or whether it is overdue. No request was told of pins."""
        if sequence.is_overdue:
            return True
        return self._batch.is_left_to(sequence) or all(
            one is sequence or (one.tenant.min_pages > 0 and one.tenant is not sequence.tenant)
            for one in self._batch
        )

    @property
    def is_short(self) -> bool:
        """Whether somebody who is overdue runs or is next: then nothing is to be brought here for nobody."""
        return any(one.is_overdue for one in (*self._batch, *self.upcoming))

    def victim(self, num_pages: int, tenant: Tenant) -> Sequence:
        """For a tenant at its ceiling, one of its own."""
        own_limit = tenant.exceeds(num_pages)
        return self._queue.victim(s for s in self._batch if s.tenant is tenant or not own_limit)

    def preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Back to the queue with its tokens but without pages of the pool; or to its end, if it can't come back."""
        self.num_preemptions += 1
        # A beam's last token is computed again: what it has proposed is asked for once more.
        sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids) - 1)
        if plan.withdraw(sequence):
            self.free_behind_window(sequence)
            self._swapping.save(sequence, plan)
        error = self._lifecycle.back_to_queue(sequence)
        if error is not None:
            # All of its request ends, what this step was to compute of other choices too: their pages go to others.
            for choice in self._lifecycle.unfinished.find(sequence.request.request_id):
                plan.withdraw(choice)
            plan.ended.append(self._lifecycle.end(sequence, error))

    def free_behind_window(self, sequence: Sequence) -> None:
        footprint = self._footprint
        if footprint.window is not None:
            sequence.blocks.free_before(footprint.first_token_seen(sequence.num_computed), self._memory.kv)

    def next_adapters(self) -> list[Resident]:
        """The idle ones of those who are next."""
        versions = {one.request.adapter for one in self.upcoming} - {None}
        found = (self._supply.find(version) for version in versions if version is not None)
        return [resident for resident in found if resident is not None and not resident.num_users]
