"""Loads adapters from the host into the pool, one slice per step while sequences decode.

A load allocates the slot and all pages at its start, and copies the bytes over as many steps as needed. A request that
was admitted during the load computes nothing before the last slice. Requests with an adapter that is not on the host
wait for it outside the queue (`AdapterFetching`).

    not on the host --fetch--> on the host --start_load--> loading (held by the load) --last slice--> resident

This module depends on waiting sequences and adapter sizes, but not on the batch or on KV.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Set

from slora.core.cost_model import CostModel
from slora.memory.residency import AdapterLoad, Resident
from slora.memory.tenant_account import TURN, TenantAccount
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.adapter_fetching import AdapterFetching
from slora.scheduler.budgets import LoadBudget
from slora.scheduler.charges import charge_load
from slora.scheduler.running_batch import RunningBatch
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora_adapters.loader.source import AdapterSource, Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraTargets


class AdapterLoading:
    """Loads adapters into the pool, and advances the loads in progress in each step.

    Invariant: while a resident is in `_loading`, its load is one of its users and its copy in the host cache is held.

    budget: the number of pages that the step being planned may still load.
    loads: number of started loads by cause: `request`, `pin` or `prewarm`.
    load_pages: maximum number of pages that a step with decoding sequences loads; None: `LoadBudget` derives it from
        `costs`.
    beside: see `SchedulerConfig.loads_beside`.
    """

    def __init__(
        self,
        paging: UnifiedPaging,
        source: AdapterSource,
        costs: CostModel,
        full_page_bytes: int,
        load_pages: int | None = None,
        *,
        beside: bool = False,
    ) -> None:
        self.loads = Counter(request=0, pin=0, prewarm=0)
        self.budget = LoadBudget(costs, full_page_bytes, paging.pool.num_pages, load_pages, beside=beside)
        self._beside = beside
        # Whether a sequence waits for the step after the copy of its adapter's last slice.
        self._uses_later = False
        self._costs = costs
        self._residency = paging.residency
        self._host = AdapterFetching(source)
        self._page_bytes = full_page_bytes
        self._loading: dict[Resident, _Load] = {}

    @property
    def num_loads(self) -> int:
        return self.loads.total()

    @property
    def fetches(self) -> Counter[str]:
        """Number of ended fetches by outcome, see `AdapterFetching`."""
        return self._host.outcomes

    @property
    def num_waiting(self) -> int:
        return self._host.num_waiting

    @property
    def waited_for(self) -> Set[AdapterVersion]:
        """The adapters that are to be fetched because sequences wait for them."""
        return self._host.waited_for

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def is_short_of_room(self) -> bool:
        """Whether an interactive sequence waits because the host cache has no room for its adapter."""
        return self._host.is_short_of_room

    @property
    def has_copies(self) -> bool:
        """Whether an adapter is on the host that could be loaded."""
        return self._host.has_copies

    def find(self, version: AdapterVersion) -> Resident | None:
        return self._residency.find(version)

    def num_pages(self, version: AdapterVersion) -> int | None:
        """Number of pages of an adapter that is in the pool or on the host; None if the adapter is in neither place."""
        resident = self._residency.find(version)
        if resident is not None:
            return len(resident.pages)
        packed = self._host.find(version)
        return self.count_pages(packed) if packed is not None else None

    def changes_kv(self, version: AdapterVersion) -> bool:
        """Whether an adapter that is in the pool or on the host changes K or V of any layer."""
        return self.find_targets(version).kv

    def find_targets(self, version: AdapterVersion) -> LoraTargets:
        """The parts of the model that an adapter changes, which is in the pool or on the host."""
        resident = self._residency.find(version)
        if resident is not None:
            return resident.targets
        packed = self._host.find(version)
        assert packed is not None, f"{version} is neither in the pool nor on the host"
        return packed.layout.targets

    def find_missing(self, sequence: Sequence) -> list[AdapterVersion]:
        """The sequence's adapters that are neither in the pool nor on the host."""
        return [version for version in sequence.request.versions if self.num_pages(version) is None]

    def count_pages(self, packed: PackedAdapter) -> int:
        return -(-packed.layout.num_bytes // self._page_bytes)

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_waiter(self, sequence: Sequence, missing: Iterable[AdapterVersion]) -> None:
        """Records that the sequence waits until its adapters in `missing` are fetched."""
        self._host.add_waiter(sequence, missing)

    def remove_waiter(self, sequence: Sequence) -> None:
        """Ends a sequence's wait for its adapters. A no-op if it is not waiting."""
        self._host.remove_waiter(sequence)

    def has_fetched_all(self, sequence: Sequence) -> bool:
        """Whether every adapter that the waiting sequence was missing has been fetched."""
        return self._host.has_fetched_all(sequence)

    def retain_copies(self, sequence: Sequence) -> None:
        """Keeps the copies of the sequence's adapters in the host cache until `release_copies`."""
        self._host.retain(sequence)

    def release_copies(self, sequence: Sequence) -> None:
        self._host.release(sequence)

    def prefetch(self, version: AdapterVersion) -> None:
        """Fetches an adapter to the host although no request waits for it.

        Does nothing if the adapters that requests need leave no room in the host cache.
        """
        self._host.prefetch(version)

    def pop_prefetched(self) -> list[Fetched | FetchFailed]:
        """Returns the prefetches that ended since the last call. The caller passes them to `release_prefetched`."""
        return self._host.pop_prefetched()

    def release_prefetched(self, prefetched: Iterable[Fetched | FetchFailed]) -> None:
        """Releases the prefetched copies. The copy of an adapter that is being loaded is kept."""
        for fetch in prefetched:
            if isinstance(fetch, Fetched):
                self._host.release_version(fetch.version)

    def collect_fetches(self) -> Iterator[tuple[Fetched | FetchFailed, list[Sequence]]]:
        """Yields the fetches that succeeded or failed, each with the sequences that waited for it."""
        return self._host.collect()

    # -- loads ------------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan, batch: RunningBatch) -> None:
        """Plans the next slices of the loads in progress, or all remaining slices if no sequence decodes.

        While interactive sequences run, background sequences count neither as decoding nor as waiting.
        """
        interactive = batch.interactive
        waiting = [
            sequence
            for sequence in (interactive or batch if self._loading else ())
            if any(not resident.is_loaded for resident in sequence.residents)
        ]
        num_running = len(interactive) or len(batch)
        num_decoding = num_running - len(waiting)
        self.budget.begin_step(num_decoding, len(waiting), is_shared=bool(interactive))
        # A step that uses an adapter cannot compute while it copies this adapter, which would delay all sequences.
        self._uses_later = self._beside and num_decoding > 0
        for load in self._loading.values():
            load.num_copied = load.num_planned
        for resident in [resident for sequence in waiting for resident in sequence.residents]:
            if resident in self._loading:
                self._loading[resident].is_background = False
        self.plan_slices(plan)

    def load_for(self, sequence: Sequence, version: AdapterVersion, plan: StepPlan) -> Resident:
        """Starts a load of one of the sequence's adapters, and evicts an idle adapter if no slot is free.

        The caller has made room for the pages. The load is charged to the sequence, unless the adapter was in the pool
        before and was evicted for another tenant that exceeded its share.
        """
        self._residency.ensure_free_slot(sequence.tenant)
        sequence.times.is_cold |= sequence.times.computed_at is None
        is_charged = not self._residency.was_displaced(version)
        resident = self.start_load(version, sequence.tenant, "request")
        self._loading[resident].is_background = sequence.is_background
        if is_charged:
            charge_load(sequence, resident.num_bytes, self._costs)
        self.plan_slices(plan)
        return resident

    def start_load(self, version: AdapterVersion, owner: TenantAccount, cause: str) -> Resident:
        """Starts a load: takes the copy from the host cache, and allocates a slot, and pages that belong to `owner`.

        The caller has made room for the slot and the pages. owner: an account of the adapter's tenant. cause: a key of
        `loads`.
        """
        packed = self._host.take_copy(version)
        num_bytes = packed.layout.num_bytes
        resident = self._residency.allocate(
            version,
            owner,
            self.count_pages(packed),
            num_bytes,
            packed.layout.targets,
        )
        self._loading[resident] = _Load(packed)
        self.loads[cause] += 1
        return resident

    def plan_slices(self, plan: StepPlan) -> None:
        """Plans slices of the loads in progress, as far as the budget allows. The loads of the tenant that has received
        the least service come first, and of these the oldest.
        """
        for resident, load in sorted(self._loading.items(), key=lambda item: TURN(item[0].tenant)):
            left = self.budget.num_background_pages if load.is_background else self.budget.num_pages
            count = min(max(0, left), len(resident.pages) - load.num_planned)
            if count:
                plan.loads.append(AdapterLoad(resident, load.packed, load.num_planned, count))
                load.num_planned += count
                self.budget.spend(count)

    def are_ready(self, residents: Iterable[Resident]) -> bool:
        """Whether this step may compute with the adapters. Each of them must be loaded, or its last slice must be
        planned. The step copies the slice before it computes.
        """
        for resident in residents:  # A loop, because a generator for each sequence of a step takes longer.
            if not resident.is_loaded and self._count_usable(resident) != len(resident.pages):
                return False
        return True

    def _count_usable(self, resident: Resident) -> int:
        """Number of pages of a load that this step may use."""
        load = self._loading[resident]
        return load.num_copied if self._uses_later else load.num_planned

    def finish_step(self, plan: StepPlan) -> None:
        """Records the slices that a step has copied. Called after the step has run.

        Ends each load whose last slice the step copied, and releases that adapter's copy in the host cache. A load that
        was abandoned while the step ran has no effect.
        """
        for load in plan.loads:
            if load.resident not in self._loading:
                continue
            self._residency.advance_load(load.resident, load.num_pages)
            if load.is_last:
                self._end(load.resident)

    def abandon_loads(self, plan: StepPlan) -> set[Resident]:
        """Abandons every load that a failed step was to advance, and returns the residents of these loads.

        Each resident is evicted when its last user releases it.
        """
        # Not a set: its order would differ between runs, and so would the slots of the next adapters.
        residents = dict.fromkeys(load.resident for load in plan.loads)
        for resident in residents:
            self._residency.abandon_load(resident)
            self._end(resident)
        return set(residents)

    def purge(self, tenant: str) -> None:
        """Abandons the tenant's loads, and drops its copies in the host cache.

        Called between two steps, after all requests that used the tenant's adapters have ended.
        """
        for resident in [resident for resident in self._loading if resident.version.tenant == tenant]:
            self._residency.abandon_load(resident)
            self._end(resident)
        self._host.purge(tenant)

    def remove(self, version: AdapterVersion) -> None:
        """Removes a deleted adapter that no unfinished request names."""
        self._residency.remove(version)
        self._host.remove(version)

    def check_invariants(self, waiting: Collection[Sequence], num_running_steps: int = 0) -> None:
        """Asserts that the loads in progress are consistent. waiting: all waiting sequences."""
        self._host.check_invariants(waiting)
        for resident, load in self._loading.items():
            assert resident.is_loading and resident.num_users > 0, (
                f"{resident.version}: the adapter is loading without a load"
            )
            num_copying = load.num_planned - resident.num_loaded
            assert num_copying >= 0 and (num_running_steps or not num_copying), (
                f"{resident.version}: a slice of the load is missing"
            )

    def loading_residents(self) -> Iterator[Resident]:
        """The residents that are being loaded. Each load counts as one user of its resident."""
        return iter(self._loading)

    def _end(self, resident: Resident) -> None:
        del self._loading[resident]
        self._host.release_taken(resident.version)


class _Load:
    """One load in progress.

    num_planned: number of pages that are loaded or planned to be loaded in this step.
    num_copied: number of pages that were planned in earlier steps.
    is_background: whether only background requests are known to wait for the adapter.
    """

    __slots__ = ("is_background", "num_copied", "num_planned", "packed")

    def __init__(self, packed: PackedAdapter) -> None:
        self.packed = packed
        self.num_planned = self.num_copied = 0
        self.is_background = False
