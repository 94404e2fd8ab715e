"""Limits the CPU time that each tenant may use outside the engine, with one token bucket per tenant.

A balance starts full, is charged for the CPU time used, and is refilled at a constant rate. While the balance is empty,
the tenant's further work is refused. Other tenants are not affected.

Each API process has a part of the budget, because a tenant's connections are spread over all processes.

This module does not depend on HTTP. It runs on one event loop and needs no lock.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from slora_api.core.errors import TenantBusy


@dataclass(slots=True)
class _Balance:
    """The balance of one tenant.

    cpu_s: CPU seconds left at time `at_s`; negative after work that used more than was left.
    """

    cpu_s: float
    at_s: float


class CpuBudget:
    """The token buckets of all tenants for one kind of work.

    burst_s: CPU seconds of a full balance.
    refill: CPU seconds added per second.
    work: what the error message calls the work, for example "rendering chat templates".
    clock: monotonic seconds.
    """

    def __init__(
        self, burst_s: float, refill: float, work: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst_s = burst_s
        self._refill = refill
        self._work = work
        self._clock = clock
        # Contains only tenants whose balance is not full.
        self._balances: dict[str, _Balance] = {}

    def check(self, tenant: str) -> None:
        """Raises TenantBusy while the tenant's balance is empty. The error states the seconds until the balance is
        positive.
        """
        if self._left(tenant) <= 0:
            wait_s = math.floor(self.wait_s(tenant)) + 1
            raise TenantBusy(
                f"Your tenant's budget of CPU time for {self._work} is used up ({self._burst_s:g} s, "
                f"refilled by {self._refill:g} s each second); try again in {wait_s} s.",
                wait_s,
            )

    def wait_s(self, tenant: str) -> float:
        """Returns the seconds until the tenant's balance is positive; 0 if it is positive now."""
        return max(0.0, -self._left(tenant) / self._refill)

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Subtracts `cpu_s` from the tenant's balance."""
        self._balances[tenant] = _Balance(self._left(tenant) - cpu_s, self._clock())
        self._drop_full()

    def _left(self, tenant: str) -> float:
        balance = self._balances.get(tenant)
        if balance is None:
            return self._burst_s
        return min(self._burst_s, balance.cpu_s + self._refill * (self._clock() - balance.at_s))

    def _drop_full(self) -> None:
        """Removes tenants whose balances are full again, starting with the tenant that was charged least recently."""
        while self._balances:
            oldest = next(iter(self._balances))
            if self._left(oldest) < self._burst_s:
                # Move the tenant to the end, so that the next call examines another tenant.
                self._balances[oldest] = self._balances.pop(oldest)
                return
            del self._balances[oldest]
