"""Which adapters are in the pool: their pages, their slot in the kernels' tables, and who uses them.

An adapter with users is held, and its load is the first of them; without users it stays as a cached guest, offered to
the evictor, until its pages or its slot are wanted. A slot has a generation that grows each time another adapter moves
in, so that work planned for a former tenant of the slot can be told from work for the present one.

            advance_load, to the end        last release
    loading ------------------> in use ------------------> idle --- evicted, for pages or a slot ---> gone
       |                          ^                          |
       | abandon_load             +-------- acquire ---------+
       v
    gone, with its last user

Knows no torch and no bytes; the runner writes pages and tables when the plan says so.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from functools import partial

from slora.cost_model import Costs
from slora.pool.eviction_policy import Content
from slora.pool.evictor import Evictor
from slora.pool.page_pool import PagePool
from slora.pool.tenant import Tenant, Tenants
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraReach

# Adapters that were pushed out and did not come back are remembered so far; the oldest are forgiven.
_MAX_PUSHED_OUT = 4096


class Resident:
    """One adapter in the pool. `(slot, generation)` is what the kernels' work is planned for.

    num_bytes: of the adapter; its last page may have room left. fetch_s: what it should take to bring it to the host
    again. num_loaded: pages whose bytes are there, the first ones. is_loading: until the last page is there, or the
    load is given up; only what is_loaded may be computed with.
    is_pinned: it is to stay as long as anything else can leave. rank: the evictor's, while it is idle.
    """

    content = Content.ADAPTER

    __slots__ = (
        "fetch_s",
        "forgotten",
        "generation",
        "is_loaded",
        "is_loading",
        "is_pinned",
        "num_bytes",
        "num_loaded",
        "num_users",
        "pages",
        "rank",
        "reach",
        "slot",
        "tenant",
        "ticket",
        "version",
    )

    def __init__(
        self,
        version: AdapterVersion,
        tenant: Tenant,
        slot: int,
        generation: int,
        pages: list[int],
        num_bytes: int,
        reach: LoraReach,
        fetch_s: float = 0.0,
    ) -> None:
        self.version = version
        self.tenant = tenant
        self.slot = slot
        self.generation = generation
        self.pages = pages
        self.num_bytes = num_bytes
        self.reach = reach
        self.fetch_s = fetch_s
        self.num_users = 1  # the load
        self.num_loaded = 0
        self.is_loading = True
        self.is_loaded = False
        self.forgotten = False
        self.is_pinned = False
        self.ticket = 0
        self.rank = 0.0

    def __repr__(self) -> str:
        return f"Resident({self.version}, slot {self.slot}, {len(self.pages)} pages, {self.num_users} users)"

    def reload_s(self, costs: Costs) -> float:
        """From where fetches came lately: far away, or the host, which takes next to no time."""
        return self.fetch_s + costs.load_s(self.num_bytes)


class Residency:
    """The adapters in `pool`, at most `num_slots` of them. Idle ones leave when `evictor` says so, or for a slot.

    num_pinned, num_pinned_pages: of adapters that are pinned, idle or not.
    """

    def __init__(self, pool: PagePool, evictor: Evictor, tenants: Tenants, num_slots: int) -> None:
        self.num_evictions = 0
        self.num_pinned = self.num_pinned_pages = 0
        self._pool = pool
        self._evictor = evictor
        self._tenants = tenants
        self._residents: dict[AdapterVersion, Resident] = {}
        self._idle: dict[AdapterVersion, Resident] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots
        self._pushed_out: OrderedDict[AdapterVersion, None] = OrderedDict()

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    def __len__(self) -> int:
        return len(self._residents)

    def find(self, version: AdapterVersion) -> Resident | None:
        return self._residents.get(version)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def can_make_room(self, spare: Collection[Resident] = ()) -> bool:
        """Whether a slot is free, or can be. Idle adapters that leave for their pages meanwhile change nothing."""
        return bool(self._free_slots) or any(resident not in spare for resident in self._idle.values())

    def make_room(self, taker: Tenant, spare: Collection[Resident] = ()) -> bool:
        """Until a slot is free: the idle adapter of the lowest rank leaves, never one of `spare`. False if none can.

        It spares pins, and those that a tenant's floor protects, while there are others. Not beyond that: no share
        speaks of slots, and whoever waits for one must not wait for a tenant that never comes again.
        """
        if self._free_slots:
            return True
        idle = [resident for resident in self._idle.values() if resident not in spare]
        if not idle:
            return False
        idle = [resident for resident in idle if not resident.is_pinned] or idle
        open_to_all = [resident for resident in idle if _may_take(taker, resident)]
        lowest = min(open_to_all or idle, key=lambda resident: resident.rank)
        self._evictor.give_up(lowest)
        self._evict(lowest, taker)
        return True

    def admit(
        self,
        version: AdapterVersion,
        tenant: Tenant,
        num_pages: int,
        num_bytes: int,
        reach: LoraReach,
        fetch_s: float = 0.0,
    ) -> Resident:
        """Gives the adapter a slot and pages, held by its load. The caller has made room and fills them."""
        assert version not in self._residents, f"{version} is already resident"
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        pages = self._pool.allocate(num_pages, tenant)
        resident = Resident(version, tenant, slot, self._generations[slot], pages, num_bytes, reach, fetch_s)
        self._residents[version] = resident
        return resident

    def advance_load(self, resident: Resident, num_pages: int) -> None:
        """That many more of its pages are there. With the last one it is loaded, and the load a user no more."""
        assert resident.is_loading, f"{resident.version} is not being loaded"
        resident.num_loaded += num_pages
        assert resident.num_loaded <= len(resident.pages), (
            f"{resident.version}: more pages loaded than it has"
        )
        if resident.num_loaded == len(resident.pages):
            resident.is_loaded = True
            self._pushed_out.pop(resident.version, None)
            self._end_load(resident)

    def abandon_load(self, resident: Resident) -> None:
        """The load broke, or nobody wants it any more: the adapter leaves now, or with its last user."""
        assert resident.is_loading, f"{resident.version} is not being loaded"
        resident.forgotten = True
        self._end_load(resident)

    def acquire(self, resident: Resident) -> None:
        if resident.num_users == 0:
            del self._idle[resident.version]
            self._evictor.reuse(resident)
            self._pool.unpark(resident.pages)
        resident.num_users += 1

    def release(self, resident: Resident) -> None:
        assert resident.num_users > 0, f"{resident.version} has no user to release"
        resident.num_users -= 1
        if resident.num_users:
            return
        self._pool.park(resident.pages)
        self._idle[resident.version] = resident
        if resident.forgotten:
            self._evict(resident, None)
        else:
            resident.rank = self._evictor.rank(resident)
            self._offer(resident)

    def pin(self, resident: Resident) -> None:
        assert not resident.is_pinned, f"{resident.version} is pinned already"
        self._set_pinned(resident, is_pinned=True)

    def unpin(self, resident: Resident) -> None:
        assert resident.is_pinned, f"{resident.version} is not pinned"
        self._set_pinned(resident, is_pinned=False)

    def forget(self, version: AdapterVersion) -> None:
        """The adapter was deleted: it leaves now, or with its last user."""
        self._pushed_out.pop(version, None)
        resident = self._residents.get(version)
        if resident is None:
            return
        resident.forgotten = True
        if resident.num_users == 0:
            self._evict(resident, None)

    def was_pushed_out(self, version: AdapterVersion) -> bool:
        """Whether it left last time because another tenant took its pages or its slot while it had more than its
        share: then loading it again is not this tenant's doing. Told until it is loaded again.
        """
        return version in self._pushed_out

    def held_pages(self) -> Iterator[int]:
        return (page for r in self._residents.values() if r.num_users for page in r.pages)

    def cached_pages(self) -> Iterator[int]:
        return (page for r in self._idle.values() for page in r.pages)

    def _set_pinned(self, resident: Resident, *, is_pinned: bool) -> None:
        is_offered = resident.ticket != 0
        self._evictor.withdraw(resident)
        resident.is_pinned = is_pinned
        self.num_pinned += 1 if is_pinned else -1
        self.num_pinned_pages += len(resident.pages) if is_pinned else -len(resident.pages)
        if is_offered:
            self._offer(resident)

    def _offer(self, resident: Resident) -> None:
        self._evictor.offer(resident, partial(self._evict, resident), resident.rank)

    def _end_load(self, resident: Resident) -> None:
        resident.is_loading = False
        self.release(resident)

    def _evict(self, resident: Resident, taker: Tenant | None) -> None:
        """taker: who wants its pages or its slot; None if it leaves of itself."""
        # Asked while the owner has the pages still: a tenant without any does not count in the shares.
        if taker is not None and taker is not resident.tenant and self._tenants.is_over_share(taker):
            self._remember_pushed_out(resident.version)
        self._evictor.withdraw(resident)
        if resident.is_pinned:
            self._set_pinned(resident, is_pinned=False)
        del self._idle[resident.version]
        del self._residents[resident.version]
        self._pool.evict(resident.pages)
        self._free_slots.append(resident.slot)
        self.num_evictions += 1

    def _remember_pushed_out(self, version: AdapterVersion) -> None:
        self._pushed_out[version] = None
        if len(self._pushed_out) > _MAX_PUSHED_OUT:
            self._pushed_out.popitem(last=False)


def _may_take(taker: Tenant, resident: Resident) -> bool:
    owner = resident.tenant
    return owner is taker or owner.is_above_floor
