"""The evictor: when the pool runs out of free pages, it chooses which idle adapter or cached prefix block is evicted.

Only candidates can be evicted. An idle adapter is always a candidate. An idle prefix block is a candidate only while no
idle block follows it; otherwise it is hidden.

The item that has been idle longest is evicted first, within the bounds of tenants:

Floor (`min_pages`): other tenants can evict a tenant's cached items only while it owns more pages than its floor. The
last eviction may cut into the floor by less than the size of the evicted item.

Ceiling (`max_pages`): a tenant at its ceiling must evict one of its own cached pages for each page that it allocates.

A pinned item is evicted only when no unpinned item can be evicted, and only in two cases: the caller passes
`ignore_pins`, or the tenant that owns the item is at its ceiling. Pinned items have heaps of their own.

Nearly all tenants have neither floor nor ceiling and share one heap. Each tenant with bounds has its own heap. Apart
from the logarithmic heap operations, the cost of an operation does not grow with the number of idle items.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount, TenantAccounts

# Stale candidates are removed once they outnumber the live ones by more than this.
_FEW = 64


class Evictable(Protocol):
    """An idle adapter, or the last idle block of a cached prefix."""

    rank: int  # Set by the owner to `Evictor.next_rank` when the item becomes idle. The lowest rank is evicted first.
    ticket: int  # Identifies the item's entry in a heap. It is 0 while the item is not a candidate.

    @property
    def is_pinned(self) -> bool:
        """Whether the item is pinned. This changes only while the item is not a candidate."""
        ...

    @property
    def pages(self) -> list[int]:
        """The pages that evicting the item frees."""
        ...

    @property
    def tenant(self) -> TenantAccount:
        """The tenant that owns the pages."""
        ...


class _Candidate(NamedTuple):
    """One evictable item in the heap. `evict(requester)` evicts the item for the tenant that needs its pages.

    Tickets are unique, so comparing two candidates never compares items.
    """

    rank: int
    ticket: int
    item: Evictable
    evict: Callable[[TenantAccount], None]

    @property
    def is_live(self) -> bool:
        """Whether the item is still a candidate with this ticket. An item that was removed has ticket 0, or a newer
        ticket if it was added again.
        """
        return self.item.ticket == self.ticket


class _Heap:
    """A heap of candidates, lowest rank first.

    Removed candidates stay in the heap until they reach its top (lazy deletion) or outnumber the live candidates.
    """

    __slots__ = ("_candidates", "num_live")

    def __init__(self) -> None:
        self.num_live = 0
        self._candidates: list[_Candidate] = []

    def push(self, candidate: _Candidate) -> None:
        heapq.heappush(self._candidates, candidate)
        self.num_live += 1

    def peek(self) -> _Candidate | None:
        candidates = self._candidates
        while candidates:
            candidate = candidates[0]
            if candidate.is_live:
                return candidate
            heapq.heappop(candidates)
        return None

    def pop(self) -> _Candidate:
        """Removes the candidate that `peek` just returned. It still counts as live until `count_removed` is called."""
        return heapq.heappop(self._candidates)

    def push_back(self, candidate: _Candidate) -> None:
        """Pushes a candidate again after `pop`, whether it is still live or not."""
        heapq.heappush(self._candidates, candidate)

    def count_removed(self) -> None:
        """Decrements the number of live candidates, after the caller has cleared the ticket of the removed item."""
        self.num_live -= 1
        if len(self._candidates) > 2 * self.num_live + _FEW:
            self._candidates = self.live_candidates()
            heapq.heapify(self._candidates)

    def live_candidates(self) -> list[_Candidate]:
        return [candidate for candidate in self._candidates if candidate.is_live]

    def check_invariants(self) -> None:
        live = self.live_candidates()
        assert len(live) == self.num_live, (
            f"{len(live)} candidates are live, but the counter is {self.num_live}"
        )
        # A search temporarily removes live candidates from the heap, and a sweep during the search does not see them.
        # So the heap may exceed its usual limit by `num_live` after the search has pushed them back.
        assert len(self._candidates) <= 3 * self.num_live + _FEW, "stale candidates pile up"


class Evictor:
    """Evicts idle adapters and cached prefix blocks within the bounds of tenants.

    Invariant: evicting all candidates, one after the other, eventually makes every cached page of `pool` free.
    """

    def __init__(self, pool: PagePool, tenants: TenantAccounts) -> None:
        self.num_evictions = 0
        self._pool = pool
        self._tenants = tenants
        self._last_ticket = self._last_rank = 0
        self._common = _Heap()
        self._bounded = tenants.bounded
        self._heaps = {tenant: _Heap() for tenant in tenants.bounded}
        self._pinned: dict[TenantAccount, _Heap] = {}
        self._pinned_pages: Counter[TenantAccount] = Counter()

    def next_rank(self) -> int:
        """The rank of an item that becomes idle now. A hidden item keeps its rank until it becomes a candidate."""
        self._last_rank += 1
        return self._last_rank

    def add(self, item: Evictable, evict: Callable[[TenantAccount], None]) -> None:
        """Makes an item a candidate. The item must be idle and not hidden, and its pages must be cached.

        evict: `evict(requester)` evicts the item for tenant `requester`. It frees `item.pages` in the pool, and
            may add items that this item hid.
        """
        assert item.ticket == 0, f"{item!r} is already a candidate"
        self._last_ticket += 1
        item.ticket = self._last_ticket
        self._heap_of(item).push(_Candidate(item.rank, item.ticket, item, evict))
        if item.is_pinned:
            self._pinned_pages[item.tenant] += len(item.pages)

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

    def _evict_lowest(self, heaps: list[_Heap], search: "_Search") -> bool:
        heap = search.lowest(heaps)
        if heap is None:
            return False
        candidate = heap.pop()
        self._mark_removed(candidate.item)
        self.num_evictions += 1
        candidate.evict(search.requester)
        return True

    def _mark_removed(self, item: Evictable) -> None:
        """Marks the item as no longer a candidate."""
        item.ticket = 0
        self._heap_of(item).count_removed()
        if item.is_pinned:
            self._pinned_pages[item.tenant] -= len(item.pages)

    def _heap_of(self, item: Evictable) -> _Heap:
        if item.is_pinned:
            return self._pinned.setdefault(item.tenant, _Heap())
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
        self._common = _Heap()
        self._heaps = {tenant: _Heap() for tenant in self._bounded}
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
        self._skipped: list[tuple[_Heap, _Candidate]] = []

    def lowest(self, heaps: list[_Heap]) -> _Heap | None:
        """The heap whose lowest candidate is evicted next."""
        best: _Heap | None = None
        best_candidate: _Candidate | None = None
        for heap in heaps:
            candidate = self._lowest_of(heap)
            if candidate is not None and (best_candidate is None or candidate < best_candidate):
                best, best_candidate = heap, candidate
        return best

    def end(self) -> None:
        for heap, candidate in self._skipped:
            heap.push_back(candidate)

    def _lowest_of(self, heap: _Heap) -> _Candidate | None:
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
