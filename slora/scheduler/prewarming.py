"""Prewarming: loads adapters before their first request, to the host and, if there is room, into the pool.

    requested --fetch--> on the host --free pages and a slot--> loading --> in the pool, idle
                              | none
                              v
                         released: it stays in the host cache until evicted there

Prewarming evicts nothing from the pool, and tries only once. An adapter that must stay in the pool needs a pin. Tenants
may prewarm their own adapters as often as they like, because prewarming uses only free pages.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Set

from slora.core.adapter_place import AdapterPlace
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.adapter_loading import AdapterLoading
from slora.scheduler.preemption import Preemption
from slora.scheduler.running_batch import RunningBatch
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

# Maximum number of adapters that are recorded as fetched to the host. The oldest records are dropped.
_MAX_RECORDED = 4096


class Prewarming:
    """Handles prewarm requests in each step, after all running and waiting requests."""

    def __init__(
        self, paging: UnifiedPaging, adapters: AdapterLoading, preemption: Preemption, batch: RunningBatch
    ) -> None:
        self._paging = paging
        self._adapters = adapters
        self._preemption = preemption
        self._batch = batch
        # The adapters to prewarm whose fetch has not ended yet, in the order of the prewarm calls.
        self._requested: dict[AdapterVersion, None] = {}
        self._fetched: OrderedDict[AdapterVersion, None] = OrderedDict()

    def request(self, version: AdapterVersion) -> AdapterPlace:
        """Returns where the adapter is now. If it is not in the pool, the next `prefetch_requested` requests it."""
        resident = self._adapters.find(version)
        if resident is not None:
            return AdapterPlace.POOL if resident.is_loaded else AdapterPlace.LOADING
        self._requested[version] = None
        return AdapterPlace.HOST if version in self._fetched else AdapterPlace.FETCHING

    @property
    def requested(self) -> Set[AdapterVersion]:
        """The adapters to prewarm whose fetch has not ended yet."""
        return self._requested.keys()

    def remove(self, version: AdapterVersion) -> None:
        """Ends the prewarming of a deleted adapter."""
        self._requested.pop(version, None)
        self._fetched.pop(version, None)

    def prefetch_requested(self) -> None:
        """Fetches the adapters to prewarm, if the host cache has room beside the adapters that requests wait for."""
        for version in list(self._requested):
            if self._adapters.num_pages(version) is None:
                self._adapters.prefetch(version)
            else:  # The adapter is already on the host or in the pool.
                del self._requested[version]
                self._record_fetched(version)

    def load_fetched(self, fetched: Iterable[Fetched | FetchFailed]) -> None:
        """Starts loading fetched adapters that fit into free pages.

        fetched: the prefetches that ended since the last step.
        """
        for fetch in fetched:
            if fetch.version not in self._requested:
                continue
            del self._requested[fetch.version]
            if isinstance(fetch, FetchFailed):
                self._fetched.pop(fetch.version, None)
                _log.info(
                    "adapter %s of tenant %s cannot be prewarmed, because it cannot be fetched (%s): "
                        "%s",
                    fetch.version.digest, fetch.version.tenant, fetch.code, fetch.message,
                )  # fmt: skip
                continue
            self._record_fetched(fetch.version)
            tenant = self._paging.tenants.find(fetch.version.tenant)
            num_pages = self._adapters.count_pages(fetch.packed)
            if tenant.pages_over_ceiling(num_pages) or not self._fits_in_free_pages(num_pages):
                continue
            # Skip adapters that a request has loaded in the meantime.
            if (
                self._adapters.find(fetch.version) is None
                and self._adapters.num_pages(fetch.version) is not None
            ):
                self._adapters.start_load(fetch.version, tenant, "prewarm")

    def _fits_in_free_pages(self, num_pages: int) -> bool:
        num_free = self._paging.pool.num_free - self._batch.num_pages_needed_soon
        return (
            num_pages <= num_free
            and self._paging.residency.has_free_slot
            and not self._preemption.has_starving
        )

    def _record_fetched(self, version: AdapterVersion) -> None:
        self._fetched[version] = None
        self._fetched.move_to_end(version)
        if len(self._fetched) > _MAX_RECORDED:
            self._fetched.popitem(last=False)
