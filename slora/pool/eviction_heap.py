"""What may leave the pool, lowest rank first. Knows no policy and no page state."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from slora.pool.eviction_policy import Evictable
from slora.pool.tenant import Tenant

# Below this many, dead entries are not worth a sweep.
_FEW = 64


class Offer(NamedTuple):
    """`evict(taker)` makes the item leave, for the tenant that wants its pages. Tickets are unique, so items are never
    compared."""

    rank: float
    ticket: int
    item: Evictable
    evict: Callable[[Tenant], None]

    @property
    def is_live(self) -> bool:
        """Whether it still stands: what was withdrawn has no ticket, or a later one."""
        return self.item.ticket == self.ticket


class EvictionHeap:
    """Withdrawn offers stay until they come up (lazy deletion), or until they outnumber the others."""

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
        """Takes out the lowest, which `lowest` has just shown. It counts still, until it is dropped."""
        return heapq.heappop(self._offers)

    def put_back(self, offer: Offer) -> None:
        """After `pop`, whether it stands still or not."""
        heapq.heappush(self._offers, offer)

    def drop(self) -> None:
        """One of the tickets is dead: it counts no longer."""
        self.num_live -= 1
        if len(self._offers) > 2 * self.num_live + _FEW:
            self._offers = self.live()
            heapq.heapify(self._offers)

    def live(self) -> list[Offer]:
        return [offer for offer in self._offers if offer.is_live]

    def check(self) -> None:
        live = self.live()
        assert len(live) == self.num_live, f"{len(live)} offers stand, counted {self.num_live}"
        # Those that a search put back come on top of what a sweep leaves.
        assert len(self._offers) <= 3 * self.num_live + _FEW, "dead offers pile up"
