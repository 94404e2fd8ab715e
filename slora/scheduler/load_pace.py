"""How many adapter pages a step loads into the pool beside decoding sequences.

A step that loads for t seconds delays every decoding sequence by t, and brings the waiting requests closer to their
adapter. So a step may grow by its own length times the number of waiting requests per decoding sequence. It may always
grow by a tenth: a request that waits alone gets its adapter soon, and the delay is not noticeable.
"""

from slora.cost_model import Costs

_LEAST_SHARE = 0.1


class LoadPace:
    """The load budget of each step.

    fixed: pages per step; None derives them from `costs` and the numbers of sequences.
    """

    def __init__(self, costs: Costs, full_page_bytes: int, fixed: int | None) -> None:
        self._costs = costs
        self._full_page_bytes = full_page_bytes
        self._fixed = fixed

    def pages(self, num_decoding: int, num_waiting: int) -> int:
        """Adapter pages that one step may load; at least 1. num_waiting: requests that wait only for a load into the
        pool.

        Worked example: 20 decoding sequences, steps of 0.03 s, 0.001 s per page. With 1 waiting request the step grows
        by 0.1 * 0.03 s: 3 pages. With 11 it grows by 10 / 20 = half of 0.03 s: 15 pages.
        """
        if self._fixed is not None:
            return self._fixed
        step_s = self._costs.step_s + num_decoding * self._costs.decode_s
        share = max(_LEAST_SHARE, (num_waiting - 1) / num_decoding)
        page_s = self._costs.load_s(self._full_page_bytes)
        return max(1, int(share * step_s / page_s)) if page_s else 1
