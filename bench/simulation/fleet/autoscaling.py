"""When a simulated fleet starts and drains replicas."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.fleet.replica_model import ReplicaModel


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The fleet gets as many replicas as bring the pools to `target_use`, by the mean of the serving replicas.

    max_waiting: with more waiting requests per serving replica, the fleet grows by at least a quarter.
    start_s: seconds from the decision until a replica serves.
    interval_s: seconds between two decisions.
    hold_s: a replica is drained only if the wanted number was below the present one for this long.
    """

    num_initial: int
    num_least: int
    target_use: float = 0.5
    max_waiting: float = 0.5
    start_s: float = 120.0
    interval_s: float = 10.0
    hold_s: float = 300.0


class Autoscaler:
    """Follows a ScalingRule. Reads the replicas at each decision."""

    def __init__(self, rule: ScalingRule, num_most: int) -> None:
        self.rule = rule
        self._num_most = num_most
        self._next_s = 0.0
        self._wanted: deque[tuple[float, int]] = deque()

    def count_wanted(self, now: float, serving: Sequence[ReplicaModel], num_starting: int) -> int | None:
        """Returns how many replicas should serve; None between two decisions."""
        if now < self._next_s or not serving:
            return None
        rule, present = self.rule, len(serving)
        self._next_s = now + rule.interval_s
        use = sum(model.pool_use for model in serving) / present
        wanted = math.ceil(present * use / rule.target_use)
        if sum(model.num_waiting for model in serving) > rule.max_waiting * present:
            wanted = max(wanted, math.ceil(1.25 * present))
        wanted = min(max(wanted, rule.num_least), self._num_most)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - rule.hold_s:
            self._wanted.popleft()
        if wanted >= present + num_starting:
            return wanted
        return min(max(most for _, most in self._wanted), present + num_starting)
