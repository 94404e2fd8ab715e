"""First come, first served, regardless of tenant. Background sequences come after all others."""

import heapq
from collections.abc import Collection, Iterable

from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence

_Entry = tuple[bool, Sequence]


class FifoQueue:
    """A heap of sequences, sorted by class and then by arrival. A removed sequence stays in the heap until it reaches
    the top.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        self._members.add(sequence)
        sequence.tenant.num_waiting += 1
        heapq.heappush(self._heap, _order(sequence))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._members:
            self._members.remove(sequence)
            sequence.tenant.num_waiting -= 1

    def peek(self, skipped: Collection[TenantAccount] = ()) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        if self._heap[0][1].tenant not in skipped:
            return self._heap[0][1]
        return min((one for one in self._members if one.tenant not in skipped), key=_order, default=None)

    def upcoming(self, count: int) -> list[Sequence]:
        return [one for _, one in self._heap[: 2 * count] if one in self._members][:count]

    def choose_victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=_order)


def _order(sequence: Sequence) -> _Entry:
    return sequence.is_background, sequence
