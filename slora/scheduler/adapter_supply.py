"""The adapter supply: it loads adapters from the host into the pool, one slice per step beside the decoding sequences.

A load allocates all pages and the slot at once, and copies the bytes over as many steps as needed. A request that was
admitted during the load computes nothing before the last slice. Requests whose adapter is not on the host wait aside
(`HostCopies`).

    not on the host --fetch--> on the host --begin--> loading (held by the load) --last slice--> resident

This module depends on waiting sequences and adapter sizes, but not on the batch or on KV.
"""

from collections.abc import Iterator

from slora.pool.residency import Residency, Resident
from slora.pool.tenant_account import TenantAccount
from slora.scheduler.host_copies import HostCopies
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import AdapterLoad, StepPlan
from slora_adapters.loader.source import AdapterSource, Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion


class AdapterSupply:
    """Invariant: while a resident is in `_loading`, its load is one of its users and its copy in the host cache is
    held.
    """

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
        """Number of pages of an adapter that is in the pool or on the host; None if it is in neither."""
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
        """Ends a sequence's wait for its adapter. Returns False if the sequence was not waiting."""
        return self._host.leave(sequence, version)

    def retain(self, version: AdapterVersion) -> None:
        """Counts one more sequence that is ready to run on the adapter.

        A copy in the host cache stays there until `release`.
        """
        self._host.retain(version)

    def release(self, version: AdapterVersion) -> None:
        self._host.release(version)

    def prefetch(self, version: AdapterVersion) -> None:
        """Fetches an adapter to the host that no request waits for.

        Does nothing if the host cache has no room beside the adapters that requests need.
        """
        self._host.prefetch(version)

    def take_prefetched(self) -> list[Fetched | FetchFailed]:
        """The prefetches that ended since the last call. The caller releases each copy."""
        return self._host.take_prefetched()

    def collect(self) -> Iterator[tuple[Fetched | FetchFailed, list[Sequence]]]:
        """The fetches that succeeded or failed, each with the sequences that waited for it."""
        return self._host.collect()

    # -- loads ------------------------------------------------------------------------------------------------------

    def begin(self, version: AdapterVersion, tenant: TenantAccount) -> Resident:
        """Starts a load: takes the copy in the host cache and allocates pages and a slot.

        The caller has made room for both.
        """
        packed = self._host.take(version)
        num_bytes = packed.layout.num_bytes
        resident = self._residency.allocate(
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
        """Plans slices of the loads under way, oldest first, at most `num_pages` pages.

        Returns how many of these are left.
        """
        for resident, load in self._loading.items():
            count = min(num_pages, len(resident.pages) - load.num_planned)
            if count:
                plan.loads.append(AdapterLoad(resident, load.packed, load.num_planned, count))
                load.num_planned += count
                num_pages -= count
        return num_pages

    def is_ready(self, resident: Resident) -> bool:
        """Whether this step may compute with the adapter: it is loaded, or the plan already has its last slice, which
        is copied before the step computes.
        """
        return resident.is_loaded or self._loading[resident].num_planned == len(resident.pages)

    def settle(self, plan: StepPlan) -> None:
        """Called after a step has run.

        Each load whose last slice it copied ends, and the copy in the host cache is released.
        """
        for load in plan.loads:
            self._residency.advance_load(load.resident, load.num_pages)
            if load.is_last:
                self._end(load.resident)

    def distrust(self, plan: StepPlan) -> set[Resident]:
        """Called after a step has failed.

        Abandons every load that the step was to advance, and returns these residents. Each is evicted when its last
        user releases it.
        """
        residents = {load.resident for load in plan.loads}
        for resident in residents:
            self._residency.abandon_load(resident)
            self._end(resident)
        return residents

    def forget(self, version: AdapterVersion) -> None:
        """Drops a deleted adapter that no unfinished request names."""
        self._residency.remove(version)
        self._host.forget(version)

    def check(self) -> None:
        self._host.check()
        for resident, load in self._loading.items():
            assert resident.is_loading and resident.num_users > 0, f"{resident.version}: the load is lost"
            assert load.num_planned == resident.num_loaded, f"{resident.version}: a slice is lost"

    def loading(self) -> Iterator[Resident]:
        """The residents that are being loaded; each load is one user."""
        return iter(self._loading)

    def _end(self, resident: Resident) -> None:
        del self._loading[resident]
        self._host.give_back(resident.version)


class _Load:
    """One load under way. num_planned: pages whose slices were planned, including this step's."""

    __slots__ = ("num_planned", "packed")

    def __init__(self, packed: PackedAdapter) -> None:
        self.packed = packed
        self.num_planned = 0
