"""How many pages of adapters a step loads into the pool beside the sequences that decode.

A step that loads for t seconds delays every decoding sequence by t, and brings the waiting requests a step nearer to
their adapter. So a step may grow by its own length times the number of waiting requests for each decoding sequence. It
may grow by at least a tenth: a request that waits alone gets its adapter soon, and the delay is not noticed.
"""

from slora.cost_model import Costs

_LEAST_SHARE = 0.1


class LoadPace:
    """fixed: pages for any step; None follows from `costs` and from the numbers of sequences."""

    def __init__(self, costs: Costs, full_page_bytes: int, fixed: int | None) -> None:
        self._costs = costs
        self._full_page_bytes = full_page_bytes
        self._fixed = fixed

    def pages(self, num_decoding: int, num_waiting: int) -> int:
        """At least 1. num_waiting: requests that run as soon as their adapter is in the pool.

        Worked example: steps of 0.03 s for 20 who decode, pages that take 0.001 s. One waits: 0.1 of 0.03 s, 3 pages.
        11 wait: 10 of 20 is half of 0.03 s, 15 pages.
        """
        if self._fixed is not None:
            return self._fixed
        step_s = self._costs.step_s + num_decoding * self._costs.decode_s
        share = max(_LEAST_SHARE, (num_waiting - 1) / num_decoding)
        page_s = self._costs.load_s(self._full_page_bytes)
        return max(1, int(share * step_s / page_s)) if page_s else 1
