from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.page_pool import PagePool
from slora.residency import Residency, Resident
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraReach

REACH = LoraReach(8, embedding=False, head=False)
VERSIONS = [AdapterVersion("tenant", f"digest{n}") for n in range(6)]
versions = st.sampled_from(VERSIONS)


class ResidencyMachine(RuleBasedStateMachine):
    """Adapters come, are used, fall idle and leave, beside sequences that take pages of the same pool."""

    @initialize(num_pages=st.integers(2, 12), num_slots=st.integers(1, 4))
    def start(self, num_pages: int, num_slots: int) -> None:
        self.pool = PagePool(num_pages)
        self.residency = Residency(self.pool, num_slots)
        self.num_slots = num_slots
        self.kv_pages: list[int] = []
        self.users: dict[AdapterVersion, int] = {}
        self.idle: list[AdapterVersion] = []  # least recently used first
        self.deleted: set[AdapterVersion] = set()
        self.tenancies: set[tuple[int, int]] = set()

    @rule(
        wanted=st.integers(0, 12),
        slots=st.integers(0, 1),
        spare=st.none() | versions,
    )
    def make_room(self, wanted: int, slots: int, spare: AdapterVersion | None) -> None:
        self._make_room(wanted, slots, spare)

    def _make_room(self, wanted: int, slots: int, spare: AdapterVersion | None) -> bool:
        before = len(self.residency)
        if not self.residency.make_room(wanted, slots=slots, spare=spare):
            assert len(self.residency) == before, "something was evicted in vain"
            return False
        assert self.pool.num_free >= wanted
        assert self.num_slots - len(self.residency) >= slots
        left = [version for version in self.idle if self.residency.find(version)]
        gone = [version for version in self.idle if version not in left]
        assert spare not in gone
        assert gone == [version for version in self.idle if version != spare][: len(gone)], "not the oldest"
        self.idle = left
        return True

    @rule(version=versions, num_pages=st.integers(1, 4))
    def admit(self, version: AdapterVersion, num_pages: int) -> None:
        if self.residency.find(version) or not self._make_room(num_pages, 1, None):
            return
        resident = self.residency.admit(version, num_pages, REACH)
        assert len(resident.pages) == num_pages
        assert (resident.slot, resident.generation) not in self.tenancies, "a generation came twice"
        self.tenancies.add((resident.slot, resident.generation))
        self.users[version] = 1
        self.deleted.discard(version)

    def _resident(self, version: AdapterVersion) -> Resident:
        resident = self.residency.find(version)
        assert resident is not None
        return resident

    @precondition(lambda self: self.idle or any(self.users.values()))
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from([*self.idle, *self.users]))
        self.residency.acquire(self._resident(version))
        self.users[version] = self.users.get(version, 0) + 1
        self.idle = [one for one in self.idle if one != version]

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(list(self.users)))
        self.residency.release(self._resident(version))
        self.users[version] -= 1
        if not self.users[version]:
            del self.users[version]
            if version not in self.deleted:
                self.idle.append(version)

    @rule(version=versions)
    def forget(self, version: AdapterVersion) -> None:
        self.residency.forget(version)
        if version in self.users:
            self.deleted.add(version)
        self.idle = [one for one in self.idle if one != version]

    @rule(count=st.integers(1, 4))
    def a_sequence_takes_pages(self, count: int) -> None:
        if self._make_room(count, 0, None):
            self.kv_pages += self.pool.allocate(count)

    @rule()
    def sequences_give_their_pages_back(self) -> None:
        self.pool.release(self.kv_pages)
        self.kv_pages = []

    @invariant()
    def pages_and_slots_add_up(self) -> None:
        residents = list(self.residency)
        self.pool.check([*self.kv_pages, *self.residency.held_pages()], self.residency.cached_pages())
        assert {resident.version for resident in residents} == {*self.idle, *self.users}
        assert all(resident.num_users == self.users.get(resident.version, 0) for resident in residents)
        assert len({resident.slot for resident in residents}) == len(residents) <= self.num_slots


TestResidency = ResidencyMachine.TestCase
