"""The waiting queue of a replica model. It decides as `FairQueue` does for tenants of equal weight, without floors."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter

from bench.simulation.fleet.model_request import ModelRequest
from slora.memory.tenant_account import TenantAccount

_service = attrgetter("service")


class ModelQueue:
    """One heap of requests per waiting tenant. The tenant with the least service is next."""

    def __init__(self) -> None:
        self._heaps: dict[TenantAccount, list[ModelRequest]] = {}
        self._count = 0
        self._last_service = 0.0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ModelRequest]:
        return (request for heap in self._heaps.values() for request in heap)

    def push(self, request: ModelRequest) -> None:
        """Adds a request. The counter of a tenant that was idle is raised to the least of the waiting tenants."""
        tenant, heap = request.tenant, self._heaps.get(request.tenant)
        if heap is None:
            if not request.num_preemptions:
                least = min(map(_service, self._heaps), default=self._last_service)
                tenant.service = max(tenant.service, least)
            heap = self._heaps[tenant] = []
        heapq.heappush(heap, request)
        self._count += 1

    def peek(self, skipped: Collection[TenantAccount] = ()) -> ModelRequest | None:
        tenants: Iterable[TenantAccount] = self._heaps
        if skipped:
            tenants = [tenant for tenant in tenants if tenant not in skipped]
        tenant = min(tenants, key=_service, default=None)
        return None if tenant is None else self._heaps[tenant][0]

    def remove_first(self, tenant: TenantAccount) -> None:
        """Removes the request of the tenant that `peek` has returned."""
        heapq.heappop(self._heaps[tenant])
        self._count -= 1
        if not self._heaps[tenant]:
            del self._heaps[tenant]
            self._last_service = tenant.service

    def upcoming(self, count: int) -> list[ModelRequest]:
        """Returns the first request of each tenant, in the tenants' order, then the second of each, and so on."""
        heaps = [self._heaps[tenant] for tenant in sorted(self._heaps, key=_service)[:count]]
        rows = (heap[place] for place in range(count) for heap in heaps if place < len(heap))
        return list(islice(rows, count))

    def choose_victim(
        self, running: list[ModelRequest], num_pages: Mapping[TenantAccount, int]
    ) -> ModelRequest:
        """Chooses a tenant that holds at least its share. Returns its request with the fewest computed tokens.

        num_pages: the pages that each tenant with running requests holds.
        """
        page_share = sum(num_pages.values()) / len(num_pages.keys() | self._heaps.keys())
        over_share = {tenant for tenant, pages in num_pages.items() if pages >= page_share}

        def order(request: ModelRequest) -> tuple[bool, bool, int, int]:
            if request.is_starving:
                return False, False, 0, request.number
            return True, request.tenant in over_share, -request.num_computed, request.number

        return max(running, key=order)
