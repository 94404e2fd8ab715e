"""Brings adapters to where requests run on them: from the host into the pool, a slice in each step beside the decoding.

A load takes pages and a slot at once and its bytes over as many steps as they need; a request that has started on an
adapter computes nothing before the last slice. Requests whose adapter is not even on the host wait aside (HostCopies).

    not here --fetch--> on the host --begin--> loading (held by the load) --last slice--> resident

Knows who waits and how large adapters are, but no batch and no KV.
"""

from collections.abc import Iterator

from slora.pool.residency import Residency, Resident
from slora.pool.tenant import Tenant
from slora.scheduler.host_copies import HostCopies
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import AdapterLoad, StepPlan
from slora_adapters.loader.source import AdapterSource, Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion


class AdapterSupply:
    """Invariant: while a resident is in `_loading`, the load is one of its users and its copy on the host is pinned."""

    def __init__(self, residency: Residency, source: AdapterSource, full_page_bytes: int) -> None:
        self.num_loads = 0
        self._residency = residency
        self._host = HostCopies(source)
        self._page_bytes = full_page_bytes
        self._loading: dict[Resident, _Load] = {}

    @property
    def num_awaiting(self) -> int:
        return self._host.num_awaiting

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    def find(self, version: AdapterVersion) -> Resident | None:
        return self._residency.find(version)

    def num_pages(self, version: AdapterVersion) -> int | None:
        """Pages that an adapter takes which is in the pool or on the host; None if it is in neither."""
        resident = self._residency.find(version)
        if resident is not None:
            return len(resident.pages)
        packed = self._host.find(version)
        return self.pages_of(packed) if packed is not None else None

    def pages_of(self, packed: PackedAdapter) -> int:
        return -(-packed.layout.num_bytes // self._page_bytes)

    # -- requests ---------------------------------------------------------------------------------------------------

    def wait(self, sequence: Sequence, version: AdapterVersion) -> None:
        self._host.wait(sequence, version)

    def leave(self, sequence: Sequence, version: AdapterVersion) -> bool:
        """It waits for its adapter no longer; False if it did not."""
        return self._host.leave(sequence, version)

    def retain(self, version: AdapterVersion) -> None:
        """One more request is ready to start on it: a copy on the host stays there until it has."""
        self._host.retain(version)

    def release(self, version: AdapterVersion) -> None:
        self._host.release(version)

    def prefetch(self, version: AdapterVersion) -> None:
        """To the host, behind all that requests wait for; not at all while that has no room beside it."""
        self._host.prefetch(version)

    def take_prefetched(self) -> list[Fetched | FetchFailed]:
        """What was fetched ahead and has been collected since the last call. The caller releases each copy."""
        return self._host.take_prefetched()

    def collect(self) -> Iterator[tuple[Fetched | FetchFailed, list[Sequence]]]:
        """What has arrived on the host or failed, with those who waited for it."""
        return self._host.collect()

    # -- loads ------------------------------------------------------------------------------------------------------

    def begin(self, version: AdapterVersion, tenant: Tenant) -> Resident:
        """Takes the copy on the host, and pages and a slot, for which the caller has made room."""
        packed = self._host.take(version)
        num_bytes = packed.layout.num_bytes
        resident = self._residency.admit(
            version,
            tenant,
            self.pages_of(packed),
            num_bytes,
            packed.layout.reach,
            self._host.pace.fetch_s(num_bytes),
        )
        self._loading[resident] = _Load(packed)
        self.num_loads += 1
        return resident

    def advance(self, plan: StepPlan, num_pages: int) -> int:
        """Plans slices of the loads under way, oldest first, at most `num_pages`. Returns how many are left over."""
        for resident, load in self._loading.items():
            count = min(num_pages, len(resident.pages) - load.num_planned)
            if count:
                plan.loads.append(AdapterLoad(resident, load.packed, load.num_planned, count))
                load.num_planned += count
                num_pages -= count
        return num_pages

    def is_ready(self, resident: Resident) -> bool:
        """Whether this step may compute with it: it is loaded, or its last slice comes before the computing."""
        return resident.is_loaded or self._loading[resident].num_planned == len(resident.pages)

    def settle(self, plan: StepPlan) -> None:
        """The step has run: where it was the last slice the load ends, and the copy on the host is free to go."""
        for load in plan.loads:
            self._residency.advance_load(load.resident, load.num_pages)
            if load.is_last:
                self._end(load.resident)

    def distrust(self, plan: StepPlan) -> set[Resident]:
        """The step broke: what it was to load leaves with its last user. Returns these."""
        residents = {load.resident for load in plan.loads}
        for resident in residents:
            self._residency.abandon_load(resident)
            self._end(resident)
        return residents

    def forget(self, version: AdapterVersion) -> None:
        """It was deleted, and nobody needs it any more."""
        self._residency.forget(version)
        self._host.forget(version)

    def check(self) -> None:
        self._host.check()
        for resident, load in self._loading.items():
            assert resident.is_loading and resident.num_users > 0, f"{resident.version}: the load is lost"
            assert load.num_planned == resident.num_loaded, f"{resident.version}: a slice is lost"

    def loading(self) -> Iterator[Resident]:
        """Those that a load uses."""
        return iter(self._loading)

    def _end(self, resident: Resident) -> None:
        del self._loading[resident]
        self._host.give_back(resident.version)


class _Load:
    """num_planned: pages of which the slices were planned, this step's included."""

    __slots__ = ("num_planned", "packed")

    def __init__(self, packed: PackedAdapter) -> None:
        self.packed = packed
        self.num_planned = 0
