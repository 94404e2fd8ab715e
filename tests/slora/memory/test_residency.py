from collections.abc import Collection

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.core.request import TenantShare
from slora.memory.evictor import Evictor
from slora.memory.page_pool import PagePool
from slora.memory.residency import Residency, Resident
from slora.memory.tenant_account import TenantAccounts
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraTargets

TARGETS = LoraTargets(8, 4, embedding=False, head=False, kv=True)
VERSIONS = [AdapterVersion("tenant", f"digest{n}") for n in range(6)]
versions = st.sampled_from(VERSIONS)


class ResidencyMachine(RuleBasedStateMachine):
    """Adapters of one tenant are loaded, used, idle and evicted, while sequences take pages of the same pool."""

    @initialize(num_pages=st.integers(2, 12), num_slots=st.integers(1, 4))
    def start(self, num_pages: int, num_slots: int) -> None:
        self.pool = PagePool(num_pages)
        tenants = TenantAccounts(num_pages)
        self.tenant, self.sequences = tenants.find("tenant"), tenants.find("sequences")
        self.evictor = Evictor(self.pool, tenants)
        self.residency = Residency(self.pool, self.evictor, tenants, num_slots)
        self.num_slots = num_slots
        self.kv_pages: list[int] = []
        self.users: dict[AdapterVersion, int] = {}  # loads in progress included
        self.idle: list[AdapterVersion] = []  # least recently used first
        self.leaving: set[AdapterVersion] = set()  # deleted or broken, but still in use
        self.pinned: set[AdapterVersion] = set()
        self.tenancies: set[tuple[int, int]] = set()

    def _spared(self, data: st.DataObject) -> list[Resident]:
        chosen = data.draw(st.lists(st.sampled_from(self.idle), unique=True)) if self.idle else []
        return [self._resident(version) for version in chosen]

    def _see_who_left(self, spare: Collection[Resident], *, for_slot: bool = False) -> None:
        """Checks that the oldest idle adapters were evicted.

        Pinned adapters may be evicted only to free a slot, and only after all others.
        """
        left = {version for version in self.idle if not self.residency.find(version)}
        spared = [resident.version for resident in spare]
        open_to_all = [version for version in self.idle if version not in spared]
        order = [version for version in open_to_all if version not in self.pinned]
        if for_slot:
            order += [version for version in open_to_all if version in self.pinned]
        assert left == set(order[: len(left)]), "not the oldest, or a pinned one"
        self.idle = [version for version in self.idle if version not in left]
        self.pinned -= left

    @rule(wanted=st.integers(0, 12), data=st.data())
    def room_is_made_for_pages(self, wanted: int, data: st.DataObject) -> None:
        spare = self._spared(data)
        before = len(self.residency)
        if self.evictor.make_room(wanted, self.sequences, spare):
            assert self.pool.num_free >= wanted
        else:
            assert len(self.residency) == before, "something was evicted in vain"
        self._see_who_left(spare)

    @rule(data=st.data())
    def room_is_made_for_a_slot(self, data: st.DataObject) -> None:
        spare = self._spared(data)
        before, num_free = len(self.residency), self.num_slots - len(self.residency)
        possible = num_free > 0 or len(self.idle) > len(spare)
        assert self.residency.can_free_slots(1, spare) == possible
        assert self.residency.ensure_free_slot(self.sequences, spare) == possible
        assert before - len(self.residency) == (possible and num_free == 0), "one leaves if one must"
        self._see_who_left(spare, for_slot=True)

    @rule(version=versions, num_pages=st.integers(0, 4))
    def an_adapter_comes(self, version: AdapterVersion, num_pages: int) -> None:
        if self.residency.find(version) or not self.residency.can_free_slots(1):
            return
        if self.evictor.make_room(num_pages, self.tenant):
            assert self.residency.ensure_free_slot(self.tenant)
            resident = self.residency.allocate(version, self.tenant, num_pages, 1000 * num_pages, TARGETS)
            assert len(resident.pages) == num_pages
            assert (resident.slot, resident.generation) not in self.tenancies, "a generation came twice"
            self.tenancies.add((resident.slot, resident.generation))
            self.users[version] = 1
        self._see_who_left((), for_slot=True)

    @precondition(lambda self: self.idle or self.users)
    @rule(data=st.data())
    def one_is_pinned_or_unpinned(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from([*self.idle, *self.users]))
        change = self.residency.unpin if version in self.pinned else self.residency.pin
        change(self._resident(version))
        self.pinned ^= {version}

    def _resident(self, version: AdapterVersion) -> Resident:
        resident = self.residency.find(version)
        assert resident is not None
        return resident

    def _loading(self) -> list[Resident]:
        return [resident for resident in self.residency if resident.is_loading]

    @precondition(lambda self: self._loading())
    @rule(data=st.data())
    def a_slice_is_loaded(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from(self._loading()))
        left = len(resident.pages) - resident.num_loaded
        num_pages = data.draw(st.integers(0, left))
        self.residency.advance_load(resident, num_pages)
        assert resident.is_loaded == (num_pages == left)
        if num_pages == left:
            self._lose_user(resident.version)

    @precondition(lambda self: self._loading())
    @rule(data=st.data())
    def a_load_breaks(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from(self._loading()))
        self.residency.abandon_load(resident)
        assert not resident.is_loaded
        self.leaving.add(resident.version)
        self._lose_user(resident.version)

    @precondition(lambda self: self.idle or self.users)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from([*self.idle, *self.users]))
        self.residency.acquire(self._resident(version))
        self.users[version] = self.users.get(version, 0) + 1
        self.idle = [one for one in self.idle if one != version]

    def _used(self) -> list[AdapterVersion]:
        return [
            version for version, count in self.users.items() if count > self._resident(version).is_loading
        ]

    @precondition(lambda self: self._used())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self._used()))
        self.residency.release(self._resident(version))
        self._lose_user(version)

    def _lose_user(self, version: AdapterVersion) -> None:
        self.users[version] -= 1
        if self.users[version]:
            return
        del self.users[version]
        if version in self.leaving:
            self.leaving.remove(version)
            self.pinned.discard(version)
        else:
            self.idle.append(version)

    @rule(version=versions)
    def forget(self, version: AdapterVersion) -> None:
        self.residency.remove(version)
        if version in self.users:
            self.leaving.add(version)
        else:
            self.pinned.discard(version)
        self.idle = [one for one in self.idle if one != version]

    @rule(count=st.integers(1, 4))
    def a_sequence_takes_pages(self, count: int) -> None:
        if self.evictor.make_room(count, self.sequences):
            self.kv_pages += self.pool.allocate(count, self.sequences)
        self._see_who_left(())

    @rule()
    def sequences_give_their_pages_back(self) -> None:
        self.pool.release(self.kv_pages)
        self.kv_pages = []

    @invariant()
    def pages_and_slots_add_up(self) -> None:
        residents = list(self.residency)
        held = [*self.kv_pages, *self.residency.held_pages()]
        self.pool.check_invariants(held, self.residency.cached_pages(), [self.tenant, self.sequences])
        self.evictor.check_invariants()
        assert {resident.version for resident in residents} == {*self.idle, *self.users}
        pinned = [resident for resident in residents if resident.is_pinned]
        assert {resident.version for resident in pinned} == self.pinned
        assert self.residency.num_pinned == len(pinned)
        assert self.residency.num_pinned_pages == sum(len(resident.pages) for resident in pinned)
        assert all(resident.num_users == self.users.get(resident.version, 0) for resident in residents)
        assert all(bool(resident.ticket) == (resident.version in self.idle) for resident in residents)
        assert len({resident.slot for resident in residents}) == len(residents) <= self.num_slots


TestResidency = ResidencyMachine.TestCase


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
