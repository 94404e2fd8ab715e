"""The number of adapter pages that a step may load into the pool while sequences decode.

If a step spends t seconds on loads, every decoding sequence is delayed by t. In return, the requests that wait for
these adapters start sooner. The limit weighs the delay against this gain. With W waiting requests and D decoding
sequences, loads may lengthen the step by the fraction (W - 1) / D of its duration.

At least a tenth of the duration is always allowed. A single waiting request thus gets its adapter soon, and the delay
is not noticeable. A step without decoding sequences has no limit.

A GPU copies adapters while it computes, so loads delay a step only if they take longer. There, at least half of the
duration is allowed.

The budget is smaller for adapters that only background requests wait for. Their loads may lengthen the steps of
interactive requests only as much as background computation may.
"""

from slora.core.cost_model import Costs
from slora.scheduler.budgets.background_budget import MAX_GROWTH

_MIN_SHARE, _MIN_SHARE_BESIDE = 0.1, 0.5


class LoadBudget:
    """The load budget of the step that is being planned.

    num_pages: adapter pages that the step may still load.
    num_background_pages: how many of these may be for background requests.
    pool_pages: number of pages in the pool, the limit of a step without decoding sequences.
    fixed: the limit of a step with decoding sequences. None derives it from `costs` and the numbers of sequences.
    beside: whether the device copies adapters while it computes.
    """

    def __init__(
        self, costs: Costs, full_page_bytes: int, pool_pages: int, fixed: int | None, *, beside: bool = False
    ) -> None:
        self.num_pages = self.num_background_pages = 0
        self._costs = costs
        self._full_page_bytes = full_page_bytes
        self._pool_pages = pool_pages
        self._fixed = fixed
        self._min_share = _MIN_SHARE_BESIDE if beside else _MIN_SHARE
        self._is_limited = False
        self._is_shared = False

    def begin_step(self, num_decoding: int, num_waiting: int, *, is_shared: bool = False) -> None:
        """Sets the budget of the next step.

        num_decoding: running sequences that compute. num_waiting: running sequences that wait for a load.
        is_shared: whether interactive requests run. If so, both numbers count only interactive sequences.
        """
        self._is_limited = num_decoding > 0
        self.num_pages = self._limit(num_decoding, num_waiting) if self._is_limited else self._pool_pages
        self.num_background_pages = self.num_pages
        self._is_shared = is_shared
        if is_shared:
            self.num_background_pages = min(self.num_pages, self._share(num_decoding, MAX_GROWTH))

    def spend(self, num_pages: int) -> None:
        self.num_pages -= num_pages
        self.num_background_pages -= num_pages

    def add_sequence(self, *, is_background: bool) -> None:
        """Lowers the budget if needed. Called when a sequence is admitted to the step.

        The first sequence in a step without decoding sequences limits the budget. The first interactive sequence in a
        step without interactive sequences limits the part for background requests.
        """
        if not self._is_limited:
            self._is_limited = True
            self.num_pages = min(self.num_pages, self._limit(num_decoding=1, num_waiting=1))
            self.num_background_pages = min(self.num_background_pages, self.num_pages)
        if not (is_background or self._is_shared):
            self._is_shared = True
            self.num_background_pages = min(self.num_background_pages, self._share(1, MAX_GROWTH))

    def _limit(self, num_decoding: int, num_waiting: int) -> int:
        """Returns how many adapter pages one step may load; at least 1.

        Worked example: 20 sequences decode, a step takes 0.03 s and a page 0.001 s. With 1 waiting request the step
        may grow by 0.1 * 0.03 s, which is 3 pages. With 11 requests it may grow by 10 / 20 * 0.03 s: 15 pages.
        """
        if self._fixed is not None:
            return self._fixed
        return self._share(num_decoding, max(self._min_share, (num_waiting - 1) / num_decoding))

    def _share(self, num_decoding: int, share: float) -> int:
        step_s = self._costs.step_s + num_decoding * self._costs.decode_s
        page_s = self._costs.load_s(self._full_page_bytes)
        return max(1, int(share * step_s / page_s)) if page_s else 1
