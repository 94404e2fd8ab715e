"""Deadlines for the first token: the early abort of S-LoRA.

The scheduler ends a request that would miss its deadline even if it were admitted now. The compute time then goes to
requests that can still meet their deadlines. A beam search yields its first token only when it is over, so even a
running search can be ended. Times are seconds on the scheduler's clock.
"""

import heapq

from slora.core.cost_model import CostModel
from slora.scheduler.beam_search import BeamSearch
from slora.scheduler.lifecycle import UnfinishedRequests
from slora.scheduler.sequence import Sequence


class Deadlines:
    """A heap of requests, sorted by the latest time at which each request can still meet its deadline.

    This time assumes that the request has made no progress since it was last examined.
    """

    def __init__(self, costs: CostModel, unfinished: UnfinishedRequests) -> None:
        self._costs = costs
        self._unfinished = unfinished
        self._heap: list[tuple[float, Sequence, float]] = []

    def add(self, sequence: Sequence, deadline_s: float) -> None:
        """Adds a request. sequence: its first sequence."""
        latest_s = deadline_s - self._min_s([sequence])
        heapq.heappush(self._heap, (latest_s, sequence, deadline_s))

    @property
    def next_due_s(self) -> float | None:
        """The time at which a request must be examined next. By then, the request may have its first token.

        None if the heap is empty.
        """
        return self._heap[0][0] if self._heap else None

    def pop_missed(self, now: float) -> list[Sequence]:
        """Returns one sequence of each request that can no longer meet its deadline. Returns each request only once."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            _, sequence, deadline_s = heapq.heappop(self._heap)
            awaited = self._find_awaited(sequence)
            if not awaited:
                continue
            latest_s = deadline_s - self._min_s(awaited)
            if latest_s <= now:
                late.append(awaited[0])
            else:
                heapq.heappush(self._heap, (latest_s, sequence, deadline_s))
        return late

    def _find_awaited(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that a missed deadline would end: all beams of an unfinished search, or a sequence that neither
        runs nor has generated a token.
        """
        if sequence.search is not None:
            found = self._unfinished.find(sequence.request.request_id)
            return [beam for beam in found if beam.search is sequence.search]
        is_over = sequence.is_finished or sequence.is_running or sequence.num_generated > 0
        return [] if is_over else [sequence]

    def _min_s(self, awaited: list[Sequence]) -> float:
        """Returns the minimum time in seconds until the first token, if the request runs from now on."""
        first, search = awaited[0], awaited[0].search
        if search is None:
            return self._costs.prefill_s(first.num_prompt)
        prefill_s = 0.0 if first.num_generated else self._costs.prefill_s(first.num_uncomputed)
        return prefill_s + self._decode_s(search, min(beam.max_tokens for beam in awaited))

    def _decode_s(self, search: BeamSearch, max_tokens: int) -> float:
        """Returns the minimum time in seconds that the search needs for decoding after the next step.

        The next step is not counted, because it may run for other sequences anyway.
        """
        num_steps = search.count_min_steps(max_tokens) - 1
        return num_steps * (self._costs.step_s + search.width * self._costs.decode_s)
