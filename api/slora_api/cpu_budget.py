"""CPU seconds that each tenant may spend on work outside the engine: a token bucket for each tenant.

A tenant's balance starts full, is charged for the CPU time used, and is refilled at a constant rate. While it is spent,
the tenant's further work is refused. Other tenants are never affected.

Knows no HTTP. Runs on one event loop and needs no lock.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from slora_api.errors import TenantBusy

__all__ = ["CpuBudget"]


@dataclass(slots=True)
class _Balance:
    """cpu_s: CPU seconds left at time `at_s`; negative after work that took more than was left."""

    cpu_s: float
    at_s: float


class CpuBudget:
    """burst_s: CPU seconds of a full balance. refill: CPU seconds added for each second.

    work: what the budget is for, as the refusal calls it, for example "rendering chat templates".
    clock: seconds that only grow.
    """

    def __init__(
        self, burst_s: float, refill: float, work: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst_s = burst_s
        self._refill = refill
        self._work = work
        self._clock = clock
        # Only tenants whose balance is not full.
        self._balances: dict[str, _Balance] = {}

    def check(self, tenant: str) -> None:
        """Raises TenantBusy while the tenant's balance is spent, with the time at which it is positive again."""
        left_s = self._left(tenant)
        if left_s <= 0:
            wait_s = math.floor(-left_s / self._refill) + 1
            raise TenantBusy(
                f"You have used more CPU time for {self._work} than the {self._burst_s:g} s, refilled by "
                f"{self._refill:g} s each second, that a tenant may use; try again in {wait_s} s.",
                wait_s,
            )

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Takes `cpu_s` from the tenant's balance."""
        self._balances[tenant] = _Balance(self._left(tenant) - cpu_s, self._clock())
        self._drop_full()

    def _left(self, tenant: str) -> float:
        balance = self._balances.get(tenant)
        if balance is None:
            return self._burst_s
        return min(self._burst_s, balance.cpu_s + self._refill * (self._clock() - balance.at_s))

    def _drop_full(self) -> None:
        """Forgets the tenants that were charged least recently, as far as their balances are full again."""
        while self._balances:
            oldest = next(iter(self._balances))
            if self._left(oldest) < self._burst_s:
                # Its turn comes again after all others.
                self._balances[oldest] = self._balances.pop(oldest)
                return
            del self._balances[oldest]
