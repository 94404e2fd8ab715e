import pytest

from slora.core.request import TenantShare
from slora.memory.evictor import Evictor
from slora.memory.page_pool import PagePool
from slora.memory.residency import Residency, Resident
from slora.memory.tenant_account import TenantAccounts
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraTargets

TARGETS = LoraTargets(8, 4, embedding=False, head=False, kv=True)


class Setup:
    """A pool of 100 pages with three slots."""

    def __init__(self) -> None:
        self.pool = PagePool(100)
        self.tenants = TenantAccounts(100)
        self.evictor = Evictor(self.pool, self.tenants)
        self.residency = Residency(self.pool, self.evictor, self.tenants, 3)

    def admit(self, name: str, num_pages: int = 10, num_bytes: int = 1000, tenant: str = "owner") -> Resident:
        """Admits an adapter whose load is in progress."""
        owner = self.tenants.find(tenant)
        assert self.evictor.make_room(num_pages, owner)
        return self.residency.allocate(AdapterVersion(tenant, name), owner, num_pages, num_bytes, TARGETS)

    def load(self, name: str, num_pages: int = 10, num_bytes: int = 1000, tenant: str = "owner") -> Resident:
        """Loads an adapter and leaves it idle."""
        resident = self.admit(name, num_pages, num_bytes, tenant)
        self.residency.advance_load(resident, num_pages)
        return resident

    def is_here(self, resident: Resident) -> bool:
        return self.residency.find(resident.version) is resident

    def push_out(self, num_pages: int, requester: str = "requester") -> None:
        """`requester`, which already owns `num_pages`, takes the rest of the pool too. Evicts idle adapters for it."""
        tenant = self.tenants.find(requester)
        assert self.evictor.make_room(num_pages, tenant)
        self.pool.allocate(num_pages, tenant)
        assert self.evictor.make_room(100 - num_pages, tenant)


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_an_adapter_that_is_being_loaded_is_held(setup: Setup) -> None:
    resident = setup.admit("x")
    setup.residency.advance_load(resident, 9)
    assert not resident.is_loaded
    assert not setup.evictor.make_room(91, setup.tenants.find("requester"))
    setup.residency.advance_load(resident, 1)
    assert resident.is_loaded
    assert setup.evictor.make_room(91, setup.tenants.find("requester"))
    assert not setup.is_here(resident)


def test_an_unused_adapter_whose_load_failed_is_freed_at_once(setup: Setup) -> None:
    resident = setup.admit("x")
    setup.residency.advance_load(resident, 9)
    setup.residency.abandon_load(resident)
    assert not setup.is_here(resident)
    assert setup.pool.num_free == 100


def test_a_used_adapter_whose_load_failed_is_freed_with_its_last_user(setup: Setup) -> None:
    resident = setup.admit("x")
    setup.residency.acquire(resident)
    setup.residency.abandon_load(resident)
    assert setup.is_here(resident)
    assert not resident.is_loaded
    setup.residency.release(resident)
    assert not setup.is_here(resident)


def test_an_adapter_deleted_during_its_load_is_freed_when_the_load_ends(setup: Setup) -> None:
    resident = setup.admit("x")
    setup.residency.remove(resident.version)
    assert setup.is_here(resident)
    setup.residency.advance_load(resident, 10)
    assert not setup.is_here(resident)


def test_a_completed_load_cannot_be_advanced(setup: Setup) -> None:
    resident = setup.load("x")
    with pytest.raises(AssertionError, match="is not being loaded"):
        setup.residency.advance_load(resident, 0)
    with pytest.raises(AssertionError, match="is not being loaded"):
        setup.residency.abandon_load(resident)


def test_a_load_cannot_exceed_the_pages_of_its_adapter(setup: Setup) -> None:
    with pytest.raises(AssertionError, match="more pages were loaded than"):
        setup.residency.advance_load(setup.admit("x"), 11)


def test_freeing_a_slot_evicts_the_adapter_that_has_been_idle_longest(setup: Setup) -> None:
    used_again, idle, _ = (setup.load(name) for name in "xyz")
    setup.residency.acquire(used_again)
    setup.residency.release(used_again)
    assert setup.residency.ensure_free_slot(setup.tenants.find("owner"))
    assert setup.is_here(used_again) and not setup.is_here(idle)
    assert setup.residency.ensure_free_slot(setup.tenants.find("owner")), "there is one already"
    assert len(setup.residency) == 2


def test_freeing_a_slot_evicts_an_adapter_within_a_floor_last(setup: Setup) -> None:
    setup.tenants.set_share("safe", TenantShare(min_share=0.2))
    first, second = setup.load("x", tenant="safe"), setup.load("y", tenant="safe")
    last = setup.load("z")
    requester = setup.tenants.find("requester")
    assert setup.residency.ensure_free_slot(requester)
    assert not setup.is_here(last)
    setup.residency.acquire(setup.load("w"))
    assert setup.residency.ensure_free_slot(requester), "nobody must wait for a slot that is idle"
    assert not setup.is_here(first)
    assert setup.is_here(second)


def test_freeing_a_slot_may_evict_an_adapter_within_the_requesters_own_floor(setup: Setup) -> None:
    setup.tenants.set_share("safe", TenantShare(min_share=0.3))
    own = setup.load("x", tenant="safe")
    setup.load("y")
    setup.load("z")
    assert setup.residency.ensure_free_slot(setup.tenants.find("safe"))
    assert not setup.is_here(own)


def test_freeing_a_slot_evicts_a_pinned_adapter_after_one_within_a_floor(setup: Setup) -> None:
    setup.tenants.set_share("safe", TenantShare(min_share=0.1))
    pinned, safe = setup.load("x"), setup.load("y", tenant="safe")
    setup.residency.pin(pinned)
    setup.residency.acquire(setup.load("z"))
    requester = setup.tenants.find("requester")
    assert setup.residency.ensure_free_slot(requester)
    assert setup.is_here(pinned) and not setup.is_here(safe)
    setup.residency.acquire(setup.load("w"))
    assert setup.residency.ensure_free_slot(requester), "nobody must wait for a slot that is idle"
    assert not setup.is_here(pinned)


def test_pinning_does_not_change_an_idle_adapters_eviction_rank() -> None:
    setup = Setup()
    first, second = setup.load("x"), setup.load("y")
    setup.residency.pin(first)
    assert setup.evictor.make_room(90, setup.tenants.find("requester"))
    assert setup.is_here(first) and not setup.is_here(second)
    third = setup.load("z")
    setup.residency.unpin(first)
    assert setup.evictor.make_room(90, setup.tenants.find("requester"))
    assert setup.is_here(third) and not setup.is_here(first)


def test_a_slot_cannot_be_freed_without_an_unprotected_idle_adapter(setup: Setup) -> None:
    spared = setup.load("x")
    for name in "yz":
        setup.residency.acquire(setup.load(name))
    requester = setup.tenants.find("requester")
    assert not setup.residency.can_free_slots(1, [spared])
    assert not setup.residency.ensure_free_slot(requester, [spared])
    assert setup.residency.can_free_slots(1)
    assert setup.residency.ensure_free_slot(requester)
    assert not setup.is_here(spared)


def test_an_adapter_evicted_for_a_tenant_above_its_share_is_displaced(setup: Setup) -> None:
    resident = setup.load("x")
    setup.push_out(51)
    assert setup.residency.was_displaced(resident.version), (
        "51 of 100 pages, and half of the pool is its share"
    )
    again = setup.admit("x")
    setup.residency.advance_load(again, 9)
    assert setup.residency.was_displaced(resident.version), "it can be asked as long as it is being loaded"
    setup.residency.advance_load(again, 1)
    assert not setup.residency.was_displaced(resident.version)


def test_an_adapter_evicted_for_a_tenant_within_its_share_is_not_displaced(setup: Setup) -> None:
    resident = setup.load("x")
    setup.push_out(50)
    assert not setup.is_here(resident)
    assert not setup.residency.was_displaced(resident.version)


def test_an_adapter_evicted_for_its_own_tenant_is_not_displaced(setup: Setup) -> None:
    setup.tenants.find("waits").num_waiting = 1
    resident = setup.load("x")
    setup.push_out(80, requester="owner")
    assert not setup.is_here(resident)
    assert not setup.residency.was_displaced(resident.version)


def test_an_adapter_that_lost_its_slot_to_a_tenant_above_its_share_is_displaced(setup: Setup) -> None:
    residents = [setup.load(name) for name in "xyz"]
    requester = setup.tenants.find("requester")
    setup.pool.allocate(60, requester)
    assert setup.residency.ensure_free_slot(requester)
    assert [setup.residency.was_displaced(resident.version) for resident in residents] == [True, False, False]


def test_deleting_an_adapter_clears_its_displacement(setup: Setup) -> None:
    resident = setup.load("x")
    setup.push_out(60)
    setup.residency.remove(resident.version)
    assert not setup.residency.was_displaced(resident.version)


def test_the_number_of_remembered_displacements_is_bounded(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora.memory.residency._MAX_DISPLACED", 2)
    residents = [setup.load(name) for name in "xyz"]
    setup.push_out(60)
    assert [setup.residency.was_displaced(resident.version) for resident in residents] == [False, True, True]
