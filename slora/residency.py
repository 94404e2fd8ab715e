"""Which adapters are in the pool: their pages, their slot in the kernels' tables, and who uses them.

An adapter with users is held; without users it stays as a cached guest until its pages are wanted. A slot has a
generation that grows each time another adapter moves in, so that work planned for a former tenant of the slot can
be told from work for the present one.

Knows no torch and no bytes; the runner writes pages and tables when the plan says so.
"""

from collections import OrderedDict
from collections.abc import Iterator

from slora.page_pool import PagePool
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraReach


class Resident:
    """One adapter in the pool. `(slot, generation)` is what the kernels' work is planned for."""

    __slots__ = ("forgotten", "generation", "num_users", "pages", "reach", "slot", "version")

    def __init__(
        self, version: AdapterVersion, slot: int, generation: int, pages: list[int], reach: LoraReach
    ) -> None:
        self.version = version
        self.slot = slot
        self.generation = generation
        self.pages = pages
        self.reach = reach
        self.num_users = 0
        self.forgotten = False


class Residency:
    """The adapters in `pool`, at most `num_slots` of them. Idle ones leave in least-recently-used order."""

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self.num_evictions = 0
        self._pool = pool
        self._residents: dict[AdapterVersion, Resident] = {}
        self._idle: OrderedDict[AdapterVersion, Resident] = OrderedDict()
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    def __len__(self) -> int:
        return len(self._residents)

    def find(self, version: AdapterVersion) -> Resident | None:
        return self._residents.get(version)

    def make_room(self, num_pages: int, *, slots: int = 0, spare: AdapterVersion | None = None) -> bool:
        """Evicts idle adapters, never `spare`, until that many pages and slots are free. False if it can't be done.

        Nothing is evicted in vain: it looks first whether enough is idle.
        """
        idle_pages = sum(len(r.pages) for v, r in self._idle.items() if v != spare)
        idle_slots = len(self._idle) - (spare in self._idle)
        if self._pool.num_free + idle_pages < num_pages or len(self._free_slots) + idle_slots < slots:
            return False
        while self._pool.num_free < num_pages or len(self._free_slots) < slots:
            self._evict(next(r for v, r in self._idle.items() if v != spare))
        return True

    def admit(self, version: AdapterVersion, num_pages: int, reach: LoraReach) -> Resident:
        """Gives the adapter a slot and pages, held for its first user. The caller has made room and fills them."""
        assert version not in self._residents, f"{version} is already resident"
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        pages = self._pool.allocate(num_pages)
        resident = Resident(version, slot, self._generations[slot], pages, reach)
        resident.num_users = 1
        self._residents[version] = resident
        return resident

    def acquire(self, resident: Resident) -> None:
        if resident.num_users == 0:
            del self._idle[resident.version]
            self._pool.unpark(resident.pages)
        resident.num_users += 1

    def release(self, resident: Resident) -> None:
        assert resident.num_users > 0, f"{resident.version} has no user to release"
        resident.num_users -= 1
        if resident.num_users == 0:
            self._pool.park(resident.pages)
            self._idle[resident.version] = resident
            if resident.forgotten:
                self._evict(resident)

    def forget(self, version: AdapterVersion) -> None:
        """The adapter was deleted: it leaves now, or with its last user."""
        resident = self._residents.get(version)
        if resident is None:
            return
        resident.forgotten = True
        if resident.num_users == 0:
            self._evict(resident)

    def held_pages(self) -> Iterator[int]:
        return (page for r in self._residents.values() if r.num_users for page in r.pages)

    def cached_pages(self) -> Iterator[int]:
        return (page for r in self._idle.values() for page in r.pages)

    def _evict(self, resident: Resident) -> None:
        del self._idle[resident.version]
        del self._residents[resident.version]
        self._pool.evict(resident.pages)
        self._free_slots.append(resident.slot)
        self.num_evictions += 1
