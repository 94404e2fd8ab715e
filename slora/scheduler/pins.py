"""Pinned adapters: they are loaded into the pool before their first request, and stay there.

    missing --fetch--> on the host for one step --the pool has room--> loading --> in the pool, pinned
       ^                       | no room                                              | evicted as a last resort
       +-----------------------+------------------------------------------------------+

A pin never blocks a request for good. It takes only free or idle pages, and never an adapter that the next requests
need. An idle pinned adapter is evicted when nothing else can be evicted, and is loaded again later.

If the pool has no room, the copy in the host cache is released, because it would take the room of adapters that
requests wait for. Fetching the adapter again is cheap.

Loading a pinned adapter is not charged to any tenant. All pins together hold at most half of the pool; pins earlier in
the list take precedence.

`Prewarming` loads an adapter once, without a pin.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Set

from slora.core.engine_state import AdapterPlace
from slora.memory.residency import Resident
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.adapter_loading import AdapterLoading
from slora.scheduler.preemption import Preemption
from slora.scheduler.running_batch import RunningBatch
from slora.scheduler.step_plan import StepPlan
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

# Maximum number of adapters that are recorded as fetched to the host. The oldest records are dropped.
_MAX_RECORDED = 4096


class Prewarming:
    """Loads adapters before their first request, to the host and, if there is room, into the pool.

        requested --fetch--> on the host --free pages and a slot--> loading --> in the pool, idle
                                  | none
                                  v
                             released: it stays in the host cache until evicted there

    Prewarming evicts nothing from the pool, and tries only once. An adapter that must stay in the pool needs a pin.
    Tenants may prewarm their own adapters as often as they like, because prewarming uses only free pages.

    Each step handles prewarm requests after all running and waiting requests.
    """

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


_MIN_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0


class _PinState:
    """The loading state of one pinned adapter.

    num_pages: its size in pages; None until it has been fetched once.
    num_failures: failed fetches and loads since it was last loaded.
    retry_at_s: time of the next try after a failure; None: not backing off.
    """

    __slots__ = ("num_failures", "num_pages", "retry_at_s")

    def __init__(self) -> None:
        self.num_pages: int | None = None
        self.num_failures = 0
        self.retry_at_s: float | None = None

    def back_off(self, now: float) -> None:
        """Delays the next try after a failure. Each further failure doubles the delay, up to `_MAX_BACKOFF_S`."""
        self.retry_at_s = now + min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0**self.num_failures)
        self.num_failures += 1

    def is_backing_off(self, now: float) -> bool:
        if self.retry_at_s is not None and now >= self.retry_at_s:
            self.retry_at_s = None
        return self.retry_at_s is not None


class Pins:
    """Loads and keeps pinned adapters.

    In each step, running and waiting requests go first. Times are on the scheduler's clock.
    """

    def __init__(
        self, paging: UnifiedPaging, adapters: AdapterLoading, preemption: Preemption, batch: RunningBatch
    ) -> None:
        self.num_failures = 0
        self._paging = paging
        self._residency, self._evictor = paging.residency, paging.evictor
        self._adapters = adapters
        self._preemption = preemption
        self._batch = batch
        self._max_pages = paging.pool.num_pages // 2
        self._pins: dict[AdapterVersion, _PinState] = {}
        self._to_fetch: list[AdapterVersion] = []
        self._now = 0.0

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    @property
    def num_loaded(self) -> int:
        """Number of pinned adapters that are loaded."""
        found = (self._residency.find(version) for version in self._pins)
        return sum(resident is not None and resident.is_loaded for resident in found)

    @property
    def all_resident(self) -> bool:
        """Whether every pinned adapter is in the pool or being loaded."""
        return not any(map(self._is_missing, self._pins))

    @property
    def next_retry_s(self) -> float | None:
        """When a failed adapter is tried next. The scheduler must make a step then, even without new requests.

        None: no adapter failed."""
        retries = ((version, state.retry_at_s) for version, state in self._pins.items())
        times = [retry_s for version, retry_s in retries if retry_s is not None and self._is_missing(version)]
        return min(times, default=None)

    def replace(self, versions: Iterable[AdapterVersion]) -> None:
        """Replaces the set of pinned adapters. An adapter that was pinned before keeps its pages and its backoff."""
        self._pins = {version: self._pins.get(version) or _PinState() for version in versions}
        for resident in self._residency:
            if resident.is_pinned and resident.version not in self._pins:
                self._residency.unpin(resident)

    def remove(self, version: AdapterVersion) -> None:
        """Ends the pin of a deleted adapter."""
        self.replace([pinned for pinned in self._pins if pinned != version])

    def load_missing(self, plan: StepPlan, now: float, fetched: Iterable[Fetched | FetchFailed]) -> None:
        """Loads missing adapters that are on the host and have room in the pool, within the step's load budget.

        fetched: the prefetches that ended since the last step, for pins or for prewarming.
        """
        self._now = now
        self._record_fetches(fetched)
        self._to_fetch = []
        if self._residency.num_pinned < len(self._pins):
            self._load_from_host(plan)

    def prefetch_missing(self) -> None:
        """Fetches the adapters for which `load_missing` found room in the pool, but no copy on the host."""
        for version in self._to_fetch:
            self._adapters.prefetch(version)

    def finish_step(self, plan: StepPlan) -> None:
        """Clears the failure count of each pinned adapter that the step finished loading."""
        for load in plan.loads:
            state = self._pins.get(load.resident.version)
            if state is not None and load.is_last:
                state.num_failures = 0

    def record_failed_loads(self, residents: Iterable[Resident]) -> None:
        """Records that the loads of these adapters failed. Those that are pinned are loaded again after a delay."""
        for resident in residents:
            state = self._pins.get(resident.version)
            if state is not None:
                self.num_failures += 1
                state.back_off(self._now)

    def check_invariants(self) -> None:
        """Asserts that the pins are consistent.

        Each resident marked as pinned has an entry in `_pins`. The counters of pinned adapters and pages are right. At
        most `_max_pages` pages are pinned.
        """
        pinned = [resident for resident in self._residency if resident.is_pinned]
        assert {resident.version for resident in pinned} <= self._pins.keys(), (
            "an adapter is pinned without a pin"
        )
        num_pages = sum(len(resident.pages) for resident in pinned)
        assert (len(pinned), num_pages) == (self._residency.num_pinned, self._residency.num_pinned_pages)
        assert num_pages <= self._max_pages, f"{num_pages} pages pinned, at most {self._max_pages}"

    def _record_fetches(self, fetched: Iterable[Fetched | FetchFailed]) -> None:
        for fetch in fetched:
            state = self._pins.get(fetch.version)
            if state is None:
                continue
            if isinstance(fetch, FetchFailed):
                self._record_failure(state, fetch)
            else:
                state.num_pages = self._adapters.count_pages(fetch.packed)

    def _record_failure(self, state: _PinState, fetch: FetchFailed) -> None:
        self.num_failures += 1
        if not state.num_failures:
            _log.warning(
                "pinned adapter %s of tenant %s cannot be fetched (%s): %s. The engine tries again, "
                    "and does not log this again until the adapter is in the pool.",
                fetch.version.digest, fetch.version.tenant, fetch.code, fetch.message,
            )  # fmt: skip
        state.back_off(self._now)

    def _is_missing(self, version: AdapterVersion) -> bool:
        return self._residency.find(version) is None

    def _load_from_host(self, plan: StepPlan) -> None:
        """Starts loading the missing adapters that have room in the pool. Adds adapters that are not on the host to
        `_to_fetch` instead.
        """
        budget, may_load = self._adapters.budget, not self._preemption.has_starving
        protected, num_needed_soon = self._protected(), self._batch.num_pages_needed_soon
        for version, state in self._pins.items():
            resident = self._residency.find(version)
            if resident is not None:
                self._pin(resident)
            elif state.is_backing_off(self._now) or not may_load or budget.num_pages <= 0:
                continue
            elif self._fits(version, protected, num_needed_soon):
                if self._adapters.num_pages(version) is None:
                    self._to_fetch.append(version)
                else:
                    protected.add(self._load(version, protected))
                    self._adapters.plan_slices(plan)

    def _pin(self, resident: Resident) -> None:
        """Pins a resident if the bound allows it, whichever request or pin triggered its load."""
        num_pages = self._residency.num_pinned_pages + len(resident.pages)
        if not resident.is_pinned and num_pages <= self._max_pages:
            self._residency.pin(resident)

    def _protected(self) -> set[Resident]:
        """Residents that must not be evicted for a pin: idle adapters of the next requests, and other pins."""
        found = (self._residency.find(version) for version in self._pins)
        pinned = [resident for resident in found if resident is not None and resident.is_pinned]
        return {*self._preemption.next_adapters(), *pinned}

    def _fits(self, version: AdapterVersion, protected: set[Resident], num_needed_soon: int) -> bool:
        """Whether the adapter could be loaded now. True while its size is unknown, because only a fetch reveals it."""
        num_pages = self._adapters.num_pages(version) or self._pins[version].num_pages
        if num_pages is None:
            return True
        tenant = self._paging.tenants.find(version.tenant)
        return (
            self._residency.num_pinned_pages + num_pages <= self._max_pages
            and self._paging.could_free(num_pages + num_needed_soon, tenant)
            and self._residency.can_free_slots(1, protected)
            and self._evictor.can_make_room(num_pages, tenant, protected)
        )

    def _load(self, version: AdapterVersion, protected: set[Resident]) -> Resident:
        tenant, num_pages = self._paging.tenants.find(version.tenant), self._adapters.num_pages(version)
        assert num_pages is not None, f"{version} is not on the host"
        has_pages = self._evictor.make_room(num_pages, tenant, protected)
        has_slot = self._residency.ensure_free_slot(tenant, protected)
        assert has_pages and has_slot, f"there was room for {version}"
        resident = self._adapters.start_load(version, tenant, "pin")
        self._residency.pin(resident)
        return resident
