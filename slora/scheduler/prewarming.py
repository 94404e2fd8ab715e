"""Adapters that somebody wants near before their first request: on the host, and in the pool if there is room.

    wanted --fetch--> on the host --free pages and a slot--> loading --> in the pool, idle
                           | none
                           v
                      let go: the host keeps it until its room is wanted

Nothing leaves the pool for it, and it is one try: whoever wants an adapter to stay pins it. So tenants may ask for
their own as often as they like; it takes what nobody else has use for.
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

# Of which it is remembered that they came to the host, to tell whoever asks again; the oldest are forgotten.
_MAX_REMEMBERED = 4096


class Prewarming:
    """Serves one step after the other, behind all who run or wait."""

    def __init__(
        self, memory: UnifiedMemory, supply: AdapterSupply, reclaim: Reclaim, batch: RunningBatch
    ) -> None:
        self._memory = memory
        self._supply = supply
        self._reclaim = reclaim
        self._batch = batch
        # In order of asking.
        self._wanted: dict[AdapterVersion, None] = {}
        self._came_to_host: OrderedDict[AdapterVersion, None] = OrderedDict()

    def want(self, version: AdapterVersion) -> AdapterPlace:
        """Where it is now; `fetch` sets it going."""
        resident = self._supply.find(version)
        if resident is not None:
            return AdapterPlace.POOL if resident.is_loaded else AdapterPlace.LOADING
        self._wanted[version] = None
        return AdapterPlace.HOST if version in self._came_to_host else AdapterPlace.FETCHING

    def forget(self, version: AdapterVersion) -> None:
        """The adapter was deleted."""
        self._wanted.pop(version, None)
        self._came_to_host.pop(version, None)

    def fetch(self) -> None:
        """Asks for what is wanted, as far as the host has room for it beside what others wait for."""
        for version in list(self._wanted):
            if self._supply.num_pages(version) is None:
                self._supply.prefetch(version)
            else:  # somebody's request brings it to the pool
                del self._wanted[version]
                self._remember(version)

    def load(self, fetched: Iterable[Fetched | FetchFailed]) -> None:
        """Begins to load what has come and has room. fetched: since the last step; its copies are the caller's."""
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
            # Else somebody's request was quicker.
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
