from collections import defaultdict
from collections.abc import Collection
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.core.request import TenantShare
from slora.memory.evictor import Evictable, Evictor
from slora.memory.page_pool import PagePool
from slora.memory.residency import Residency, Resident
from slora.memory.tenant_account import TenantAccount, TenantAccounts
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraTargets
from tests.support.idle_blocks import IdleBlock, IdleBlocks

TARGETS = LoraTargets(8, 4, embedding=False, head=False, kv=True)
NAMES = "abc"
names = st.sampled_from(NAMES)
counts = st.integers(1, 5)


def _shares() -> st.SearchStrategy[TenantShare]:
    tenths = st.tuples(st.integers(0, 4), st.sampled_from([10, 10, 6, 3]))
    bounded = tenths.map(lambda pair: TenantShare(min_share=min(pair) / 10, max_share=pair[1] / 10))
    return st.just(TenantShare()) | bounded


class PoolOfTenants(RuleBasedStateMachine):
    """Tenants compute prefixes and load adapters in one pool. Idle prefixes and adapters are evicted to make room."""

    @initialize(num_pages=st.integers(4, 24), num_slots=st.integers(1, 4))
    def start(self, num_pages: int, num_slots: int) -> None:
        self.pool = PagePool(num_pages)
        self.tenants, self.num_slots = TenantAccounts(num_pages), num_slots
        self.evictor = Evictor(self.pool, self.tenants)
        self.residency = Residency(self.pool, self.evictor, self.tenants, num_slots)
        self.blocks = IdleBlocks(self.pool, self.evictor)
        self.sequences: list[list[IdleBlock]] = []  # the blocks that each sequence uses, in order
        self.uses: list[Resident] = []  # one entry for each user of a loaded adapter
        self.tenancies: set[tuple[int, int]] = set()  # slot and generation of each adapter that was ever here

    # -- operations --------------------------------------------------------------------------------------------

    @rule(name=names, share=_shares())
    def a_tenant_gets_another_share(self, name: str, share: TenantShare) -> None:
        self.tenants.set_share(name, share)

    @rule(name=names, count=counts, data=st.data())
    def a_sequence_starts(self, name: str, count: int, data: st.DataObject) -> None:
        tenant = self.tenants.find(name)
        ends = [
            block for block in self.blocks if block.tenant is tenant and all(b.is_here for b in block.chain())
        ]
        end = data.draw(st.none() | st.sampled_from(ends)) if ends else None
        chain = end.chain() if end is not None else []
        if self._make_room(count, tenant, protected=chain):
            for block in chain:
                self.blocks.acquire(block)
            self.sequences.append(chain + self.blocks.extend(end, count, tenant))

    @precondition(lambda self: any(self.sequences))
    @rule(count=counts, data=st.data())
    def a_sequence_grows(self, count: int, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([one for one in self.sequences if one]))
        if self._make_room(count, sequence[-1].tenant):
            sequence += self.blocks.extend(sequence[-1], count, sequence[-1].tenant)

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data())
    def a_block_falls_behind_the_window(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([one for one in self.sequences if one]))
        self.blocks.release(sequence.pop(0))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), backwards=st.booleans())
    def a_sequence_ends(self, data: st.DataObject, backwards: bool) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        for block in reversed(sequence) if backwards else sequence:
            self.blocks.release(block)

    @rule(name=names, number=st.integers(0, 2), num_pages=counts, data=st.data())
    def an_adapter_is_wanted(self, name: str, number: int, num_pages: int, data: st.DataObject) -> None:
        version, tenant = AdapterVersion(name, f"digest{number}"), self.tenants.find(name)
        protected = self._some_idle(data)
        residents = [item for item in protected if isinstance(item, Resident)]
        if self.residency.find(version) or not self.residency.can_free_slots(1, residents):
            return
        if self._make_room(num_pages, tenant, protected):
            assert self.residency.ensure_free_slot(tenant, residents), "a slot was promised"
            assert all(self.residency.find(resident.version) is resident for resident in residents)
            resident = self.residency.allocate(version, tenant, num_pages, num_pages * 1000, TARGETS)
            assert resident.num_users == 1 and not resident.is_loaded
            assert (resident.slot, resident.generation) not in self.tenancies, "a generation came twice"
            self.tenancies.add((resident.slot, resident.generation))

    @precondition(lambda self: any(resident.is_loading for resident in self.residency))
    @rule(data=st.data(), breaks=st.booleans())
    def a_load_goes_on(self, data: st.DataObject, breaks: bool) -> None:
        resident = data.draw(st.sampled_from([one for one in self.residency if one.is_loading]))
        if breaks:
            self.residency.abandon_load(resident)
            assert not resident.is_loaded
        else:
            left = len(resident.pages) - resident.num_loaded
            self.residency.advance_load(resident, data.draw(st.integers(0, left)))
            assert resident.is_loaded == (resident.num_loaded == len(resident.pages))

    @precondition(lambda self: len(self.residency) > 0)
    @rule(data=st.data())
    def an_adapter_is_used(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from(list(self.residency)))
        self.residency.acquire(resident)
        self.uses.append(resident)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def an_adapter_is_used_no_more(self, data: st.DataObject) -> None:
        self.residency.release(self.uses.pop(data.draw(st.integers(0, len(self.uses) - 1))))

    @precondition(lambda self: len(self.residency) > 0)
    @rule(data=st.data())
    def an_adapter_is_deleted(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from(list(self.residency)))
        self.residency.remove(resident.version)
        assert (self.residency.find(resident.version) is None) == (resident.num_users == 0)

    @precondition(lambda self: len(self.residency) > 0)
    @rule(data=st.data())
    def an_adapter_is_pinned_or_unpinned(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from(list(self.residency)))
        if resident.is_pinned:
            self.residency.unpin(resident)
        else:
            self.residency.pin(resident)

    @rule(
        name=names,
        num_pages=st.integers(0, 26),
        ignore_floors=st.booleans(),
        ignore_pins=st.booleans(),
        data=st.data(),
    )
    def room_is_made(
        self, name: str, num_pages: int, ignore_floors: bool, ignore_pins: bool, data: st.DataObject
    ) -> None:
        self._make_room(
            num_pages,
            self.tenants.find(name),
            self._some_idle(data),
            ignore_floors=ignore_floors,
            ignore_pins=ignore_pins,
        )

    # -- invariants --------------------------------------------------------------------------------------------

    def _make_room(
        self,
        num_pages: int,
        tenant: TenantAccount,
        protected: Collection[Evictable] = (),
        *,
        ignore_floors: bool = False,
        ignore_pins: bool = False,
    ) -> bool:
        owned = {other: other.num_pages for other in self.tenants}
        largest: dict[TenantAccount, int] = defaultdict(int)
        for item in self._idle():
            largest[item.tenant] = max(largest[item.tenant], len(item.pages))
        protected_pages = [page for item in protected for page in item.pages if self.pool.is_cached(page)]
        num_evictions, pinned = self.evictor.num_evictions, [one for one in self._idle() if one.is_pinned]
        to_pay = tenant.pages_over_ceiling(num_pages)
        promised = self._surely_freed(
            tenant, protected, to_pay, ignore_floors=ignore_floors, ignore_pins=ignore_pins
        )
        at_best = self.pool.num_free + self.evictor.num_evictable(num_pages, tenant, ignore_pins=ignore_pins)
        own_idle = tenant.num_cached - sum(self.pool.owner(page) is tenant for page in protected_pages)
        in_reach = to_pay <= own_idle and num_pages <= self.pool.num_free + promised
        could = self.evictor.can_make_room(num_pages, tenant, protected)
        had_room = num_pages <= self.pool.num_free and not to_pay
        if self.evictor.make_room(
            num_pages, tenant, protected, ignore_floors=ignore_floors, ignore_pins=ignore_pins
        ):
            assert could or ignore_floors or ignore_pins
            assert not had_room or self.evictor.num_evictions == num_evictions, "there was room already"
            assert num_pages <= self.pool.num_free
            assert num_pages <= at_best, "less was said to be there at best"
            assert (
                num_pages == 0 or tenant.max_pages is None or tenant.num_pages + num_pages <= tenant.max_pages
            )
        else:
            assert self.evictor.num_evictions == num_evictions, "something was evicted in vain"
            assert not in_reach and not could, "there was room to make"
        self._check_that_pins_left_last(pinned, tenant, protected, ignore_pins=ignore_pins)
        for other, before in owned.items():
            if other is not tenant and other.num_pages < before and not ignore_floors:
                assert other.num_pages > other.min_pages - largest[other], "a floor was cut into deeply"
        assert all(self.pool.is_cached(page) for page in protected_pages), "a protected item left"
        return num_pages <= self.pool.num_free and not tenant.pages_over_ceiling(num_pages)

    def _surely_freed(
        self,
        requester: TenantAccount,
        protected: Collection[Evictable],
        to_pay: int,
        *,
        ignore_floors: bool,
        ignore_pins: bool,
    ) -> int:
        """The number of pages that eviction surely frees before every other tenant is at its floor.

        to_pay: the requester's own cached pages that it must give up.
        """
        freed = 0
        for owner in self.tenants:
            idle = [item for item in self._idle() if item.tenant is owner and item not in protected]
            num_pages = sum(len(item.pages) for item in idle if ignore_pins or not item.is_pinned)
            allowed = num_pages if ignore_floors else max(0, owner.num_pages - owner.min_pages)
            freed += max(num_pages, to_pay) if owner is requester else min(num_pages, allowed)
        return freed

    def _check_that_pins_left_last(
        self,
        pinned: list[Resident | IdleBlock],
        requester: TenantAccount,
        protected: Collection[Evictable],
        *,
        ignore_pins: bool,
    ) -> None:
        left = [one for one in pinned if not one.ticket]
        others = [one for one in self._idle() if not one.is_pinned and one not in protected]
        if any(one.tenant is requester for one in left):
            assert not any(one.tenant is requester for one in others), "it had something else to pay with"
        if any(one.tenant is not requester for one in left):
            assert ignore_pins
            assert not any(one.tenant is requester or one.tenant.is_above_floor for one in others), (
                "something else could have left"
            )

    def _idle(self) -> list[Resident | IdleBlock]:
        adapters = [resident for resident in self.residency if not resident.num_users]
        return [*adapters, *(block for block in self.blocks if block.is_idle)]

    def _some_idle(self, data: st.DataObject) -> list[Evictable]:
        """Some idle items. A block is listed with the blocks before it, up to one that was evicted."""
        idle = self._idle()
        chosen = data.draw(st.lists(st.sampled_from(idle), unique=True, max_size=3)) if idle else []
        protected: list[Evictable] = []
        for item in chosen:
            protected += (
                [block for block in item.chain() if block.is_here] if isinstance(item, IdleBlock) else [item]
            )
        return protected

    @invariant()
    def every_page_is_in_one_state_and_every_count_adds_up(self) -> None:
        used = [page for block in self.blocks if block.num_users for page in block.pages * block.num_users]
        # A block holds one page reference, whatever the number of its users. IdleBlock counts its users itself.
        held = [*dict.fromkeys(used), *self.residency.held_pages()]
        cached = [page for item in self._idle() for page in item.pages]
        self.pool.check_invariants(held, cached, self.tenants)
        self.evictor.check_invariants()
        assert sum(tenant.num_pages for tenant in self.tenants) == self.pool.num_pages - self.pool.num_free
        assert sum(tenant.num_cached for tenant in self.tenants) == self.pool.num_cached
        residents = list(self.residency)
        for resident in residents:
            assert resident.num_users == self.uses.count(resident) + resident.is_loading
        assert len({resident.slot for resident in residents}) == len(residents) <= self.num_slots
        pinned = [resident for resident in residents if resident.is_pinned]
        assert self.residency.num_pinned == len(pinned)
        assert self.residency.num_pinned_pages == sum(len(resident.pages) for resident in pinned)

    @invariant()
    def what_is_offered_is_what_nothing_idle_hides(self) -> None:
        hiding = {block.parent for block in self.blocks if block.is_idle}
        offered = {item for item in self._idle() if item.ticket}
        assert offered == {item for item in self._idle() if item not in hiding}
        assert len({item.ticket for item in offered}) == len(offered)

    def teardown(self) -> None:
        """Checks that every cached page can be evicted."""
        if not hasattr(self, "pool"):
            return
        for name in NAMES:
            self.tenants.set_share(name, TenantShare())
        room = self.pool.num_free + self.pool.num_cached
        assert self._make_room(room, self.tenants.find("a"), ignore_pins=True)
        assert (self.pool.num_free, self.pool.num_cached) == (room, 0)


TestPoolOfTenants = PoolOfTenants.TestCase


class FakeItem:
    """An idle item of any size."""

    def __init__(self, name: str, pages: list[int], tenant: TenantAccount) -> None:
        self.name = name
        self.pages = pages
        self.tenant = tenant
        self.rank = self.ticket = 0
        self.is_pinned = False

    def __repr__(self) -> str:
        return self.name


class Setup:
    """A pool of 100 pages with idle items of any size. `evicted` lists the evicted items in order."""

    def __init__(self) -> None:
        self.pool = PagePool(100)
        self.tenants = TenantAccounts(100)
        self.evictor = Evictor(self.pool, self.tenants)
        self.evicted: list[str] = []
        self.requesters: list[TenantAccount] = []

    def add_item(
        self, name: str, num_pages: int, tenant: str = "owner", *, is_pinned: bool = False
    ) -> FakeItem:
        owner = self.tenants.find(tenant)
        item = FakeItem(name, self.pool.allocate(num_pages, owner), owner)
        item.is_pinned = is_pinned
        self.pool.cache(item.pages)
        self.add(item)
        return item

    def add(self, item: FakeItem) -> None:
        item.rank = self.evictor.next_rank()
        self.evictor.add(item, partial(self._evict, item))

    def make_room(
        self, num_free: int, tenant: str = "requester", protected: Collection[Evictable] = (), **options: bool
    ) -> bool:
        return self.evictor.make_room(num_free, self.tenants.find(tenant), protected, **options)

    def _evict(self, item: FakeItem, requester: TenantAccount) -> None:
        self.pool.evict(item.pages)
        self.evicted.append(item.name)
        self.requesters.append(requester)


def test_the_item_that_became_idle_first_is_evicted_first() -> None:
    setup = Setup()
    first, _, _ = setup.add_item("x", 10), setup.add_item("y", 20), setup.add_item("z", 30)
    setup.evictor.remove(first)
    setup.add(first)
    assert setup.make_room(70)
    assert setup.evicted == ["y", "z"]
    assert setup.requesters == [setup.tenants.find("requester")] * 2


def test_other_tenants_may_evict_a_tenants_items_only_above_its_floor() -> None:
    setup = Setup()
    setup.tenants.set_share("owner", TenantShare(min_share=0.25))
    for number in range(4):
        setup.add_item(f"{number}", 10)
    assert not setup.make_room(76), "15 of 40 pages are above the floor"
    assert setup.evicted == []
    assert setup.make_room(75)
    assert setup.evicted == ["0", "1"], "the second one cut into the floor: 20 pages are left"
    assert not setup.make_room(81)
    assert setup.make_room(100, tenant="owner"), "its own pages are its own to give up"


def test_a_large_protected_item_does_not_prevent_evicting_small_ones() -> None:
    setup = Setup()
    setup.tenants.set_share("owner", TenantShare(min_share=0.2))
    protected = setup.add_item("large", 12)
    for number in range(14):
        setup.add_item(f"{number}", 1)
    assert not setup.make_room(81, protected=[protected])
    assert setup.make_room(80, protected=[protected])
    assert setup.evicted == ["0", "1", "2", "3", "4", "5"]


def test_a_tenant_at_its_ceiling_evicts_its_own_items_before_longer_idle_ones() -> None:
    setup = Setup()
    setup.add_item("other's", 10, tenant="other")
    setup.tenants.set_share("owner", TenantShare(max_share=0.2))
    setup.add_item("own 1", 10)
    setup.add_item("own 2", 10)
    assert setup.make_room(5, tenant="owner")
    assert setup.evicted == ["own 1"]
    assert not setup.make_room(21, tenant="owner"), "it may never hold more than 20"
    assert setup.evicted == ["own 1"], "nor does it pay for what it can't have"


def test_a_tenant_below_its_ceiling_evicts_the_longest_idle_item() -> None:
    setup = Setup()
    setup.add_item("other's", 60, tenant="other")
    setup.tenants.set_share("owner", TenantShare(max_share=0.6))
    setup.add_item("own", 20)
    assert setup.make_room(30, tenant="owner")
    assert setup.evicted == ["other's"]


def test_pinned_items_are_evicted_last_and_only_if_pins_are_ignored() -> None:
    setup = Setup()
    pinned = setup.add_item("pinned", 10, is_pinned=True)
    setup.add_item("other", 20)
    assert not setup.make_room(91) and setup.evicted == []
    assert setup.make_room(90, protected=[pinned]) and setup.evicted == ["other"], (
        "protected and pinned, it is counted once"
    )
    setup.add_item("newer", 20)
    assert setup.make_room(91, ignore_pins=True)
    assert setup.evicted == ["other", "newer", "pinned"]


def test_a_tenant_at_its_ceiling_evicts_its_own_pins_last() -> None:
    setup = Setup()
    setup.tenants.set_share("owner", TenantShare(max_share=0.3))
    setup.add_item("pinned", 10, is_pinned=True)
    setup.add_item("theirs", 10, tenant="other", is_pinned=True)
    setup.add_item("own", 10)
    assert setup.make_room(20, tenant="owner") and setup.evicted == ["own"]
    assert setup.make_room(21, tenant="owner") and setup.evicted == ["own", "pinned"]
    assert not setup.make_room(31, tenant="owner")


def test_evictable_pages_include_only_the_pins_that_a_tenant_at_its_ceiling_loses() -> None:
    setup = Setup()
    owner, requester = setup.tenants.find("owner"), setup.tenants.find("requester")
    setup.tenants.set_share("owner", TenantShare(max_share=0.3))
    setup.add_item("pinned", 20, is_pinned=True)
    setup.add_item("other", 10, tenant="other")
    evictor = setup.evictor
    assert [evictor.num_evictable(count, requester, ignore_pins=False) for count in (10, 99)] == [10, 10]
    assert [evictor.num_evictable(count, owner, ignore_pins=False) for count in (10, 15, 99)] == [10, 15, 30]
    assert evictor.num_evictable(10, requester, ignore_pins=True) == 30


def test_removed_candidates_do_not_accumulate() -> None:
    setup = Setup()
    items = [setup.add_item(f"{number}", 1) for number in range(50)]
    for _ in range(100):
        for item in items:
            setup.evictor.remove(item)
            setup.add(item)
    setup.evictor.check_invariants()
    assert setup.make_room(100)
    assert setup.evicted == [item.name for item in items]
