"""Unified paging (S-LoRA): the KV of running sequences, cached prefixes and adapters share one page pool.

Only page numbers are managed here; the bytes are in `DeviceMemory`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from slora.core.engine_config import SchedulerConfig
from slora.core.engine_state import PageCounts
from slora.memory.evictor import Evictor
from slora.memory.kv_cache import KVCache
from slora.memory.page_pool import PagePool
from slora.memory.residency import Residency
from slora.memory.tenant_account import TenantAccount, TenantAccounts


class UnifiedPaging:
    """Wires together the page pool, the evictor, the tenants' accounts, the KV cache and the residency.

    footprint: the KV pages that a sequence needs.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.footprint = config.footprint
        self.tenants = TenantAccounts(config.num_pages)
        self.pool = PagePool(config.num_pages)
        self.evictor = Evictor(self.pool, self.tenants)
        self.residency = Residency(self.pool, self.evictor, self.tenants, config.num_slots)
        self.kv = KVCache(
            self.pool,
            self.evictor,
            enabled=config.prefix_cache != "off",
            public_owner=TenantAccount("") if config.prefix_cache == "public" else None,
        )

    def could_free(self, num_pages: int, tenant: TenantAccount, *, ignore_pins: bool = False) -> bool:
        """Returns False if `tenant` could not get `num_pages` even by evicting all evictable items.

        This is a quick check before anything is acquired or evicted. True does not guarantee the pages.

        ignore_pins: whether pinned adapters count as evictable.
        """
        return num_pages <= self.pool.num_free + self.evictor.num_evictable(
            num_pages, tenant, ignore_pins=ignore_pins
        )

    def count_pages(self) -> PageCounts:
        """Counts the pages of the whole pool that are not free."""
        used = sum(len(resident.pages) for resident in self.residency if resident.num_users)
        idle = sum(len(resident.pages) for resident in self.residency if not resident.num_users)
        return PageCounts(self.pool.num_held - used, self.pool.num_cached - idle, used, idle)

    def count_tenant_pages(self, most: int, also: Collection[str] = ()) -> dict[str, PageCounts]:
        """Counts the pages of the `most` tenants that own the most pages, in descending order of pages.

        Tenants without pages are left out.
        also: further tenants that are included, however few pages they own.

        With a public prefix cache, cached prefixes of the base model belong to no tenant, even while sequences use
        them again.
        """
        owned: defaultdict[str, int] = defaultdict(int)
        for account in self.tenants:
            if account.num_pages:
                owned[account.name] += account.num_pages
        largest = sorted(owned, key=lambda name: (-owned[name], name))
        # Pages are counted by content only for these tenants, because there may be thousands.
        tenants = {name: PageCounts() for at, name in enumerate(largest) if at < most or name in also}
        for account in self.tenants:
            if account.num_pages and account.name in tenants:
                held = account.num_pages - account.num_cached
                tenants[account.name] += PageCounts(kv=held, prefixes=account.num_cached)
        for resident in self.residency:
            name, num_pages = resident.tenant.name, len(resident.pages)
            if name in tenants and resident.num_users:
                tenants[name] += PageCounts(kv=-num_pages, adapters=num_pages)
            elif name in tenants:
                tenants[name] += PageCounts(prefixes=-num_pages, idle_adapters=num_pages)
        return tenants

    def check_invariants(self, kv_pages: Iterable[int]) -> None:
        """Asserts that no page is lost and that every reference has an owner.

        kv_pages: every reference of a running sequence; a page with two references appears twice.
        """
        held_kv, held = list(kv_pages), list(self.residency.held_pages())
        prefixes, idle = list(self.kv.cached_pages()), list(self.residency.cached_pages())
        self.pool.check_invariants([*held_kv, *held], [*idle, *prefixes])
        self.kv.check_invariants()
        counts = PageCounts(len(set(held_kv)), len(prefixes), len(held), len(idle))
        assert self.count_pages() == counts, f"{self.count_pages()} differ from {counts}"
        owned = sum(self.count_tenant_pages(len(list(self.tenants))).values(), PageCounts())
        public = self.kv.public_owner
        if public is not None:
            owned += PageCounts(kv=public.num_pages - public.num_cached, prefixes=public.num_cached)
        assert owned == counts, f"the pages of the tenants are {owned}, not {counts}"
