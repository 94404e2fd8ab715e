"""Which of the loads that are asked for begins next.

Tenants take turns. While others wait a tenant runs no more loads at once than its share; alone it may run some more,
but for one place, which whoever comes next finds free. Within a tenant it is first come, first served.

Plain bookkeeping; takes no lock.
"""

from collections import Counter, OrderedDict, deque

from slora_adapters.version import AdapterVersion


class LoadQueue:
    """num_places: loads that may run at once. share: of them for each tenant. alone: for one while no other waits."""

    def __init__(self, num_places: int, share: int, alone: int) -> None:
        self._num_free = num_places
        self._share = share
        self._alone = alone
        # Whose turn it is first.
        self._waiting: OrderedDict[str, deque[AdapterVersion]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def add(self, version: AdapterVersion) -> None:
        self._waiting.setdefault(version.tenant, deque()).append(version)

    def take(self) -> AdapterVersion | None:
        """The next one, which runs from now on; None if none may."""
        tenant = self._next_tenant()
        if tenant is None:
            return None
        version = self._waiting[tenant].popleft()
        self._waiting.move_to_end(tenant)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._running[tenant] += 1
        self._num_free -= 1
        return version

    def end(self, version: AdapterVersion) -> None:
        """It runs no longer."""
        assert self._running[version.tenant] > 0, f"{version} does not run"
        self._running[version.tenant] -= 1
        if not self._running[version.tenant]:
            del self._running[version.tenant]
        self._num_free += 1

    def _next_tenant(self) -> str | None:
        if not self._num_free:
            return None
        for tenant in self._waiting:
            if self._running[tenant] < self._share:
                return tenant
        least = min(self._waiting, key=lambda tenant: self._running[tenant], default=None)
        if least is None or self._num_free < 2 or self._running[least] >= self._alone:
            return None
        return least
