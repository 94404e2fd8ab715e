"""The evictor: when the pool runs out of free pages, it chooses which idle adapter or cached prefix block is evicted.

Only candidates can be evicted. An idle adapter is always a candidate. An idle prefix block is a candidate only while no
idle block follows it; otherwise it is hidden.

The eviction policy ranks the items. The evictor enforces the bounds of tenants:

Floor (`min_pages`): other tenants can evict a tenant's cached items only while it owns more pages than its floor. The
last eviction may cut into the floor by less than the size of the evicted item.

Ceiling (`max_pages`): a tenant at its ceiling must evict one of its own cached pages for each page that it allocates.

A pinned item is evicted only when no unpinned item can be evicted, and only in two cases: the caller passes
`ignore_pins`, or the tenant that owns the item is at its ceiling. Pinned items have heaps of their own.

Nearly all tenants have neither floor nor ceiling and share one heap. Each tenant with bounds has its own heap. Apart
from the logarithmic heap operations, the cost of an operation does not grow with the number of idle items.
"""

from collections import Counter
from collections.abc import Callable, Collection

from slora.pool.eviction_heap import Candidate, EvictionHeap
from slora.pool.eviction_policy import Evictable, EvictionPolicy
from slora.pool.page_pool import PagePool
from slora.pool.tenant_account import TenantAccount, TenantAccounts


class Evictor:
    """Evicts idle adapters and cached prefix blocks, lowest rank first, within the bounds of tenants.

    Invariant: evicting all candidates, one after the other, eventually makes every cached page of `pool` free.
    """

    def __init__(self, pool: PagePool, tenants: TenantAccounts, policy: EvictionPolicy) -> None:
        self.num_evictions = 0
        self._pool = pool
        self._tenants = tenants
        self._policy = policy
        self._age = 0.0
        self._last_ticket = 0
        self._num_ranked = 0
        self._common = EvictionHeap()
        self._bounded = tenants.bounded
        self._heaps = {tenant: EvictionHeap() for tenant in tenants.bounded}
        self._pinned: dict[TenantAccount, EvictionHeap] = {}
        self._pinned_pages: Counter[TenantAccount] = Counter()

    def rank(self, item: Evictable) -> float:
        """The eviction rank of an item that becomes idle now.

        A hidden item keeps this rank until it becomes a candidate.
        """
        self._num_ranked += 1
        return self._policy.rank(item, self._num_ranked, self._age)

    def add(self, item: Evictable, evict: Callable[[TenantAccount], None], rank: float) -> None:
        """Makes an item a candidate. The item must be idle and not hidden, and its pages must be cached.

        evict: `evict(requester)` evicts the item for tenant `requester`. It frees `item.pages` in the pool, and
            may add items that this item hid.
        """
        assert item.ticket == 0, f"{item!r} is already a candidate"
        self._last_ticket += 1
        item.ticket = self._last_ticket
        self._heap_of(item).push(Candidate(rank, item.ticket, item, evict))
        if item.is_pinned:
            self._pinned_pages[item.tenant] += len(item.pages)

    def record_reuse(self, item: Evictable) -> None:
        """Reports a reuse to the policy. Called when a ranked item is used again, even if it was hidden."""
        self._policy.record_outcome(item, was_used=True)
        self.remove(item)

    def record_eviction(self, item: Evictable) -> None:
        """Reports an eviction to the policy. Called when an item is evicted for another resource, such as its slot."""
        self._policy.record_outcome(item, was_used=False)
        self.remove(item)

    def remove(self, item: Evictable) -> None:
        """Removes a candidate that is in use again, hidden or deleted.

        Does nothing if the item is not a candidate.
        """
        if item.ticket:
            self._mark_removed(item)

    def num_evictable(self, num_pages: int, tenant: TenantAccount, *, ignore_pins: bool) -> int:
        """Upper bound on the pages that can be evicted when `tenant` allocates `num_pages`. Ignores floors."""
        if ignore_pins:
            return self._pool.num_cached
        own = min(tenant.pages_over_ceiling(num_pages), self._pinned_pages[tenant])
        return self._pool.num_cached - self._pinned_pages.total() + own

    def can_make_room(
        self, num_pages: int, tenant: TenantAccount, protected: Collection[Evictable] = ()
    ) -> bool:
        """Whether `make_room` with these arguments would succeed. Evicts nothing."""
        if num_pages == 0 or self._has_room(num_pages, tenant):
            return True
        self._rebuild_heaps()
        return self._can_free(num_pages, tenant, frozenset(protected), ignore_floors=False, ignore_pins=False)

    def make_room(
        self,
        num_pages: int,
        tenant: TenantAccount,
        protected: Collection[Evictable] = (),
        *,
        ignore_floors: bool = False,
        ignore_pins: bool = False,
    ) -> bool:
        """Evicts items until `num_pages` pages are free and `tenant` may allocate them.

        Returns False if that can't be done.

        The evictable pages are counted first, so a call that fails evicts nothing.

        protected: items that must not be evicted. If it contains a prefix block, it must also contain the idle blocks
            before that block. Those blocks cannot be evicted as long as the block is kept.
        ignore_floors: treat all other tenants as if they had no floor.
        ignore_pins: evict pinned items when no unpinned item is left.
        """
        if num_pages == 0 or self._has_room(num_pages, tenant):
            return True
        self._rebuild_heaps()
        protected_items = frozenset(protected)  # A set, so that each item is counted once.
        if not self._can_free(
            num_pages, tenant, protected_items, ignore_floors=ignore_floors, ignore_pins=ignore_pins
        ):
            return False
        search = _Search(tenant, protected_items, ignore_floors=ignore_floors)
        enough = self._evict_own(num_pages, search) and self._evict_any(
            num_pages, search, ignore_pins=ignore_pins
        )
        search.end()
        return enough

    def check_invariants(self) -> None:
        """Asserts that every candidate can be evicted and is in the heap of its owner."""
        self._rebuild_heaps()
        pinned_pages: Counter[TenantAccount] = Counter()
        for heap in (self._common, *self._heaps.values(), *self._pinned.values()):
            heap.check_invariants()
            for item in (candidate.item for candidate in heap.live_candidates()):
                assert all(self._pool.is_cached(page) for page in item.pages), (
                    f"{item!r} is a candidate but not idle"
                )
                assert all(self._pool.owner(page) is item.tenant for page in item.pages), (
                    f"{item!r} has pages of another tenant"
                )
                assert self._heap_of(item) is heap, f"{item!r} is in another tenant's heap"
                if item.is_pinned:
                    pinned_pages[item.tenant] += len(item.pages)
        assert pinned_pages == self._pinned_pages, "the number of pinned pages is wrong"

    def _has_room(self, num_pages: int, tenant: TenantAccount) -> bool:
        return num_pages <= self._pool.num_free and not tenant.pages_over_ceiling(num_pages)

    def _can_free(
        self,
        num_pages: int,
        tenant: TenantAccount,
        protected_items: frozenset[Evictable],
        *,
        ignore_floors: bool,
        ignore_pins: bool,
    ) -> bool:
        """Whether enough pages can be freed. Compares the need with a lower bound of the evictable pages."""
        kept: Counter[TenantAccount] = Counter()
        pinned = self._pinned_pages.copy()
        for item in protected_items:
            if item.pages and self._pool.is_cached(item.pages[0]):
                kept[item.tenant] += len(item.pages)
                pinned[item.tenant] -= len(item.pages) if item.is_pinned else 0
        own = tenant.num_cached - kept[tenant]
        over_ceiling = tenant.pages_over_ceiling(num_pages)
        if over_ceiling > own:
            return False
        if not ignore_pins:
            # At its ceiling the tenant evicts its own pinned pages if its other cached pages are too few.
            pinned[tenant] -= max(0, over_ceiling - (own - pinned[tenant]))
            kept += pinned
        freed = self._pool.num_cached - kept.total()
        for other in self._bounded:
            if other.min_pages and other is not tenant and not ignore_floors:
                above_floor = max(0, other.num_pages - other.min_pages)
                freed -= max(0, other.num_cached - kept[other] - above_floor)
        return num_pages <= self._pool.num_free + freed

    def _evict_own(self, num_pages: int, search: "_Search") -> bool:
        """Evicts the tenant's own items until `num_pages` more pages stay within its ceiling."""
        tenant = search.requester
        pinned = [self._pinned[tenant]] if tenant in self._pinned else []
        while tenant.pages_over_ceiling(num_pages):
            if not (self._evict_lowest([self._heaps[tenant]], search) or self._evict_lowest(pinned, search)):
                return False
        return True

    def _evict_any(self, num_pages: int, search: "_Search", *, ignore_pins: bool) -> bool:
        heaps = [self._common, *self._heaps.values()]
        pinned = [*self._pinned.values()] if ignore_pins else []
        while self._pool.num_free < num_pages:
            if not (self._evict_lowest(heaps, search) or self._evict_lowest(pinned, search)):
                return False
        return True

    def _evict_lowest(self, heaps: list[EvictionHeap], search: "_Search") -> bool:
        heap = search.lowest(heaps)
        if heap is None:
            return False
        candidate = heap.pop()
        self._mark_removed(candidate.item)
        # The age must never decrease. An item that a floor or `protected_items` kept until now may rank below the age.
        self._age = max(self._age, candidate.rank)
        self.num_evictions += 1
        self._policy.record_outcome(candidate.item, was_used=False)
        candidate.evict(search.requester)
        return True

    def _mark_removed(self, item: Evictable) -> None:
        """Marks the item as no longer a candidate."""
        item.ticket = 0
        self._heap_of(item).count_removed()
        if item.is_pinned:
            self._pinned_pages[item.tenant] -= len(item.pages)

    def _heap_of(self, item: Evictable) -> EvictionHeap:
        if item.is_pinned:
            return self._pinned.setdefault(item.tenant, EvictionHeap())
        if self._bounded is not self._tenants.bounded:
            self._rebuild_heaps()
        return self._heaps.get(item.tenant, self._common)

    def _rebuild_heaps(self) -> None:
        """Sorts all items into heaps again after a tenant got its first floor or ceiling, or lost its last."""
        if self._bounded is self._tenants.bounded:
            return
        candidates = [
            candidate
            for heap in (self._common, *self._heaps.values())
            for candidate in heap.live_candidates()
        ]
        self._bounded = self._tenants.bounded
        self._common = EvictionHeap()
        self._heaps = {tenant: EvictionHeap() for tenant in self._bounded}
        for candidate in candidates:
            self._heaps.get(candidate.item.tenant, self._common).push(candidate)


class _Search:
    """The state of one `make_room` call: the tenant that needs the pages, the protected items, and the candidates
    skipped so far.
    """

    __slots__ = ("_ignores_floors", "_protected", "_skipped", "requester")

    def __init__(
        self, requester: TenantAccount, protected_items: frozenset[Evictable], *, ignore_floors: bool
    ) -> None:
        self.requester = requester
        self._ignores_floors = ignore_floors
        self._protected = protected_items
        self._skipped: list[tuple[EvictionHeap, Candidate]] = []

    def lowest(self, heaps: list[EvictionHeap]) -> EvictionHeap | None:
        """The heap whose lowest candidate is evicted next."""
        best: EvictionHeap | None = None
        best_candidate: Candidate | None = None
        for heap in heaps:
            candidate = self._lowest_of(heap)
            if candidate is not None and (best_candidate is None or candidate < best_candidate):
                best, best_candidate = heap, candidate
        return best

    def end(self) -> None:
        for heap, candidate in self._skipped:
            heap.push_back(candidate)

    def _lowest_of(self, heap: EvictionHeap) -> Candidate | None:
        candidate = heap.peek()
        while candidate is not None and not self._is_evictable(candidate.item):
            self._skipped.append((heap, heap.pop()))
            candidate = heap.peek()
        return candidate

    def _is_evictable(self, item: Evictable) -> bool:
        # During a search a tenant only loses pages. So a tenant at its floor stays there, and a candidate that was
        # skipped stays ineligible.
        owner = item.tenant
        return (
            owner.is_above_floor or owner is self.requester or self._ignores_floors
        ) and item not in self._protected
