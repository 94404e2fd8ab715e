"""Frees pages: evicts idle items first, and then preempts running sequences."""

from collections import Counter

from slora.memory.residency import Resident
from slora.memory.tenant_account import TenantAccount
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.charges import charge_displaced
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.swapping import Swapping

# The number of next sequences in the queue whose idle adapters are evicted only after other items.
LOOK_AHEAD = 8


class Preemption:
    """Evicts and preempts on behalf of the step being planned. `begin_step` resets its list of the next sequences.

    counts: see `Scheduler.preemptions_by_kind`.
    """

    def __init__(self, paging: UnifiedPaging, lifecycle: Lifecycle, swapping: Swapping) -> None:
        self.counts = Counter(swap=0, recompute=0, background=0)
        self._paging = paging
        self._lifecycle = lifecycle
        self._queue, self._batch = lifecycle.queue, lifecycle.batch
        self._swapping = swapping
        self._next: list[Sequence] | None = None

    def begin_step(self) -> None:
        self._next = None

    @property
    def upcoming(self) -> list[Sequence]:
        """The next interactive sequences of the queue. The list is made once per step, at the first access."""
        if self._next is None:
            self._next = [
                sequence for sequence in self._queue.upcoming(LOOK_AHEAD) if not sequence.is_background
            ]
        return self._next

    def make_room(self, num_pages: int, sequence: Sequence, *, evict_pinned: bool = False) -> bool:
        """Makes room for `sequence` by eviction only. Returns False if that can't be done.

        Idle adapters of the next sequences are evicted only after all other unprotected items. Items that a floor or a
        pin protects come last.

        If no other sequence runs, floors of other tenants are ignored. Floors are enforced in whole adapters, so fewer
        pages may be available than were counted when the request was accepted. Without this exception the request would
        wait forever.

        evict_pinned: whether pinned adapters may be evicted even if `may_evict_pinned` returns False.
        """
        tenant = sequence.tenant
        if num_pages <= self._paging.pool.num_free and tenant.max_pages is None:
            return True
        evictor = self._paging.evictor
        if evictor.make_room(num_pages, tenant, self.next_adapters()) or evictor.make_room(num_pages, tenant):
            return True
        if not evict_pinned and not self.may_evict_pinned(sequence):
            return False
        alone = self._batch.runs_alone(sequence)
        return evictor.make_room(num_pages, tenant, ignore_floors=alone, ignore_pins=True)

    def may_evict_pinned(self, sequence: Sequence) -> bool:
        """Whether `sequence` may evict pinned adapters, because waiting would not help or because it is starving.

        Waiting does not help if no other sequence runs. Waiting also does not help if all other running sequences
        belong to other tenants with a floor, because such a tenant is served first while it is below its floor. A
        request is accepted without regard to pins, so it might otherwise wait forever.
        """
        if sequence.is_starving and not sequence.is_background:
            return True
        return self._batch.runs_alone(sequence) or all(
            other is sequence or (other.tenant.min_pages > 0 and other.tenant is not sequence.tenant)
            for other in self._batch
        )

    @property
    def has_starving(self) -> bool:
        """Whether a starving sequence runs or is next. If so, no adapter is loaded for a pin or for prewarming."""
        return any(other.is_starving and not other.is_background for other in (*self._batch, *self.upcoming))

    def choose_victim(self, num_pages: int, tenant: TenantAccount) -> Sequence:
        """Returns the sequence to preempt so that `tenant` gets `num_pages`.

        If these pages would put the tenant above its ceiling, the victim is one of the tenant's own sequences.
        """
        own_limit = tenant.would_exceed_ceiling(num_pages)
        return self._queue.choose_victim(s for s in self._batch if s.tenant is tenant or not own_limit)

    def preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Preempts a sequence: it returns to the queue with its tokens but without pages.

        A background sequence is never swapped out, because the copies would delay the interactive requests that it
        makes room for. If it can't be queued again, its request ends.
        """
        sequence.tenant.num_preemptions += 1
        if sequence.search is not None:
            # The last token of a beam is recomputed, because its proposal must be made again.
            sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids) - 1)
        if plan.remove(sequence) and not sequence.is_background:
            self.free_behind_window(sequence)
            self._swapping.swap_out(sequence, plan)
        kind = "recompute" if sequence.swapped is None else "swap"
        self.counts["background" if sequence.is_background else kind] += 1
        error = self._lifecycle.requeue(sequence)
        if error is not None:
            # The whole request ends and its pages become free, so its other choices are also removed from this step.
            for choice in self._lifecycle.unfinished.find(sequence.request.request_id):
                plan.remove(choice)
            plan.ended.append(self._lifecycle.fail(sequence, error))

    def displace(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Takes one place of the batch from another tenant, for a waiting sequence.

        A choice that has not started loses its place before a running sequence is preempted. Returns False if no tenant
        has to yield a place, see `FairQueue.choose_displaced`.
        """
        victim = self._queue.choose_displaced(self._batch, sequence, self._batch.free_capacity)
        if victim is None:
            return False
        if victim.num_places > 1:
            self._batch.resize(victim, victim.num_places - 1)
        else:
            charge_displaced(sequence, victim)
            self.preempt(victim, plan)
        return True

    def preempt_background(self, plan: StepPlan) -> bool:
        """Preempts one background sequence so that an interactive sequence gets pages.

        Returns False if none runs.
        """
        background = self._batch.background
        if background:
            self.preempt(self._queue.choose_victim(background), plan)
        return bool(background)

    def preempt_for_stuck_beams(self, plan: StepPlan) -> bool:
        """Resolves a deadlock of beams: every running sequence is a beam that waits for a preempted beam, and there is
        no room for the preempted beam.

        Preempts a sequence of another request in favour of the next sequence in the queue. Returns False if there is no
        such sequence.

        The caller may repeat this. The repetition ends at the latest when only one search runs, because `Lifecycle`
        guarantees that one search fits.
        """
        sequence = self._queue.peek()
        if sequence is None:
            return False
        others = [
            other for other in self._batch if other.search is not sequence.search or other.search is None
        ]
        if sequence.tenant.max_pages is not None:  # A tenant at its ceiling can use only its own pages.
            others = [other for other in others if other.tenant is sequence.tenant] or others
        if not others:
            return False
        self.preempt(self._queue.choose_victim(others), plan)
        return True

    def free_behind_window(self, sequence: Sequence) -> None:
        footprint = self._paging.footprint
        if footprint.window is not None:
            sequence.blocks.free_before(footprint.first_token_seen(sequence.num_computed), self._paging.kv)

    def next_adapters(self) -> list[Resident]:
        """The idle adapters of the next sequences."""
        versions = {version for sequence in self.upcoming for version in sequence.request.versions}
        found = (self._paging.residency.find(version) for version in versions)
        return [resident for resident in found if resident is not None and not resident.num_users]
