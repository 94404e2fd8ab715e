"""Deadlines for the first token: the early abort of S-LoRA.

A request that would miss its deadline even if it were admitted now is ended. Its compute time then serves requests that
can still meet theirs. Times are seconds on the scheduler's clock.
"""

import heapq

from slora.scheduler.sequence import Sequence


class Deadlines:
    """A heap of sequences by the latest time at which each must be admitted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Sequence]] = []

    def add(self, sequence: Sequence, latest_start_s: float) -> None:
        heapq.heappush(self._heap, (latest_start_s, sequence))

    @property
    def next_s(self) -> float | None:
        """The earliest latest-admission time in the heap; its sequence may have been admitted since.

        None if the heap is empty.
        """
        return self._heap[0][0] if self._heap else None

    def missed(self, now: float) -> list[Sequence]:
        """Sequences past their latest admission time that neither run nor have generated a token.

        Each is returned once.
        """
        late = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[1]
            if not sequence.done and not sequence.is_running and not sequence.num_generated:
                late.append(sequence)
        return late
