"""Pinned adapters: they are loaded into the pool before their first request, and stay there.

    wanted --fetch--> on the host, for a step --room beside what runs--> loading --> in the pool, pinned
       ^                       | no room                                                | as a last resort
       +-----------------------+--------------------------------------------------------+

A pin never blocks a request for good. It takes only free or idle pages, and never an adapter that the next requests
need. An idle pinned adapter is evicted when nothing else can be, and is loaded again later.

If the pool has no room, the copy in the host cache is released: it would take the room of adapters that requests wait
for. Fetching it again is cheap.

Loading a pinned adapter is not charged to any tenant. All pins together hold at most half of the pool; pins earlier in
the list take precedence.
"""

import logging
from collections.abc import Iterable

from slora.pool.residency import Resident
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.reclaim import Reclaim
from slora.scheduler.running_batch import RunningBatch
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.unified_memory import UnifiedMemory
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class _Wish:
    """The loading state of one pinned adapter.

    num_pages: its size in pages; None until it has been fetched once.
    num_failures: failed fetches and loads since it was last loaded.
    paused_until_s: time of the next try after a failure; None: not paused.
    """

    __slots__ = ("num_failures", "num_pages", "paused_until_s")

    def __init__(self) -> None:
        self.num_pages: int | None = None
        self.num_failures = 0
        self.paused_until_s: float | None = None

    def pause(self, now: float) -> None:
        """Pauses after a failure. Each further failure doubles the pause, up to `_LONGEST_PAUSE_S`."""
        self.paused_until_s = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**self.num_failures)
        self.num_failures += 1

    def is_paused(self, now: float) -> bool:
        if self.paused_until_s is not None and now >= self.paused_until_s:
            self.paused_until_s = None
        return self.paused_until_s is not None


class Pins:
    """Loads and keeps pinned adapters.

    In each step, running and waiting requests go first. Times are on the scheduler's clock.
    """

    def __init__(
        self, memory: UnifiedMemory, supply: AdapterSupply, reclaim: Reclaim, batch: RunningBatch
    ) -> None:
        self.num_failures = 0
        self._memory = memory
        self._residency, self._evictor = memory.residency, memory.evictor
        self._supply = supply
        self._reclaim = reclaim
        self._batch = batch
        self._most_pages = memory.pool.num_pages // 2
        self._wanted: dict[AdapterVersion, _Wish] = {}
        self._now = 0.0

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    @property
    def num_loaded(self) -> int:
        """Number of pinned adapters that are loaded."""
        found = (self._residency.find(version) for version in self._wanted)
        return sum(resident is not None and resident.is_loaded for resident in found)

    @property
    def is_complete(self) -> bool:
        """Whether every pinned adapter is in the pool or being loaded."""
        return not any(map(self._is_missing, self._wanted))

    @property
    def next_try_s(self) -> float | None:
        """When the next pause ends. The scheduler must make a step then, even without new requests. None: no pause."""
        paused = ((version, wish.paused_until_s) for version, wish in self._wanted.items())
        ends = [until_s for version, until_s in paused if until_s is not None and self._is_missing(version)]
        return min(ends, default=None)

    def want(self, versions: Iterable[AdapterVersion]) -> None:
        """Replaces the set of pinned adapters. An adapter that was pinned before keeps its pages and its pause."""
        self._wanted = {version: self._wanted.get(version) or _Wish() for version in versions}
        for resident in self._residency:
            if resident.is_pinned and resident.version not in self._wanted:
                self._residency.unpin(resident)

    def forget(self, version: AdapterVersion) -> None:
        """Ends the pin of a deleted adapter."""
        self.want([one for one in self._wanted if one != version])

    def bring(
        self, plan: StepPlan, num_pages: int, now: float, fetched: Iterable[Fetched | FetchFailed]
    ) -> None:
        """Loads missing adapters that are on the host, and fetches the others.

        num_pages: adapter pages that this step may still load.
        fetched: all prefetches that ended since the last step, for pins or for prewarming. Their host copies are
            released here.
        """
        self._now = now
        at_hand = self._take_in(fetched)
        num_pages = 0 if self._wanted and self._reclaim.is_short else num_pages
        missing = (
            self._bring_from_host(plan, num_pages) if self._residency.num_pinned < len(self._wanted) else []
        )
        # Release before the next prefetch: a small host cache may have room for only one adapter.
        for version in at_hand:
            self._supply.release(version)
        for version in missing:
            self._supply.prefetch(version)

    def settle(self, plan: StepPlan) -> None:
        """Called after a step has run. Clears the failure count of each pinned adapter that it finished loading."""
        for load in plan.loads:
            wish = self._wanted.get(load.resident.version)
            if wish is not None and load.is_last:
                wish.num_failures = 0

    def fail(self, residents: Iterable[Resident]) -> None:
        """Called when the step that was to load them failed. The adapters are loaded again after a pause."""
        for resident in residents:
            wish = self._wanted.get(resident.version)
            if wish is not None:
                self.num_failures += 1
                wish.pause(self._now)

    def check(self) -> None:
        """Proves that every pinned resident is wanted and that the pins stay within their bound."""
        pinned = [resident for resident in self._residency if resident.is_pinned]
        assert {resident.version for resident in pinned} <= self._wanted.keys(), "pinned, and nobody wants it"
        num_pages = sum(len(resident.pages) for resident in pinned)
        assert (len(pinned), num_pages) == (self._residency.num_pinned, self._residency.num_pinned_pages)
        assert num_pages <= self._most_pages, f"{num_pages} pages pinned, at most {self._most_pages}"

    def _take_in(self, fetched: Iterable[Fetched | FetchFailed]) -> list[AdapterVersion]:
        """Records the results of prefetches. Returns the versions whose host copies must be released."""
        at_hand = []
        for fetch in fetched:
            wish = self._wanted.get(fetch.version)
            if isinstance(fetch, FetchFailed):
                if wish is not None:
                    self._note_failure(wish, fetch)
                continue
            at_hand.append(fetch.version)
            if wish is not None:
                wish.num_pages = self._supply.pages_of(fetch.packed)
        return at_hand

    def _note_failure(self, wish: _Wish, fetch: FetchFailed) -> None:
        self.num_failures += 1
        if not wish.num_failures:
            _log.warning(
                "adapter %s of tenant %s is pinned and can't be fetched (%s): %s; it is tried again, and this is not "
                "told again before it is in the pool",
                fetch.version.digest, fetch.version.tenant, fetch.code, fetch.message,
            )  # fmt: skip
        wish.pause(self._now)

    def _is_missing(self, version: AdapterVersion) -> bool:
        return self._residency.find(version) is None

    def _bring_from_host(self, plan: StepPlan, num_pages: int) -> list[AdapterVersion]:
        """Starts loading adapters that are on the host and fit.

        Returns the adapters that fit but are not on the host.
        """
        missing = []
        spare, num_wanted_soon = self._spare(), self._batch.num_pages_wanted_soon
        for version, wish in self._wanted.items():
            resident = self._residency.find(version)
            if resident is not None:
                self._pin(resident)
            elif wish.is_paused(self._now) or num_pages <= 0:
                continue
            elif self._has_room(version, spare, num_wanted_soon):
                if self._supply.num_pages(version) is None:
                    missing.append(version)
                else:
                    spare.add(self._load(version, spare))
                    num_pages = self._supply.advance(plan, num_pages)
        return missing

    def _pin(self, resident: Resident) -> None:
        """Pins a resident if the bound allows it, whichever request or pin triggered its load."""
        num_pages = self._residency.num_pinned_pages + len(resident.pages)
        if not resident.is_pinned and num_pages <= self._most_pages:
            self._residency.pin(resident)

    def _spare(self) -> set[Resident]:
        """Residents that must not be evicted for a pin: idle adapters of the next requests, and other pins."""
        found = (self._residency.find(version) for version in self._wanted)
        pinned = [resident for resident in found if resident is not None and resident.is_pinned]
        return {*self._reclaim.next_adapters(), *pinned}

    def _has_room(self, version: AdapterVersion, spare: set[Resident], num_wanted_soon: int) -> bool:
        """Whether the adapter could be loaded now. True while its size is unknown: the fetch reveals it."""
        num_pages = self._supply.num_pages(version) or self._wanted[version].num_pages
        if num_pages is None:
            return True
        tenant = self._memory.tenants.find(version.tenant)
        return (
            self._residency.num_pinned_pages + num_pages <= self._most_pages
            and self._memory.could_free(num_pages + num_wanted_soon, tenant)
            and self._residency.can_free_slot(spare)
            and self._evictor.can_make_room(num_pages, tenant, spare)
        )

    def _load(self, version: AdapterVersion, spare: set[Resident]) -> Resident:
        tenant, num_pages = self._memory.tenants.find(version.tenant), self._supply.num_pages(version)
        assert num_pages is not None, f"{version} is not on the host"
        has_pages = self._evictor.make_room(num_pages, tenant, spare)
        has_slot = self._residency.ensure_free_slot(tenant, spare)
        assert has_pages and has_slot, f"there was room for {version}"
        resident = self._supply.begin(version, tenant)
        self._residency.pin(resident)
        return resident
