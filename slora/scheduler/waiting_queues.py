"""The waiting sequences and their order of admission: first come, first served, or fair between tenants."""

import heapq
import math
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Protocol

from slora.memory.tenant_account import TURN, TenantAccount
from slora.scheduler.charges import OUTPUT_PRICE
from slora.scheduler.running_batch import RunningBatch
from slora.scheduler.sequence import Sequence


class WaitingQueue(Protocol):
    """Sequences that wait only for a place in the batch and for pages.

    num_background: number of background sequences.
    """

    num_background: int

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def push(self, sequence: Sequence) -> None:
        """Adds a new or a preempted sequence."""

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that was admitted, has ended, or must wait for its adapter."""

    def peek(self, skipped: Collection[TenantAccount] = ()) -> Sequence | None:
        """The sequence to admit next, ignoring the tenants in `skipped`."""

    def count_tenants(self, skipped: Collection[TenantAccount]) -> int:
        """The tenants with interactive sequences, without those in `skipped`."""

    def upcoming(self, count: int) -> list[Sequence]:
        """At most `count` sequences that are likely to be next. The order may change before they are admitted."""

    def choose_victim(self, running: Iterable[Sequence]) -> Sequence:
        """The sequence of `running` to preempt when the pool runs out of pages. `running` is not empty."""

    def choose_displaced(self, batch: RunningBatch, sequence: Sequence, num_free: int) -> Sequence | None:
        """The running sequence that yields a place to the waiting `sequence`; None if `sequence` must wait.

        num_free: the places that `sequence` gets anyway.
        """


_FifoEntry = tuple[bool, Sequence]


class FifoQueue:
    """First come, first served, regardless of tenant. Background sequences come after all others.

    It is a heap of sequences, sorted by class and then by arrival. A removed sequence stays in the heap until it
    reaches the top.
    """

    def __init__(self) -> None:
        self.num_background = 0
        self._heap: list[_FifoEntry] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        self._members.add(sequence)
        self.num_background += sequence.is_background
        sequence.tenant.num_waiting += 1
        heapq.heappush(self._heap, _order(sequence))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._members:
            self._members.remove(sequence)
            self.num_background -= sequence.is_background
            sequence.tenant.num_waiting -= 1

    def peek(self, skipped: Collection[TenantAccount] = ()) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        if self._heap[0][1].tenant not in skipped:
            return self._heap[0][1]
        return min(
            (sequence for sequence in self._members if sequence.tenant not in skipped),
            key=_order,
            default=None,
        )

    def count_tenants(self, skipped: Collection[TenantAccount]) -> int:
        tenants = {sequence.tenant for sequence in self._members if not sequence.is_background}
        return len(tenants.difference(skipped))

    def upcoming(self, count: int) -> list[Sequence]:
        return [sequence for _, sequence in self._heap[: 2 * count] if sequence in self._members][:count]

    def choose_victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=_order)

    def choose_displaced(self, batch: RunningBatch, sequence: Sequence, num_free: int) -> Sequence | None:
        return None if sequence.is_background else max(batch.background, key=_order, default=None)


def _order(sequence: Sequence) -> _FifoEntry:
    return sequence.is_background, sequence


_FairEntry = tuple[int, Sequence]
# A tenant yields places after it has received as much more service as the waiting tenant receives in this many steps.
# With 0, one request of ten was preempted while two tenants always had waiting requests; with 8, none.
_PATIENCE = 8


class FairQueue:
    """Weighted fair queueing between tenants with virtual token counters (VTC, Sheng et al., OSDI'24).

    Each tenant has a counter of the service that it received, divided by its weight (`TenantAccount.service`). The
    tenant with the smallest counter is served next. So two tenants that always have waiting requests each get their
    share, however many requests or adapters the other tenant uses. Within a tenant, the request's own priority counts
    first, then arrival.

    The lift rule: an idle tenant earns no credit. When it sends a request again, its counter is raised to the smallest
    counter among the waiting tenants. If no tenant waits, the counter is raised to that of the last tenant that waited.
    Only tenants of the same priority class count. Without this rule a tenant could save up idle hours and then lock out
    all others.

    Priority classes come before counters: while a tenant of one class waits, all later classes wait.

    It has one heap per tenant with waiting sequences. `peek` looks at each of these tenants once.
    """

    def __init__(self) -> None:
        self.num_background = 0
        self._heaps: dict[TenantAccount, list[_FairEntry]] = {}
        self._members: set[Sequence] = set()
        # Priority class -> `service` of the last tenant of this class that had waiting sequences.
        self._last_service: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._heaps:
            # The tenant of a preempted sequence was not idle, so its counter is not lifted.
            if not sequence.num_preemptions:
                self._lift(tenant)
            self._heaps[tenant] = []
        self._members.add(sequence)
        self.num_background += tenant.is_background
        tenant.num_waiting += 1
        heapq.heappush(self._heaps[tenant], (sequence.request.priority, sequence))

    def remove(self, sequence: Sequence) -> None:
        if sequence not in self._members:
            return
        self._members.remove(sequence)
        tenant = sequence.tenant
        self.num_background -= tenant.is_background
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            del self._heaps[tenant]
            self._last_service[tenant.priority] = tenant.service
            return
        heap = self._heaps[tenant]
        while heap[0][1] not in self._members:
            heapq.heappop(heap)

    def peek(self, skipped: Collection[TenantAccount] = ()) -> Sequence | None:
        tenants: Iterable[TenantAccount] = self._heaps
        if skipped:
            tenants = [tenant for tenant in tenants if tenant not in skipped]
        tenant = min(tenants, key=TURN, default=None)
        return None if tenant is None else self._heaps[tenant][0][1]

    def count_tenants(self, skipped: Collection[TenantAccount]) -> int:
        return sum(
            tenant not in skipped and not heap[0][1].is_background for tenant, heap in self._heaps.items()
        )

    def upcoming(self, count: int) -> list[Sequence]:
        """Returns the first sequence of each tenant, in the tenants' order, then the second of each, and so on."""
        heaps = [self._heaps[tenant] for tenant in sorted(self._heaps, key=TURN)[:count]]
        rows = (heap[place][1] for place in range(count) for heap in heaps if place < len(heap))
        return list(islice((sequence for sequence in rows if sequence in self._members), count))

    def choose_victim(self, running: Iterable[Sequence]) -> Sequence:
        """Chooses a tenant that holds at least its share of the pages. Returns its sequence with the fewest computed
        tokens.

        The tenant is not chosen by the largest counter. If each tenant runs only one or two sequences, the tenant with
        the largest counter has computed the most tokens. Preempting its sequence would lose the most work.

        Background sequences are preempted first, then tenants above their floors, then tenants of late priority
        classes. Within the tenant, the requests' own priority decides. Starving sequences come last in their class.
        """
        candidates = list(running)
        candidates = [sequence for sequence in candidates if sequence.is_background] or candidates
        held: dict[TenantAccount, int] = {
            s.tenant: s.tenant.num_pages - s.tenant.num_cached for s in candidates
        }
        # Background requests do not count in the shares of interactive ones.
        waiting = {account for account in self._heaps if account.is_background == candidates[0].is_background}
        weights = sum(tenant.weight for tenant in held.keys() | waiting)
        page_share = sum(held.values()) / weights  # Pages per unit of weight.
        over_share = {tenant for tenant, pages in held.items() if pages >= tenant.weight * page_share}

        def tenant_preemption_order(sequence: Sequence) -> tuple[bool, int, bool, bool, int, Sequence]:
            tenant = sequence.tenant
            above_floor, priority = tenant.is_above_floor, tenant.priority
            if sequence.is_starving:
                return above_floor, priority, False, False, 0, sequence
            return above_floor, priority, True, tenant in over_share, -sequence.num_computed, sequence

        tenant = max(candidates, key=tenant_preemption_order).tenant
        return max((sequence for sequence in candidates if sequence.tenant is tenant), key=_preemption_order)

    def choose_displaced(self, batch: RunningBatch, sequence: Sequence, num_free: int) -> Sequence | None:
        """Chooses a sequence of the tenant that holds the most places per unit of weight. Among several such tenants,
        it is the one with the oldest running sequence.

        A tenant yields all its places to tenants of earlier priority classes. To a tenant of its own class it yields a
        place on two conditions:

        - It then still holds at least as many places per unit of weight as the waiting tenant. So the exchange is never
          reversed.
        - It has received at least as much service as the waiting tenant will have in `_PATIENCE` steps. So tenants
          whose shares are nearly equal wait for the ends of answers, and few tokens are computed twice. A tenant
          without a place does not have to wait, even if its counter was just lifted to that of the other tenant.

        Worked example: a tenant holds 256 places with long answers. A waiting tenant of the same weight gets its first
        place at once, and more of them within a few steps, up to 128.
        """
        waiting = sequence.tenant
        num_held = num_free + batch.num_places[waiting]
        priority, weight = waiting.priority, waiting.weight
        least_service = waiting.service + _PATIENCE * OUTPUT_PRICE * (num_held / weight)
        least_places = (num_held + 1) / weight
        chosen: set[TenantAccount] = set()
        most = priority, -math.inf
        for tenant, num_places in batch.num_places.items():
            if tenant.priority < priority:
                continue
            if tenant.priority == priority and (
                (num_places - 1) / tenant.weight < least_places or tenant.service < least_service
            ):
                continue
            held = tenant.priority, num_places / tenant.weight
            if held > most:
                chosen, most = {tenant}, held
            elif held == most:
                chosen.add(tenant)
        if not chosen:
            return None
        oldest = next((other.tenant for other in batch if other.tenant in chosen), None)
        return max(
            (other for other in batch if other.tenant is oldest),
            key=lambda other: (other.num_places > 1, _preemption_order(other)),
            default=None,
        )

    def measure_class(self, priority: int) -> tuple[float, float]:
        """Returns the least counter of the waiting tenants of a priority class, and the sum of their weights.

        If no tenant waits, the counter is that of the last tenant that waited.
        """
        waiting = [tenant for tenant in self._heaps if tenant.priority == priority]
        least = min((tenant.service for tenant in waiting), default=self._last_service.get(priority, 0.0))
        return least, sum(tenant.weight for tenant in waiting)

    def _lift(self, tenant: TenantAccount) -> None:
        # Only tenants of the same class count. A tenant of a later class may have a very small counter, because earlier
        # classes go first. Raising a counter only to such a small value would let its tenant lock out the other tenants
        # of its own class for a long time.
        tenant.service = max(tenant.service, self.measure_class(tenant.priority)[0])


def _preemption_order(sequence: Sequence) -> tuple[int, bool, int, Sequence]:
    if sequence.is_starving:
        return sequence.request.priority, False, 0, sequence
    return sequence.request.priority, True, -sequence.num_computed, sequence
