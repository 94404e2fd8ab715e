"""Requests that want their first token by a certain time: S-LoRA's early abort.

Who can't be in time any more, even if it started now, is given up: the time it would take is left to those who still
can. Times are of the scheduler's clock, in seconds.
"""

import heapq

from slora.scheduler.sequence import Sequence


class Deadlines:
    """A heap by the latest time at which each must start."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Sequence]] = []

    def add(self, sequence: Sequence, latest_start_s: float) -> None:
        heapq.heappush(self._heap, (latest_start_s, sequence))

    @property
    def next_s(self) -> float | None:
        """When somebody's latest start comes next, perhaps one's who has begun since."""
        return self._heap[0][0] if self._heap else None

    def missed(self, now: float) -> list[Sequence]:
        """Those who have not begun by their latest start; each is told of once."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[1]
            if not sequence.done and not sequence.is_running and not sequence.num_generated:
                late.append(sequence)
        return late
