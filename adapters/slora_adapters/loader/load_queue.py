"""Chooses which requested adapter load runs next.

Tenants are served round robin, each up to its share of running loads. If every waiting tenant already runs its share,
the tenant with the fewest running loads may start more, up to a higher limit. One slot then stays free for the next
tenant. Loads of one tenant start in the order of their requests.

The queue does no locking.
"""

from collections import Counter, OrderedDict, deque

from slora_adapters.version import AdapterVersion


class LoadQueue:
    """The requested loads that have not started, and the number of running loads of each tenant.

    max_running: maximum number of running loads of all tenants.
    share: loads that each tenant may run at once, even while other tenants wait.
    max_alone: loads that a tenant may run at once while every waiting tenant already runs its share.
    """

    def __init__(self, max_running: int, share: int, max_alone: int) -> None:
        self._num_free = max_running
        self._share = share
        self._max_alone = max_alone
        # In round-robin order: the first tenant is next.
        self._waiting: OrderedDict[str, deque[AdapterVersion]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def add(self, version: AdapterVersion) -> None:
        self._waiting.setdefault(version.tenant, deque()).append(version)

    def pop(self) -> AdapterVersion | None:
        """Removes and returns the next load, and counts it as running. Returns None if no load may start."""
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

    def finish(self, version: AdapterVersion) -> None:
        """Marks a running load as ended."""
        assert self._running[version.tenant] > 0, f"no load of {version} is running"
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
        if least is None or self._num_free < 2 or self._running[least] >= self._max_alone:
            return None
        return least
