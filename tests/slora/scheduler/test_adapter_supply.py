"""Adapters load in slices, the oldest load first. The host copy stays until its last slice. A broken load is undone."""

from collections.abc import Callable

import pytest

from slora.pool.eviction_policy import LeastRecentlyUsed
from slora.pool.evictor import Evictor
from slora.pool.page_pool import PagePool
from slora.pool.residency import Residency, Resident
from slora.pool.tenant import Tenants
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora_adapters.loader.source import Fetched
from slora_adapters.version import AdapterVersion
from tests.support.queueing import make_sequence
from tests.support.scripted_source import FULL_PAGE_BYTES, ScriptedSource

SMALL, LARGE = AdapterVersion("a", "small"), AdapterVersion("a", "large")


class House:
    """A pool of 20 pages with 4 slots, and two adapters of 2 and 5 pages."""

    def __init__(self) -> None:
        tenants = Tenants(20)
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
def house() -> House:
    return House()


def test_who_waits_is_told_of_when_its_adapter_is_on_the_host(house: House) -> None:
    first, second = (make_sequence(house.tenant, adapter=LARGE) for _ in range(2))
    house.supply.wait(first, LARGE)
    house.supply.wait(second, LARGE)
    assert house.supply.num_awaiting == 2 and house.supply.num_pages(LARGE) is None
    assert list(house.supply.collect()) == []
    assert house.supply.leave(second, LARGE) and not house.supply.leave(second, LARGE)
    house.source.deliver()
    ((fetch, waiting),) = house.supply.collect()
    assert fetch.version == LARGE and waiting == [first] and house.supply.num_awaiting == 0


def test_an_adapter_has_its_size_as_soon_as_it_is_on_the_host_and_in_the_pool(house: House) -> None:
    house.fetch(LARGE)
    assert house.supply.num_pages(LARGE) == 5 and house.supply.find(LARGE) is None
    house.begin(LARGE)
    house.run(20)
    assert house.source.num_pinned == 0 and house.supply.num_pages(LARGE) == 5


def test_a_load_comes_in_slices_and_is_ready_with_the_last_one(house: House) -> None:
    house.fetch(LARGE)
    resident = house.begin(LARGE)
    assert house.pool.num_held == 5 and not house.supply.is_ready(resident)
    assert house.run(2) == [(LARGE, 0, 2)]
    assert house.run(0) == []
    assert house.run(2) == [(LARGE, 2, 2)]
    assert not house.supply.is_ready(resident) and not resident.is_loaded
    plan = StepPlan()
    assert house.supply.advance(plan, 2) == 1
    assert house.supply.is_ready(resident) and not resident.is_loaded, "in the step of its last slice"
    house.supply.settle(plan)
    assert resident.is_loaded and house.supply.num_loading == 0
    assert house.run(9) == []


def test_the_oldest_load_goes_first_and_leaves_the_next_what_is_over(house: House) -> None:
    house.fetch(LARGE, SMALL)
    house.begin(LARGE), house.begin(SMALL)
    assert house.run(4) == [(LARGE, 0, 4)]
    assert house.run(2) == [(LARGE, 4, 1), (SMALL, 0, 1)]
    assert house.run(2) == [(SMALL, 1, 1)]
    assert house.supply.num_loads == 2


def test_the_copy_on_the_host_stays_until_the_last_slice_and_no_longer(house: House) -> None:
    house.fetch(LARGE)
    house.begin(LARGE)
    house.run(4)
    assert house.source.num_pinned == 1
    house.run(1)
    assert house.source.num_pinned == 0


def test_an_adapter_that_loads_stays_though_its_only_request_has_ended(house: House) -> None:
    house.fetch(LARGE)
    resident = house.begin(LARGE)
    house.run(1)
    house.residency.release(resident)
    assert house.pool.num_held == 5
    house.run(4)
    assert (house.pool.num_held, house.pool.num_cached) == (0, 5) and house.supply.find(LARGE) is resident


def test_what_a_broken_step_was_to_load_leaves_with_its_last_user(house: House) -> None:
    house.fetch(LARGE, SMALL)
    large, small = house.begin(LARGE), house.begin(SMALL)
    plan = StepPlan()
    house.supply.advance(plan, 5)
    assert house.supply.distrust(plan) == {large}
    house.supply.check()
    assert house.source.num_pinned == 1 and house.pool.num_held == 7
    house.residency.release(large)
    assert house.pool.num_free == 18 and house.supply.find(LARGE) is None
    assert house.run(2) == [(SMALL, 0, 2)] and small.is_loaded


@pytest.mark.parametrize("when", ["aside", "on the host", "loading", "loaded"])
def test_a_deleted_adapter_leaves_pool_and_host(house: House, when: str) -> None:
    steps: dict[str, Callable[[], object]] = {
        "on the host": lambda: house.fetch(LARGE),
        "loading": lambda: (house.begin(LARGE), house.run(2)),
        "loaded": lambda: house.run(9),
    }
    for name in list(steps)[: ["aside", *steps].index(when)]:
        steps[name]()
    resident = house.supply.find(LARGE)
    house.supply.forget(LARGE)
    assert LARGE in house.source.forgotten
    if resident is not None:
        house.run(9)
        house.residency.release(resident)
        assert house.pool.num_free == 20 and house.source.num_pinned == 0
