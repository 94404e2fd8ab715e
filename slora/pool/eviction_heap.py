"""A heap of evictable items, lowest rank first. It does not depend on the policy or on page states."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from slora.pool.eviction_policy import Evictable
from slora.pool.tenant_account import TenantAccount

# With fewer live candidates than this, removing stale ones is not worth a sweep.
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
        """False if the item has been removed since: it then has no ticket (0) or a newer one."""
        return self.item.ticket == self.ticket


class EvictionHeap:
    """Removed candidates stay in the heap until they reach its top (lazy deletion) or outnumber the live ones."""

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
        """Counts one live candidate less, after the caller has cleared its item's ticket."""
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
        # Candidates that a search pushed back are added to those that a sweep leaves.
        assert len(self._candidates) <= 3 * self.num_live + _FEW, "stale candidates pile up"
