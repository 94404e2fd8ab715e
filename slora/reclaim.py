"""Finds pages for those who need them: what is idle leaves first, then running sequences give way."""

from slora.adapter_supply import AdapterSupply
from slora.kv_footprint import KVFootprint
from slora.lifecycle import Lifecycle
from slora.residency import Resident
from slora.sequence import Sequence
from slora.step_plan import StepPlan
from slora.swapping import Swapping
from slora.tenant import Tenant
from slora.unified_memory import UnifiedMemory

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

    def make_room(self, num_pages: int, tenant: Tenant, *, alone: bool, over_pins: bool = False) -> bool:
        """By eviction alone. Adapters of those who are next stay as long as others can leave.

        alone: nobody else runs. Then neither floors nor pins protect what is idle. Floors are kept by whole adapters,
        so what is left beside them may be less than a request was told; and no request was told of pins. It would wait
        for good. over_pins: pins don't protect, but floors do.
        """
        if num_pages <= self._memory.pool.num_free and tenant.max_pages is None:
            return True
        evictor = self._memory.evictor
        if evictor.make_room(num_pages, tenant, self.next_adapters()) or evictor.make_room(num_pages, tenant):
            return True
        if not alone and not over_pins:
            return False
        return evictor.make_room(num_pages, tenant, ignore_floors=alone, ignore_pins=True)

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
