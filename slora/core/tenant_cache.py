"""A cache that keeps the entries of each tenant apart.

A tenant can neither find the entries of other tenants nor evict them by storing many entries of its own.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TenantCache(Generic[K, V]):
    """An LRU cache with a part for each tenant.

    max_entries: limit of all tenants together. max_of_tenant: limit of each tenant. A tenant above its limit loses its
    least recently used entry. Above the limit of all tenants, the tenant with the most entries loses one.
    """

    def __init__(self, max_entries: int, max_of_tenant: int) -> None:
        self._max_entries = max_entries
        self._max_of_tenant = max_of_tenant
        self._num_entries = 0
        # Tenants and entries that were used least recently come first. No part is empty.
        self._parts: OrderedDict[str, OrderedDict[K, V]] = OrderedDict()

    def find(self, tenant: str, key: K) -> V | None:
        """Returns the value and marks it as used, or returns None."""
        part = self._parts.get(tenant)
        if part is None or key not in part:
            return None
        self._parts.move_to_end(tenant)
        part.move_to_end(key)
        return part[key]

    def insert(self, tenant: str, key: K, value: V) -> None:
        part = self._parts.setdefault(tenant, OrderedDict())
        self._parts.move_to_end(tenant)
        self._num_entries += key not in part
        part[key] = value
        part.move_to_end(key)
        if len(part) > self._max_of_tenant:
            self._drop_oldest(tenant)
        if self._num_entries > self._max_entries:
            self._drop_oldest(max(self._parts, key=lambda name: len(self._parts[name])))

    def _drop_oldest(self, tenant: str) -> None:
        part = self._parts[tenant]
        part.popitem(last=False)
        self._num_entries -= 1
        if not part:
            del self._parts[tenant]
