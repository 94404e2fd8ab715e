"""One decision for the whole pool: what leaves when pages are short, among idle adapters and cached prefixes together.

The policy ranks; the evictor keeps what tenants are entitled to. A tenant's floor: others take cached things of it
while it owns more than that; so the last of them may cut into the floor, by less than its own size. A tenant's ceiling:
at it, the tenant pays with its own cached pages for each one that it takes.

What is pinned stays as long as anything else can leave, and then only leaves where the caller says so, or for its own
tenant, which pays with it at its ceiling when it has nothing else. It is in heaps of its own.

Those without floor or ceiling, nearly all, share one heap; each of the others has one of its own. Nothing here scales
with the number of idle things, save their order in a heap.
"""

from collections import Counter
from collections.abc import Callable, Collection

from slora.pool.eviction_heap import EvictionHeap, Offer
from slora.pool.eviction_policy import Evictable, EvictionPolicy
from slora.pool.page_pool import PagePool
from slora.pool.tenant import Tenant, Tenants


class Evictor:
    """Every cached page of `pool` must come up for eviction when what is offered leaves, one after the other."""

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
        """As of now, when it falls idle. Something that only comes up for eviction later keeps the rank it had."""
        self._num_ranked += 1
        return self._policy.rank(item, self._num_ranked, self._age)

    def offer(self, item: Evictable, evict: Callable[[Tenant], None], rank: float) -> None:
        """It is idle and parked, and nothing else hides it. `evict(taker)` will make it leave: it frees `item.pages` in
        the pool, and may offer what it hid."""
        assert item.ticket == 0, f"{item!r} is offered already"
        self._last_ticket += 1
        item.ticket = self._last_ticket
        self._heap_of(item).push(Offer(rank, item.ticket, item, evict))
        if item.is_pinned:
            self._pinned_pages[item.tenant] += len(item.pages)

    def reuse(self, item: Evictable) -> None:
        """It was ranked, and is used again, whether it was offered or hidden."""
        self._policy.learn(item, was_used=True)
        self.withdraw(item)

    def give_up(self, item: Evictable) -> None:
        """It leaves for somebody who wants something else of it than its pages."""
        self._policy.learn(item, was_used=False)
        self.withdraw(item)

    def withdraw(self, item: Evictable) -> None:
        """It is hidden, or gone. Nothing happens if it is not offered."""
        if item.ticket:
            self._drop(item)

    def num_evictable(self, num_pages: int, tenant: Tenant, *, ignore_pins: bool) -> int:
        """Cached pages that could leave at best, floors aside, when `tenant` takes `num_pages`."""
        if ignore_pins:
            return self._pool.num_cached
        own = min(tenant.pages_over_ceiling(num_pages), self._pinned_pages[tenant])
        return self._pool.num_cached - self._pinned_pages.total() + own

    def could_make_room(self, num_pages: int, tenant: Tenant, spare: Collection[Evictable] = ()) -> bool:
        """What `make_room` would say."""
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
        """Evicts until `num_pages` are free that `tenant` may take; never `spare`. False if it can't be done.

        Nothing is evicted in vain: it counts first. ignore_floors: as if no other tenant had one.
        ignore_pins: what is pinned may leave, too, when nothing else can.

        With an item, `spare` must name the idle ones that can't leave before it: the blocks before a block.
        """
        if num_pages == 0 or self._is_there(num_pages, tenant):
            return True
        self._follow_shares()
        spared = frozenset(spare)  # once each
        if not self._is_enough(
            num_pages, tenant, spared, ignore_floors=ignore_floors, ignore_pins=ignore_pins
        ):
            return False
        search = _Search(tenant, spared, ignore_floors=ignore_floors)
        enough = self._pay_own(num_pages, search) and self._free(num_pages, search, ignore_pins=ignore_pins)
        search.end()
        return enough

    def check(self) -> None:
        """Proves that what is offered can leave, and stands in its owner's heap."""
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
        """Whether what may leave is as much, at the least."""
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
            # At its ceiling it pays with its own pins for what its other pages are too few for.
            pinned[tenant] -= max(0, over_ceiling - (own - pinned[tenant]))
            kept += pinned
        freed = self._pool.num_cached - kept.total()
        for other in self._bounded:
            if other.min_pages and other is not tenant and not ignore_floors:
                above_floor = max(0, other.num_pages - other.min_pages)
                freed -= max(0, other.num_cached - kept[other] - above_floor)
        return num_pages <= self._pool.num_free + freed

    def _pay_own(self, num_pages: int, search: "_Search") -> bool:
        """A tenant at its ceiling gives up its own before it takes more."""
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
        # Never back: with floors and spared things, what leaves is not always the lowest of all.
        self._age = max(self._age, offer.rank)
        self.num_evictions += 1
        self._policy.learn(offer.item, was_used=False)
        offer.evict(search.taker)
        return True

    def _drop(self, item: Evictable) -> None:
        """It is offered no more."""
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
        """When a tenant gets its first floor or ceiling, or loses them, everything is sorted into heaps anew."""
        if self._bounded is self._tenants.bounded:
            return
        offers = [offer for heap in (self._common, *self._heaps.values()) for offer in heap.live()]
        self._bounded = self._tenants.bounded
        self._common = EvictionHeap()
        self._heaps = {tenant: EvictionHeap() for tenant in self._bounded}
        for offer in offers:
            self._heaps.get(offer.item.tenant, self._common).push(offer)


class _Search:
    """One call's: who takes, what may not leave for it, and which offers it has passed over."""

    __slots__ = ("_ignores_floors", "_passed_over", "_spared", "taker")

    def __init__(self, taker: Tenant, spared: frozenset[Evictable], *, ignore_floors: bool) -> None:
        self.taker = taker
        self._ignores_floors = ignore_floors
        self._spared = spared
        self._passed_over: list[tuple[EvictionHeap, Offer]] = []

    def lowest(self, heaps: list[EvictionHeap]) -> EvictionHeap | None:
        """The one whose lowest offer leaves next."""
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
        # What is above a floor only shrinks during a search: what is passed over once need not be looked at again.
        owner = item.tenant
        return (
            owner.is_above_floor or owner is self.taker or self._ignores_floors
        ) and item not in self._spared
