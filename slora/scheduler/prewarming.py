"""Prewarming: loads adapters before their first request, to the host and, if there is room, into the pool.

    wanted --fetch--> on the host --free pages and a slot--> loading --> in the pool, idle
                           | none
                           v
                      released: it stays in the host cache until evicted there

Prewarming evicts nothing from the pool and tries once; an adapter that must stay needs a pin. Tenants may therefore
prewarm their own adapters as often as they like: it uses only free pages.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable

from slora.adapter_place import AdapterPlace
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.reclaim import Reclaim
from slora.scheduler.running_batch import RunningBatch
from slora.scheduler.unified_memory import UnifiedMemory
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

# The most adapters that are remembered as fetched to the host; the oldest are dropped.
_MAX_REMEMBERED = 4096


class Prewarming:
    """Handles prewarm requests in each step, after all running and waiting requests."""

    def __init__(
        self, memory: UnifiedMemory, supply: AdapterSupply, reclaim: Reclaim, batch: RunningBatch
    ) -> None:
        self._memory = memory
        self._supply = supply
        self._reclaim = reclaim
        self._batch = batch
        # In order of the prewarm calls.
        self._wanted: dict[AdapterVersion, None] = {}
        self._came_to_host: OrderedDict[AdapterVersion, None] = OrderedDict()

    def want(self, version: AdapterVersion) -> AdapterPlace:
        """Returns where the adapter is now. If it is not in the pool, the next `fetch` requests it."""
        resident = self._supply.find(version)
        if resident is not None:
            return AdapterPlace.POOL if resident.is_loaded else AdapterPlace.LOADING
        self._wanted[version] = None
        return AdapterPlace.HOST if version in self._came_to_host else AdapterPlace.FETCHING

    def forget(self, version: AdapterVersion) -> None:
        """Drops a deleted adapter."""
        self._wanted.pop(version, None)
        self._came_to_host.pop(version, None)

    def fetch(self) -> None:
        """Requests the wanted adapters, as far as the host cache has room beside the adapters that requests
        wait for.
        """
        for version in list(self._wanted):
            if self._supply.num_pages(version) is None:
                self._supply.prefetch(version)
            else:  # a waiting request already loads it
                del self._wanted[version]
                self._remember(version)

    def load(self, fetched: Iterable[Fetched | FetchFailed]) -> None:
        """Starts loading fetched adapters that fit into free pages.

        fetched: ended prefetches since the last step; the caller releases their copies.
        """
        for fetch in fetched:
            if fetch.version not in self._wanted:
                continue
            del self._wanted[fetch.version]
            if isinstance(fetch, FetchFailed):
                self._came_to_host.pop(fetch.version, None)
                _log.info(
                    "adapter %s of tenant %s was to be brought here ahead and can't be fetched (%s): %s",
                    fetch.version.digest, fetch.version.tenant, fetch.code, fetch.message,
                )  # fmt: skip
                continue
            self._remember(fetch.version)
            tenant = self._memory.tenants.find(fetch.version.tenant)
            num_pages = self._supply.pages_of(fetch.packed)
            if tenant.pages_over_ceiling(num_pages) or not self._is_free(num_pages):
                continue
            # Skip adapters that a request has loaded in the meantime.
            if self._supply.find(fetch.version) is None and self._supply.num_pages(fetch.version) is not None:
                self._supply.begin(fetch.version, tenant)

    def _is_free(self, num_pages: int) -> bool:
        num_free = self._memory.pool.num_free - self._batch.num_pages_wanted_soon
        return num_pages <= num_free and self._memory.residency.has_free_slot and not self._reclaim.is_short

    def _remember(self, version: AdapterVersion) -> None:
        self._came_to_host[version] = None
        self._came_to_host.move_to_end(version)
        if len(self._came_to_host) > _MAX_REMEMBERED:
            self._came_to_host.popitem(last=False)
