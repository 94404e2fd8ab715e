"""Residency: which adapters are in the pool, their pages, their slots in the kernels' tables, and their users.

An adapter with users is held; its load is its first user. An adapter without users is cached: it stays in the pool
until it is evicted because its pages or its slot are needed. The generation of a slot grows each time the slot gets
another adapter. It distinguishes work that was planned for a previous adapter of the slot from work for the current
one.

            advance_load, to the end        last release
    loading ------------------> in use ------------------> idle --- evicted, for pages or a slot ---> gone
       |                          ^                          |
       | abandon_load             +-------- acquire ---------+
       v
    gone, after the last release

This module does not depend on torch or on bytes. The runner writes pages and tables as the step plan says.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

from slora.memory.evictor import Evictor
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount, TenantAccounts
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraTargets

# Maximum number of adapters that `was_displaced` remembers. The oldest are dropped.
_MAX_DISPLACED = 4096


@dataclass(slots=True, eq=False, repr=False)
class Resident:
    """One adapter in the pool. Kernel work is planned for its `(slot, generation)`."""

    version: AdapterVersion
    tenant: TenantAccount
    slot: int
    generation: int
    pages: list[int]
    num_bytes: int  # Its last page may not be full.
    targets: LoraTargets
    num_users: int = 1  # The load is its first user.
    num_loaded: int = 0  # Number of leading pages whose bytes are loaded.
    is_loading: bool = True  # Until the last page is loaded or the load is abandoned.
    is_loaded: bool = False  # Whether steps may compute with the adapter.
    evict_on_release: bool = False  # The last release evicts it: it was deleted, or its load was abandoned.
    is_pinned: bool = False  # It is evicted only as a last resort.
    ticket: int = 0
    rank: int = 0  # The eviction rank while it is idle.
    # The page-seconds that the adapter has held until the time `read_at`. At each moment they are divided by the number
    # of sequences that run on the adapter.
    reading: float = 0.0
    read_at: float = 0.0

    def __repr__(self) -> str:
        return f"Resident({self.version}, slot {self.slot}, {len(self.pages)} pages, {self.num_users} users)"


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A slice of an adapter: `packed` is copied into pages [first_page, first_page + num_pages) of the resident.

    The copy runs before the step computes. The last slice also writes the tables of the adapter's slot.
    """

    resident: Resident
    packed: PackedAdapter
    first_page: int
    num_pages: int

    @property
    def is_last(self) -> bool:
        return self.first_page + self.num_pages == len(self.resident.pages)


class Residency:
    """The adapters in `pool`, at most `num_slots`.

    `evictor` evicts idle adapters to free pages. `ensure_free_slot` evicts them to free a slot.

    evictions: number of evictions by cause: `pages`, `slot` or `removed` (deleted, or its load was abandoned).
    num_pinned: number of pinned adapters, idle or in use. num_pinned_pages: number of their pages.
    """

    def __init__(self, pool: PagePool, evictor: Evictor, tenants: TenantAccounts, num_slots: int) -> None:
        self.evictions = Counter(pages=0, slot=0, removed=0)
        self.num_pinned = self.num_pinned_pages = 0
        self._pool = pool
        self._evictor = evictor
        self._tenants = tenants
        self._residents: dict[AdapterVersion, Resident] = {}
        self._idle: dict[AdapterVersion, Resident] = {}  # the adapter that has been idle longest is first
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots
        self._displaced: OrderedDict[AdapterVersion, None] = OrderedDict()

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def num_evictions(self) -> int:
        return self.evictions.total()

    def find(self, version: AdapterVersion) -> Resident | None:
        return self._residents.get(version)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def can_free_slots(self, count: int, protected: Collection[Resident] = ()) -> bool:
        """Whether `count` slots are free or can be freed.

        The answer stays valid if an idle adapter is evicted for its pages, because that also frees its slot.
        """
        missing = count - len(self._free_slots)
        if missing <= 0:
            return True
        return sum(resident not in protected for resident in self._idle.values()) >= missing

    def ensure_free_slot(self, requester: TenantAccount, protected: Collection[Resident] = ()) -> bool:
        """Frees a slot if none is free, by evicting the adapter that has been idle longest.

        Never evicts `protected`. Returns False if no slot can be freed.

        Pinned adapters, and adapters of other tenants at or below their floor, are evicted only if there is no other
        idle adapter. They have no stronger protection: floors count pages and not slots, and a request must not wait
        for the slot of a tenant that may never send a request again.
        """
        if self._free_slots:
            return True
        idle = [resident for resident in self._idle.values() if resident not in protected]
        if not idle:
            return False
        idle = [resident for resident in idle if not resident.is_pinned] or idle
        open_to_all = [resident for resident in idle if _may_evict(requester, resident)]
        self._evict((open_to_all or idle)[0], requester, "slot")
        return True

    def allocate(
        self,
        version: AdapterVersion,
        tenant: TenantAccount,
        num_pages: int,
        num_bytes: int,
        targets: LoraTargets,
    ) -> Resident:
        """Allocates a slot and pages to the adapter, whose load is its first user.

        The caller has made room and fills the pages.
        """
        assert version not in self._residents, f"{version} is already resident"
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        pages = self._pool.allocate(num_pages, tenant)
        resident = Resident(version, tenant, slot, self._generations[slot], pages, num_bytes, targets)
        self._residents[version] = resident
        return resident

    def advance_load(self, resident: Resident, num_pages: int) -> None:
        """Counts `num_pages` more loaded pages.

        After the last page the adapter counts as loaded, and the reference that the load held on it (in `num_users`) is
        released.
        """
        assert resident.is_loading, f"{resident.version} is not being loaded"
        resident.num_loaded += num_pages
        assert resident.num_loaded <= len(resident.pages), (
            f"{resident.version}: more pages were loaded than the adapter has"
        )
        if resident.num_loaded == len(resident.pages):
            resident.is_loaded = True
            self._displaced.pop(resident.version, None)
            self._end_load(resident)

    def abandon_load(self, resident: Resident) -> None:
        """Ends a load that failed or is no longer needed.

        The adapter is evicted now, or when its last user releases it.
        """
        assert resident.is_loading, f"{resident.version} is not being loaded"
        resident.evict_on_release = True
        self._end_load(resident)

    def read(self, resident: Resident) -> float:
        """Returns `Resident.reading` as of now. Each sequence that runs on the adapter is charged the difference
        between the readings at its end and at its start.

        Page-seconds of a load that no sequence waits for are charged to no request.
        """
        num_sequences = resident.num_users - resident.is_loading
        if num_sequences:
            resident.reading += (self._pool.now - resident.read_at) * len(resident.pages) / num_sequences
        resident.read_at = self._pool.now
        return resident.reading

    def acquire(self, resident: Resident) -> None:
        self.read(resident)
        if resident.num_users == 0:
            del self._idle[resident.version]
            self._evictor.remove(resident)
            self._pool.acquire(resident.pages)
        resident.num_users += 1

    def release(self, resident: Resident) -> None:
        assert resident.num_users > 0, f"{resident.version} has no user to release"
        self.read(resident)
        resident.num_users -= 1
        if resident.num_users:
            return
        self._pool.cache(resident.pages)
        self._idle[resident.version] = resident
        if resident.evict_on_release:
            self._evict(resident, None)
        else:
            resident.rank = self._evictor.next_rank()
            self._add_candidate(resident)

    def pin(self, resident: Resident) -> None:
        assert not resident.is_pinned, f"{resident.version} is already pinned"
        self._set_pinned(resident, is_pinned=True)

    def unpin(self, resident: Resident) -> None:
        assert resident.is_pinned, f"{resident.version} is not pinned"
        self._set_pinned(resident, is_pinned=False)

    def remove(self, version: AdapterVersion) -> None:
        """Removes a deleted adapter: it is evicted now, or when its last user releases it."""
        self._displaced.pop(version, None)
        resident = self._residents.get(version)
        if resident is None:
            return
        resident.evict_on_release = True
        if resident.num_users == 0:
            self._evict(resident, None)

    def was_displaced(self, version: AdapterVersion) -> bool:
        """Whether the adapter was last evicted for another tenant, which owned more pages than its share at that time.

        If so, the adapter's own tenant did not cause the reload. The answer is kept until the adapter is loaded again.
        """
        return version in self._displaced

    def held_pages(self) -> Iterator[int]:
        return (page for r in self._residents.values() if r.num_users for page in r.pages)

    def cached_pages(self) -> Iterator[int]:
        return (page for r in self._idle.values() for page in r.pages)

    def _set_pinned(self, resident: Resident, *, is_pinned: bool) -> None:
        is_candidate = resident.ticket != 0
        self._evictor.remove(resident)
        resident.is_pinned = is_pinned
        self.num_pinned += 1 if is_pinned else -1
        self.num_pinned_pages += len(resident.pages) if is_pinned else -len(resident.pages)
        if is_candidate:
            self._add_candidate(resident)

    def _add_candidate(self, resident: Resident) -> None:
        self._evictor.add(resident, partial(self._evict, resident))

    def _end_load(self, resident: Resident) -> None:
        self.read(resident)
        resident.is_loading = False
        self.release(resident)

    def _evict(self, resident: Resident, requester: TenantAccount | None, cause: str = "pages") -> None:
        """Evicts an idle adapter.

        requester: tenant that needs the pages or the slot; None if the adapter was deleted or its load was abandoned.
        """
        # Check this before the pages are freed: a tenant without pages may no longer count in the shares.
        if (
            requester is not None
            and requester is not resident.tenant
            and self._tenants.is_over_share(requester)
        ):
            self._record_displaced(resident.version)
        self._evictor.remove(resident)
        if resident.is_pinned:
            self._set_pinned(resident, is_pinned=False)
        del self._idle[resident.version]
        del self._residents[resident.version]
        self._pool.evict(resident.pages)
        self._free_slots.append(resident.slot)
        self.evictions[cause if requester is not None else "removed"] += 1

    def _record_displaced(self, version: AdapterVersion) -> None:
        self._displaced[version] = None
        if len(self._displaced) > _MAX_DISPLACED:
            self._displaced.popitem(last=False)


def _may_evict(requester: TenantAccount, resident: Resident) -> bool:
    owner = resident.tenant
    return owner is requester or owner.is_above_floor
