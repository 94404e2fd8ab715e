"""Weighted fair service of tenants: virtual token counters (VTC, Sheng et al., OSDI'24).

Each tenant has a counter of the service it got, divided by its weight (`Tenant.service`); the smallest counter is
served next. So of two tenants that always have something waiting, each gets its share, however much the other sends
and over however many adapters. Within a tenant: the request's own priority, then arrival.

The lift rule: a tenant with nothing waiting gets no credit for it. When it comes back, its counter is raised to the
smallest of those who wait, or to that of the tenant who waited last, each of its own class. Without it a tenant could
save up idle hours and then keep everybody else out.

A tenant's priority class goes before counters: while a class has anybody waiting, later classes wait.
"""

import heapq
from collections.abc import Collection, Iterable
from itertools import islice

from slora.pool.tenant import Tenant
from slora.scheduler.sequence import Sequence

_Entry = tuple[int, Sequence]


class FairQueue:
    """A heap for each tenant that has somebody waiting. `next` looks at each of these tenants once."""

    def __init__(self) -> None:
        self._heaps: dict[Tenant, list[_Entry]] = {}
        self._members: set[Sequence] = set()
        # By class, of the tenant that was its last to have anybody waiting.
        self._last_service: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._heaps:
            if not sequence.num_preemptions:  # who gave way has not been idle
                self._lift(tenant)
            self._heaps[tenant] = []
        self._members.add(sequence)
        tenant.num_waiting += 1
        heapq.heappush(self._heaps[tenant], (sequence.request.priority, sequence))

    def remove(self, sequence: Sequence) -> None:
        if sequence not in self._members:
            return
        self._members.remove(sequence)
        tenant = sequence.tenant
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            del self._heaps[tenant]
            self._last_service[tenant.share.priority] = tenant.service
            return
        heap = self._heaps[tenant]
        while heap[0][1] not in self._members:
            heapq.heappop(heap)

    def next(self, passed_over: Collection[Tenant] = ()) -> Sequence | None:
        tenants: Iterable[Tenant] = self._heaps
        if passed_over:
            tenants = [tenant for tenant in tenants if tenant not in passed_over]
        tenant = min(tenants, key=_turn, default=None)
        return None if tenant is None else self._heaps[tenant][0][1]

    def upcoming(self, count: int) -> list[Sequence]:
        """The first of each tenant, then those who may follow."""
        heaps = [self._heaps[tenant] for tenant in sorted(self._heaps, key=_turn)[:count]]
        rows = (heap[place][1] for place in range(count) for heap in heaps if place < len(heap))
        return list(islice((one for one in rows if one in self._members), count))

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The sequence of which least is computed, of a tenant that holds its share of the pages or more.

        Not of the tenant with the largest counter: where each has only one or two running, that is the one who is
        furthest along, for its own tokens made the counter large, and most of what was computed is lost.

        Tenants above their floors come first, then those of late priority classes; within the tenant its own priority.
        Whoever is overdue comes last of its class.
        """
        candidates = list(running)
        held: dict[Tenant, int] = {s.tenant: s.tenant.num_pages - s.tenant.num_cached for s in candidates}
        weights = sum(tenant.share.weight for tenant in held.keys() | self._heaps.keys())
        page_share = sum(held.values()) / weights  # for a weight of 1
        over_share = {tenant for tenant, pages in held.items() if pages >= tenant.share.weight * page_share}

        def standing(sequence: Sequence) -> tuple[bool, int, bool, bool, int, Sequence]:
            tenant = sequence.tenant
            above_floor, priority = tenant.is_above_floor, tenant.share.priority
            if sequence.is_overdue:
                return above_floor, priority, False, False, 0, sequence
            return above_floor, priority, True, tenant in over_share, -sequence.num_computed, sequence

        tenant = max(candidates, key=standing).tenant
        return max((one for one in candidates if one.tenant is tenant), key=_yields)

    def _lift(self, tenant: Tenant) -> None:
        # Of its own class: one that starves behind it has had so little that it would keep its equals out for long.
        group = tenant.share.priority
        services = (other.service for other in self._heaps if other.share.priority == group)
        tenant.service = max(tenant.service, min(services, default=self._last_service.get(group, 0.0)))


def _turn(tenant: Tenant) -> tuple[int, float]:
    return tenant.share.priority, tenant.service


def _yields(sequence: Sequence) -> tuple[int, bool, int, Sequence]:
    if sequence.is_overdue:
        return sequence.request.priority, False, 0, sequence
    return sequence.request.priority, True, -sequence.num_computed, sequence
