"""A heap of evictable items, lowest rank first. It does not depend on the policy or on page states."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from slora.pool.eviction_policy import Evictable
from slora.pool.tenant import Tenant

# With fewer live offers than this, removing dead offers is not worth a sweep.
_FEW = 64


class Offer(NamedTuple):
    """One evictable item in the heap. `evict(taker)` evicts the item for the tenant that needs its pages.

    Tickets are unique, so comparing two offers never compares items.
    """

    rank: float
    ticket: int
    item: Evictable
    evict: Callable[[Tenant], None]

    @property
    def is_live(self) -> bool:
        """Whether the offer is still valid. A withdrawn item has no ticket (0) or a newer one."""
        return self.item.ticket == self.ticket


class EvictionHeap:
    """Withdrawn offers stay in the heap until they reach its top (lazy deletion) or outnumber the live ones."""

    __slots__ = ("_offers", "num_live")

    def __init__(self) -> None:
        self.num_live = 0
        self._offers: list[Offer] = []

    def push(self, offer: Offer) -> None:
        heapq.heappush(self._offers, offer)
        self.num_live += 1

    def lowest(self) -> Offer | None:
        offers = self._offers
        while offers:
            offer = offers[0]
            if offer.is_live:
                return offer
            heapq.heappop(offers)
        return None

    def pop(self) -> Offer:
        """Removes the offer that `lowest` just returned. It still counts as live until `drop` is called."""
        return heapq.heappop(self._offers)

    def put_back(self, offer: Offer) -> None:
        """Pushes an offer again after `pop`, whether it is still live or not."""
        heapq.heappush(self._offers, offer)

    def drop(self) -> None:
        """Counts one offer less, after the caller has cleared its item's ticket."""
        self.num_live -= 1
        if len(self._offers) > 2 * self.num_live + _FEW:
            self._offers = self.live()
            heapq.heapify(self._offers)

    def live(self) -> list[Offer]:
        return [offer for offer in self._offers if offer.is_live]

    def check(self) -> None:
        live = self.live()
        assert len(live) == self.num_live, f"{len(live)} offers stand, counted {self.num_live}"
        # Offers that a search put back are added to those that a sweep leaves.
        assert len(self._offers) <= 3 * self.num_live + _FEW, "dead offers pile up"
