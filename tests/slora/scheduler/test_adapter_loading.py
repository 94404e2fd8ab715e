"""Adapters load in slices, the oldest load first. The host copy stays until its last slice. A broken load is undone."""

from collections.abc import Callable

import pytest

from slora.core.engine_config import KVFootprint, SchedulerConfig
from slora.memory.residency import Resident
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.adapter_loading import AdapterLoading
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora_adapters.loader.source import Fetched
from slora_adapters.version import AdapterVersion
from tests.support.queueing import BLOCK_TOKENS, make_sequence
from tests.support.scheduler_bench import COSTS
from tests.support.scripted_source import FULL_PAGE_BYTES, ScriptedSource

SMALL, LARGE = AdapterVersion("a", "small"), AdapterVersion("a", "large")


class Setup:
    """A pool of 20 pages with 4 slots, and two adapters of 2 and 5 pages."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            num_pages=20,
            num_slots=4,
            full_page_bytes=FULL_PAGE_BYTES,
            footprint=KVFootprint(BLOCK_TOKENS),
            max_num_seqs=8,
            max_num_batched_tokens=8,
        )
        paging = UnifiedPaging(config)
        self.tenant = paging.tenants.find("a")
        self.pool, self.residency = paging.pool, paging.residency
        self.source = ScriptedSource({SMALL: 2, LARGE: 5})
        self._ready: dict[AdapterVersion, Sequence] = {}
        self.loading = AdapterLoading(paging, self.source, COSTS, FULL_PAGE_BYTES)

    def fetch(self, *versions: AdapterVersion) -> list[Sequence]:
        """One sequence per version. Its adapter is on the host, and the sequence can be admitted."""
        sequences = []
        for version in versions:
            sequences.append(make_sequence(self.tenant, adapter=version))
            self.loading.add_waiter(sequences[-1], [version])
        self.source.deliver()
        for fetch, waiting in self.loading.collect_fetches():
            assert isinstance(fetch, Fetched) and len(waiting) == 1
            self.loading.remove_waiter(waiting[0])
            self.loading.retain_copies(waiting[0])
            self._ready[fetch.version] = waiting[0]
        return sequences

    def begin(self, version: AdapterVersion) -> Resident:
        """Begins the load of `version`, with one user besides the load."""
        resident = self.loading.start_load(version, self.tenant, "request")
        self.residency.acquire(resident)
        self.loading.release_copies(self._ready[version])
        return resident

    def plan(self, num_pages: int) -> StepPlan:
        plan = StepPlan()
        self.loading.budget.num_pages = num_pages
        self.loading.plan_slices(plan)
        return plan

    def run(self, num_pages: int) -> list[tuple[AdapterVersion, int, int]]:
        """Runs a step that loads at most `num_pages`. Returns (version, first page, pages) for each slice."""
        plan = self.plan(num_pages)
        assert all(self.source.is_pinned(load.packed) for load in plan.loads)
        self.loading.finish_step(plan)
        self.loading.check_invariants(self._ready.values())
        return [(load.resident.version, load.first_page, load.num_pages) for load in plan.loads]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_waiting_sequences_are_returned_when_their_fetch_completes(setup: Setup) -> None:
    first, second = (make_sequence(setup.tenant, adapter=LARGE) for _ in range(2))
    setup.loading.add_waiter(first, [LARGE])
    setup.loading.add_waiter(second, [LARGE])
    assert setup.loading.num_waiting == 2 and setup.loading.num_pages(LARGE) is None
    assert list(setup.loading.collect_fetches()) == []
    setup.loading.remove_waiter(second)
    setup.loading.remove_waiter(second)
    assert setup.loading.num_waiting == 1
    setup.source.deliver()
    ((fetch, waiting),) = setup.loading.collect_fetches()
    assert fetch.version == LARGE and waiting == [first] and setup.loading.has_fetched_all(first)


def test_an_adapter_has_its_size_as_soon_as_it_is_on_the_host_and_in_the_pool(setup: Setup) -> None:
    setup.fetch(LARGE)
    assert setup.loading.num_pages(LARGE) == 5 and setup.loading.find(LARGE) is None
    setup.begin(LARGE)
    setup.run(20)
    assert setup.source.num_pinned == 0 and setup.loading.num_pages(LARGE) == 5


def test_a_load_is_split_into_slices_and_is_ready_with_the_last_one(setup: Setup) -> None:
    setup.fetch(LARGE)
    resident = setup.begin(LARGE)
    assert setup.pool.num_held == 5 and not setup.loading.are_ready([resident])
    assert setup.run(2) == [(LARGE, 0, 2)]
    assert setup.run(0) == []
    assert setup.run(2) == [(LARGE, 2, 2)]
    assert not setup.loading.are_ready([resident]) and not resident.is_loaded
    plan = setup.plan(2)
    assert setup.loading.budget.num_pages == 1
    assert setup.loading.are_ready([resident]) and not resident.is_loaded, "in the step of its last slice"
    setup.loading.finish_step(plan)
    assert resident.is_loaded and setup.loading.num_loading == 0
    assert setup.run(9) == []


def test_the_oldest_load_is_served_first_and_the_next_gets_the_remaining_budget(setup: Setup) -> None:
    setup.fetch(LARGE, SMALL)
    setup.begin(LARGE), setup.begin(SMALL)
    assert setup.run(4) == [(LARGE, 0, 4)]
    assert setup.run(2) == [(LARGE, 4, 1), (SMALL, 0, 1)]
    assert setup.run(2) == [(SMALL, 1, 1)]
    assert setup.loading.num_loads == 2


def test_the_host_copy_is_released_after_the_last_slice(setup: Setup) -> None:
    setup.fetch(LARGE)
    setup.begin(LARGE)
    setup.run(4)
    assert setup.source.num_pinned == 1
    setup.run(1)
    assert setup.source.num_pinned == 0


def test_a_load_continues_after_its_only_request_has_ended(setup: Setup) -> None:
    setup.fetch(LARGE)
    resident = setup.begin(LARGE)
    setup.run(1)
    setup.residency.release(resident)
    assert setup.pool.num_held == 5
    setup.run(4)
    assert (setup.pool.num_held, setup.pool.num_cached) == (0, 5) and setup.loading.find(LARGE) is resident


def test_an_adapter_whose_load_failed_is_freed_with_its_last_user(setup: Setup) -> None:
    setup.fetch(LARGE, SMALL)
    large, small = setup.begin(LARGE), setup.begin(SMALL)
    plan = setup.plan(5)
    assert setup.loading.abandon_loads(plan) == {large}
    setup.loading.check_invariants([])
    assert setup.source.num_pinned == 1 and setup.pool.num_held == 7
    setup.residency.release(large)
    assert setup.pool.num_free == 18 and setup.loading.find(LARGE) is None
    assert setup.run(2) == [(SMALL, 0, 2)] and small.is_loaded


@pytest.mark.parametrize("when", ["waiting", "on the host", "loading", "loaded"])
def test_a_deleted_adapter_is_freed_from_pool_and_host(setup: Setup, when: str) -> None:
    steps: dict[str, Callable[[], object]] = {
        "on the host": lambda: setup.fetch(LARGE),
        "loading": lambda: (setup.begin(LARGE), setup.run(2)),
        "loaded": lambda: setup.run(9),
    }
    for name in list(steps)[: ["waiting", *steps].index(when)]:
        steps[name]()
    resident = setup.loading.find(LARGE)
    setup.loading.remove(LARGE)
    assert LARGE in setup.source.discarded
    if resident is not None:
        setup.run(9)
        setup.residency.release(resident)
        assert setup.pool.num_free == 20 and setup.source.num_pinned == 0
