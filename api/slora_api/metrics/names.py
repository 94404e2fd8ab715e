"""The names of tenants and adapters, for metrics and consoles."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from slora_adapters.errors import StoreUnavailable
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.core.threads import HOUSEKEEPING, tenant_thread
from slora_api.tenants.tenant_store import TenantStore

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Name = TypeVar("_Name")

# How long names are kept. Gateways scrape twenty times a second, and aliases may move at any time.
_TENANTS_S, _ADAPTERS_S, _REFERENCES_S = 1.0, 30.0, 1.0


class CachedNames(Generic[_Key, _Name]):
    """Keeps names for `kept_s`. While the database does not answer, they are the names that were read last.

    find: reads the database. Its result lacks unknown keys.
    """

    def __init__(
        self,
        find: Callable[[Collection[_Key]], Mapping[_Key, _Name]],
        kept_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._kept_s = kept_s
        self._clock = clock
        self._read_at = float("-inf")
        self._is_old = True
        self._asked: frozenset[_Key] = frozenset()
        self._names: Mapping[_Key, _Name] = {}
        self._reading = asyncio.Lock()

    async def find(self, keys: Collection[_Key]) -> Mapping[_Key, _Name]:
        """Returns the names of these keys, and possibly those of others."""
        async with self._reading:
            if self._clock() > self._read_at + self._kept_s:
                self._read_at = self._clock()
                self._is_old, self._asked = True, frozenset()
            new = frozenset(keys) - self._asked
            if new:
                try:
                    found = await tenant_thread(HOUSEKEEPING, self._find, new)
                except StoreUnavailable as error:
                    logger.warning("names cannot be looked up for metrics and consoles: %s", error)
                else:
                    self._names = found if self._is_old else {**self._names, **found}
                    self._is_old = False
                self._asked |= new
            return self._names


@dataclass(frozen=True, slots=True)
class ServerNames:
    """references: everything that a request may write as its model, see `Registry.find_references`."""

    tenants: CachedNames[str, str]
    adapters: CachedNames[AdapterVersion, str]
    references: CachedNames[AdapterVersion, Collection[str]]

    @staticmethod
    def of(registry: Registry, tenant_store: TenantStore) -> "ServerNames":
        return ServerNames(
            CachedNames(tenant_store.find_names, _TENANTS_S),
            CachedNames(registry.find_names, _ADAPTERS_S),
            CachedNames(registry.find_references, _REFERENCES_S),
        )
