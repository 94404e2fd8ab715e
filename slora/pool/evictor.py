"""The evictor: when pages are short, it chooses which idle adapter or cached prefix block is evicted.

Only offered items can be evicted. An idle adapter is always offered. An idle prefix block is offered only while no idle
block follows it; otherwise it is hidden.

The eviction policy ranks the items. The evictor enforces the bounds of tenants:

Floor (`min_pages`): other tenants can evict a tenant's cached items only while it owns more pages than its floor. The
last eviction may cut into the floor by less than the size of the evicted item.

Ceiling (`max_pages`): a tenant at its ceiling must evict one of its own cached pages for each page that it allocates.

A pinned item is evicted only when no unpinned item can be, and only in two cases: the caller passes `ignore_pins`, or
its own tenant is at its ceiling. Pinned items have heaps of their own.

Nearly all tenants have neither floor nor ceiling and share one heap. Each tenant with bounds has its own heap. Apart
from the logarithmic heap operations, the cost of an operation does not grow with the number of idle items.
"""

from collections import Counter
from collections.abc import Callable, Collection

from slora.pool.eviction_heap import EvictionHeap, Offer
from slora.pool.eviction_policy import Evictable, EvictionPolicy
from slora.pool.page_pool import PagePool
from slora.pool.tenant import Tenant, Tenants


class Evictor:
    """Invariant: evicting all offered items, one after the other, eventually makes every cached page of `pool` free."""

    def __init__(self, pool: PagePool, tenants: Tenants, policy: EvictionPolicy) -> None:
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
        self._pinned: dict[Tenant, EvictionHeap] = {}
        self._pinned_pages: Counter[Tenant] = Counter()

    def rank(self, item: Evictable) -> float:
        """The eviction rank of an item that becomes idle now.

        An item that can be offered only later keeps this rank.
        """
        self._num_ranked += 1
        return self._policy.rank(item, self._num_ranked, self._age)

    def offer(self, item: Evictable, evict: Callable[[Tenant], None], rank: float) -> None:
        """Makes an item evictable. The item is idle, its pages are parked (`PagePool.park`), and it is not hidden.

        evict: `evict(taker)` evicts the item for tenant `taker`. It frees `item.pages` in the pool, and may offer items
            that this item hid.
        """
        assert item.ticket == 0, f"{item!r} is offered already"
        self._last_ticket += 1
        item.ticket = self._last_ticket
        self._heap_of(item).push(Offer(rank, item.ticket, item, evict))
        if item.is_pinned:
            self._pinned_pages[item.tenant] += len(item.pages)

    def reuse(self, item: Evictable) -> None:
        """Called when a ranked item is used again, whether it was offered or hidden."""
        self._policy.learn(item, was_used=True)
        self.withdraw(item)

    def give_up(self, item: Evictable) -> None:
        """Called when an item is evicted for a resource other than its pages, such as its slot."""
        self._policy.learn(item, was_used=False)
        self.withdraw(item)

    def withdraw(self, item: Evictable) -> None:
        """Makes an item no longer evictable, because it is in use again, hidden or removed.

        Does nothing if it is not offered.
        """
        if item.ticket:
            self._drop(item)

    def num_evictable(self, num_pages: int, tenant: Tenant, *, ignore_pins: bool) -> int:
        """Upper bound on the pages that can be evicted when `tenant` allocates `num_pages`. Ignores floors."""
        if ignore_pins:
            return self._pool.num_cached
        own = min(tenant.pages_over_ceiling(num_pages), self._pinned_pages[tenant])
        return self._pool.num_cached - self._pinned_pages.total() + own

    def could_make_room(self, num_pages: int, tenant: Tenant, spare: Collection[Evictable] = ()) -> bool:
        """Whether `make_room` with these arguments would succeed. Evicts nothing."""
        if num_pages == 0 or self._is_there(num_pages, tenant):
            return True
        self._follow_shares()
        return self._is_enough(num_pages, tenant, frozenset(spare), ignore_floors=False, ignore_pins=False)

    def make_room(
        self,
        num_pages: int,
        tenant: Tenant,
        spare: Collection[Evictable] = (),
        *,
        ignore_floors: bool = False,
        ignore_pins: bool = False,
    ) -> bool:
        """Evicts items until `num_pages` pages are free and `tenant` may allocate them.

        Returns False if that can't be done.

        The evictable pages are counted first, so a call that fails evicts nothing.

        spare: items that must not be evicted. For each prefix block in `spare`, it must also contain the idle blocks
            before that block, which become evictable only after it.
        ignore_floors: treat all other tenants as if they had no floor.
        ignore_pins: evict pinned items when no unpinned item is left.
        """
        if num_pages == 0 or self._is_there(num_pages, tenant):
            return True
        self._follow_shares()
        spared = frozenset(spare)  # count each item once
        if not self._is_enough(
            num_pages, tenant, spared, ignore_floors=ignore_floors, ignore_pins=ignore_pins
        ):
            return False
        search = _Search(tenant, spared, ignore_floors=ignore_floors)
        enough = self._pay_own(num_pages, search) and self._free(num_pages, search, ignore_pins=ignore_pins)
        search.end()
        return enough

    def check(self) -> None:
        """Proves that every offered item can be evicted and is in the heap of its owner."""
        self._follow_shares()
        pinned_pages: Counter[Tenant] = Counter()
        for heap in (self._common, *self._heaps.values(), *self._pinned.values()):
            heap.check()
            for item in (offer.item for offer in heap.live()):
                assert all(self._pool.is_cached(page) for page in item.pages), (
                    f"{item!r} is offered and not idle"
                )
                assert all(self._pool.owner(page) is item.tenant for page in item.pages), (
                    f"{item!r} is another's"
                )
                assert self._heap_of(item) is heap, f"{item!r} is in another tenant's heap"
                if item.is_pinned:
                    pinned_pages[item.tenant] += len(item.pages)
        assert pinned_pages == self._pinned_pages, "pages of pins are miscounted"

    def _is_there(self, num_pages: int, tenant: Tenant) -> bool:
        return num_pages <= self._pool.num_free and not tenant.pages_over_ceiling(num_pages)

    def _is_enough(
        self,
        num_pages: int,
        tenant: Tenant,
        spared: frozenset[Evictable],
        *,
        ignore_floors: bool,
        ignore_pins: bool,
    ) -> bool:
        """Whether a lower bound of the evictable pages is enough."""
        kept: Counter[Tenant] = Counter()
        pinned = self._pinned_pages.copy()
        for item in spared:
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

    def _pay_own(self, num_pages: int, search: "_Search") -> bool:
        """Evicts the tenant's own items until `num_pages` more pages stay within its ceiling."""
        tenant = search.taker
        pinned = [self._pinned[tenant]] if tenant in self._pinned else []
        while tenant.pages_over_ceiling(num_pages):
            if not (self._evict_lowest([self._heaps[tenant]], search) or self._evict_lowest(pinned, search)):
                return False
        return True

    def _free(self, num_pages: int, search: "_Search", *, ignore_pins: bool) -> bool:
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
        offer = heap.pop()
        self._drop(offer.item)
        # The age never decreases. Because of floors and spared items, the evicted item is not always the one with the
        # lowest rank.
        self._age = max(self._age, offer.rank)
        self.num_evictions += 1
        self._policy.learn(offer.item, was_used=False)
        offer.evict(search.taker)
        return True

    def _drop(self, item: Evictable) -> None:
        """Marks the item as no longer offered."""
        item.ticket = 0
        self._heap_of(item).drop()
        if item.is_pinned:
            self._pinned_pages[item.tenant] -= len(item.pages)

    def _heap_of(self, item: Evictable) -> EvictionHeap:
        if item.is_pinned:
            return self._pinned.setdefault(item.tenant, EvictionHeap())
        if self._bounded is not self._tenants.bounded:
            self._follow_shares()
        return self._heaps.get(item.tenant, self._common)

    def _follow_shares(self) -> None:
        """Sorts all items into heaps again after a tenant got its first floor or ceiling, or lost its last."""
        if self._bounded is self._tenants.bounded:
            return
        offers = [offer for heap in (self._common, *self._heaps.values()) for offer in heap.live()]
        self._bounded = self._tenants.bounded
        self._common = EvictionHeap()
        self._heaps = {tenant: EvictionHeap() for tenant in self._bounded}
        for offer in offers:
            self._heaps.get(offer.item.tenant, self._common).push(offer)


class _Search:
    """The state of one `make_room` call: the tenant that takes the pages, the spared items and the offers passed over
    so far.
    """

    __slots__ = ("_ignores_floors", "_passed_over", "_spared", "taker")

    def __init__(self, taker: Tenant, spared: frozenset[Evictable], *, ignore_floors: bool) -> None:
        self.taker = taker
        self._ignores_floors = ignore_floors
        self._spared = spared
        self._passed_over: list[tuple[EvictionHeap, Offer]] = []

    def lowest(self, heaps: list[EvictionHeap]) -> EvictionHeap | None:
        """The heap whose lowest offer is evicted next."""
        best: EvictionHeap | None = None
        best_offer: Offer | None = None
        for heap in heaps:
            offer = self._lowest_of(heap)
            if offer is not None and (best_offer is None or offer < best_offer):
                best, best_offer = heap, offer
        return best

    def end(self) -> None:
        for heap, offer in self._passed_over:
            heap.put_back(offer)

    def _lowest_of(self, heap: EvictionHeap) -> Offer | None:
        offer = heap.lowest()
        while offer is not None and not self._may_leave(offer.item):
            self._passed_over.append((heap, heap.pop()))
            offer = heap.lowest()
        return offer

    def _may_leave(self, item: Evictable) -> bool:
        # A tenant's pages above its floor only shrink during a search, so an offer that was passed over stays
        # ineligible.
        owner = item.tenant
        return (
            owner.is_above_floor or owner is self.taker or self._ignores_floors
        ) and item not in self._spared
