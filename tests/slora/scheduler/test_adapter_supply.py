"""Adapters load in slices, the oldest load first. The host copy stays until its last slice. A broken load is undone."""

from collections.abc import Callable

import pytest

from slora.pool.eviction_policy import LeastRecentlyUsed
from slora.pool.evictor import Evictor
from slora.pool.page_pool import PagePool
from slora.pool.residency import Residency, Resident
from slora.pool.tenant_account import TenantAccounts
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora_adapters.loader.source import Fetched
from slora_adapters.version import AdapterVersion
from tests.support.queueing import make_sequence
from tests.support.scripted_source import FULL_PAGE_BYTES, ScriptedSource

SMALL, LARGE = AdapterVersion("a", "small"), AdapterVersion("a", "large")


class Setup:
    """A pool of 20 pages with 4 slots, and two adapters of 2 and 5 pages."""

    def __init__(self) -> None:
        tenants = TenantAccounts(20)
        self.tenant = tenants.find("a")
        self.pool = PagePool(20)
        evictor = Evictor(self.pool, tenants, LeastRecentlyUsed())
        self.residency = Residency(self.pool, evictor, tenants, num_slots=4)
        self.source = ScriptedSource({SMALL: 2, LARGE: 5})
        self.supply = AdapterSupply(self.residency, self.source, FULL_PAGE_BYTES)

    def fetch(self, *versions: AdapterVersion) -> list[Sequence]:
        """One sequence per version. Its adapter is on the host, and the sequence can be admitted."""
        sequences = []
        for version in versions:
            sequences.append(make_sequence(self.tenant, adapter=version))
            self.supply.wait(sequences[-1], version)
        self.source.deliver()
        for fetch, waiting in self.supply.collect():
            assert isinstance(fetch, Fetched) and len(waiting) == 1
            self.supply.retain(fetch.version)
        return sequences

    def begin(self, version: AdapterVersion) -> Resident:
        """Begins the load of `version`, with one user besides the load."""
        resident = self.supply.begin(version, self.tenant)
        self.residency.acquire(resident)
        self.supply.release(version)
        return resident

    def run(self, num_pages: int) -> list[tuple[AdapterVersion, int, int]]:
        """Runs a step that loads at most `num_pages`. Returns (version, first page, pages) for each slice."""
        plan = StepPlan()
        self.supply.advance(plan, num_pages)
        assert all(self.source.is_pinned(load.packed) for load in plan.loads)
        self.supply.settle(plan)
        self.supply.check()
        return [(load.resident.version, load.first_page, load.num_pages) for load in plan.loads]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_who_waits_is_told_of_when_its_adapter_is_on_the_host(setup: Setup) -> None:
    first, second = (make_sequence(setup.tenant, adapter=LARGE) for _ in range(2))
    setup.supply.wait(first, LARGE)
    setup.supply.wait(second, LARGE)
    assert setup.supply.num_awaiting == 2 and setup.supply.num_pages(LARGE) is None
    assert list(setup.supply.collect()) == []
    assert setup.supply.leave(second, LARGE) and not setup.supply.leave(second, LARGE)
    setup.source.deliver()
    ((fetch, waiting),) = setup.supply.collect()
    assert fetch.version == LARGE and waiting == [first] and setup.supply.num_awaiting == 0


def test_an_adapter_has_its_size_as_soon_as_it_is_on_the_host_and_in_the_pool(setup: Setup) -> None:
    setup.fetch(LARGE)
    assert setup.supply.num_pages(LARGE) == 5 and setup.supply.find(LARGE) is None
    setup.begin(LARGE)
    setup.run(20)
    assert setup.source.num_pinned == 0 and setup.supply.num_pages(LARGE) == 5


def test_a_load_comes_in_slices_and_is_ready_with_the_last_one(setup: Setup) -> None:
    setup.fetch(LARGE)
    resident = setup.begin(LARGE)
    assert setup.pool.num_held == 5 and not setup.supply.is_ready(resident)
    assert setup.run(2) == [(LARGE, 0, 2)]
    assert setup.run(0) == []
    assert setup.run(2) == [(LARGE, 2, 2)]
    assert not setup.supply.is_ready(resident) and not resident.is_loaded
    plan = StepPlan()
    assert setup.supply.advance(plan, 2) == 1
    assert setup.supply.is_ready(resident) and not resident.is_loaded, "in the step of its last slice"
    setup.supply.settle(plan)
    assert resident.is_loaded and setup.supply.num_loading == 0
    assert setup.run(9) == []


def test_the_oldest_load_goes_first_and_leaves_the_next_what_is_over(setup: Setup) -> None:
    setup.fetch(LARGE, SMALL)
    setup.begin(LARGE), setup.begin(SMALL)
    assert setup.run(4) == [(LARGE, 0, 4)]
    assert setup.run(2) == [(LARGE, 4, 1), (SMALL, 0, 1)]
    assert setup.run(2) == [(SMALL, 1, 1)]
    assert setup.supply.num_loads == 2


def test_the_copy_on_the_host_stays_until_the_last_slice_and_no_longer(setup: Setup) -> None:
    setup.fetch(LARGE)
    setup.begin(LARGE)
    setup.run(4)
    assert setup.source.num_pinned == 1
    setup.run(1)
    assert setup.source.num_pinned == 0


def test_an_adapter_that_loads_stays_though_its_only_request_has_ended(setup: Setup) -> None:
    setup.fetch(LARGE)
    resident = setup.begin(LARGE)
    setup.run(1)
    setup.residency.release(resident)
    assert setup.pool.num_held == 5
    setup.run(4)
    assert (setup.pool.num_held, setup.pool.num_cached) == (0, 5) and setup.supply.find(LARGE) is resident


def test_what_a_broken_step_was_to_load_leaves_with_its_last_user(setup: Setup) -> None:
    setup.fetch(LARGE, SMALL)
    large, small = setup.begin(LARGE), setup.begin(SMALL)
    plan = StepPlan()
    setup.supply.advance(plan, 5)
    assert setup.supply.distrust(plan) == {large}
    setup.supply.check()
    assert setup.source.num_pinned == 1 and setup.pool.num_held == 7
    setup.residency.release(large)
    assert setup.pool.num_free == 18 and setup.supply.find(LARGE) is None
    assert setup.run(2) == [(SMALL, 0, 2)] and small.is_loaded


@pytest.mark.parametrize("when", ["aside", "on the host", "loading", "loaded"])
def test_a_deleted_adapter_leaves_pool_and_host(setup: Setup, when: str) -> None:
    steps: dict[str, Callable[[], object]] = {
        "on the host": lambda: setup.fetch(LARGE),
        "loading": lambda: (setup.begin(LARGE), setup.run(2)),
        "loaded": lambda: setup.run(9),
    }
    for name in list(steps)[: ["aside", *steps].index(when)]:
        steps[name]()
    resident = setup.supply.find(LARGE)
    setup.supply.forget(LARGE)
    assert LARGE in setup.source.forgotten
    if resident is not None:
        setup.run(9)
        setup.residency.release(resident)
        assert setup.pool.num_free == 20 and setup.source.num_pinned == 0
