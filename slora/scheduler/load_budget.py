"""How many adapter pages a step loads into the pool beside decoding sequences.

A step that loads for t seconds delays every decoding sequence by t, and brings the waiting requests closer to their
adapter. So a step may grow by its own length times the number of waiting requests per decoding sequence. It may always
grow by a tenth: a request that waits alone gets its adapter soon, and the delay is not noticeable. A step without
decoding sequences has no limit.
"""

from slora.cost_model import Costs

_MIN_SHARE = 0.1


class LoadBudget:
    """The load budget of the step that is being planned.

    num_pages: adapter pages that the step may still load.
    pool_pages: pages of the pool; a step without decoding sequences may load all of them.
    fixed: pages per step beside decoding sequences; None derives them from `costs` and the numbers of sequences.
    """

    def __init__(self, costs: Costs, full_page_bytes: int, pool_pages: int, fixed: int | None) -> None:
        self.num_pages = 0
        self._costs = costs
        self._full_page_bytes = full_page_bytes
        self._pool_pages = pool_pages
        self._fixed = fixed
        self._is_limited = False

    def begin_step(self, num_decoding: int, num_waiting: int) -> None:
        """num_decoding: running sequences that compute. num_waiting: running sequences that wait for a load."""
        self._is_limited = num_decoding > 0
        self.num_pages = self._limit(num_decoding, num_waiting) if self._is_limited else self._pool_pages

    def add_first_sequence(self) -> None:
        """Called when a sequence is added to the step. Limits the budget if no sequence was decoding before."""
        if not self._is_limited:
            self._is_limited = True
            self.num_pages = min(self.num_pages, self._limit(num_decoding=1, num_waiting=1))

    def _limit(self, num_decoding: int, num_waiting: int) -> int:
        """Adapter pages that one step may load; at least 1.

        Worked example: 20 decoding sequences, steps of 0.03 s, 0.001 s per page. With 1 waiting request the step grows
        by 0.1 * 0.03 s: 3 pages. With 11 it grows by 10 / 20 = half of 0.03 s: 15 pages.
        """
        if self._fixed is not None:
            return self._fixed
        step_s = self._costs.step_s + num_decoding * self._costs.decode_s
        share = max(_MIN_SHARE, (num_waiting - 1) / num_decoding)
        page_s = self._costs.load_s(self._full_page_bytes)
        return max(1, int(share * step_s / page_s)) if page_s else 1
