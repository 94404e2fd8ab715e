"""A heap of evictable items, lowest rank first. It does not depend on the policy or on page states."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from slora.pool.eviction_policy import Evictable
from slora.pool.tenant_account import TenantAccount

# Stale candidates are removed once they outnumber the live ones by more than this.
_FEW = 64


class Candidate(NamedTuple):
    """One evictable item in the heap. `evict(requester)` evicts the item for the tenant that needs its pages.

    Tickets are unique, so comparing two candidates never compares items.
    """

    rank: float
    ticket: int
    item: Evictable
    evict: Callable[[TenantAccount], None]

    @property
    def is_live(self) -> bool:
        """Whether the item is still a candidate with this ticket. An item that was removed has ticket 0, or a newer
        ticket if it was added again.
        """
        return self.item.ticket == self.ticket


class EvictionHeap:
    """A heap of candidates, lowest rank first.

    Removed candidates stay in the heap until they reach its top (lazy deletion) or outnumber the live candidates.
    """

    __slots__ = ("_candidates", "num_live")

    def __init__(self) -> None:
        self.num_live = 0
        self._candidates: list[Candidate] = []

    def push(self, candidate: Candidate) -> None:
        heapq.heappush(self._candidates, candidate)
        self.num_live += 1

    def peek(self) -> Candidate | None:
        candidates = self._candidates
        while candidates:
            candidate = candidates[0]
            if candidate.is_live:
                return candidate
            heapq.heappop(candidates)
        return None

    def pop(self) -> Candidate:
        """Removes the candidate that `peek` just returned. It still counts as live until `count_removed` is called."""
        return heapq.heappop(self._candidates)

    def push_back(self, candidate: Candidate) -> None:
        """Pushes a candidate again after `pop`, whether it is still live or not."""
        heapq.heappush(self._candidates, candidate)

    def count_removed(self) -> None:
        """Decrements the number of live candidates, after the caller has cleared the ticket of the removed item."""
        self.num_live -= 1
        if len(self._candidates) > 2 * self.num_live + _FEW:
            self._candidates = self.live_candidates()
            heapq.heapify(self._candidates)

    def live_candidates(self) -> list[Candidate]:
        return [candidate for candidate in self._candidates if candidate.is_live]

    def check_invariants(self) -> None:
        live = self.live_candidates()
        assert len(live) == self.num_live, (
            f"{len(live)} candidates are live, but the counter is {self.num_live}"
        )
        # A search temporarily removes live candidates from the heap, and a sweep during the search does not see them.
        # So the heap may exceed its usual limit by `num_live` after the search has pushed them back.
        assert len(self._candidates) <= 3 * self.num_live + _FEW, "stale candidates pile up"
