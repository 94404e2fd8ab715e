"""Unified paging (S-LoRA): the KV of running sequences, cached prefixes and adapters share one page pool.

Only page numbers are managed here; the bytes are in `DeviceMemory`.
"""

from collections.abc import Iterable

from slora.cost_model import Costs
from slora.pool.eviction_policy import make_policy
from slora.pool.evictor import Evictor
from slora.pool.kv_cache import KVCache
from slora.pool.page_pool import PagePool
from slora.pool.residency import Residency
from slora.pool.tenant_account import TenantAccount, TenantAccounts
from slora.scheduler_config import SchedulerConfig


class UnifiedPaging:
    """Wires together the page pool, the evictor, the tenants' accounts, the KV cache and the residency.

    footprint: the KV pages that a sequence needs.
    """

    def __init__(self, config: SchedulerConfig, costs: Costs) -> None:
        self.footprint = config.footprint
        self.tenants = TenantAccounts(config.num_pages)
        self.pool = PagePool(config.num_pages)
        self.evictor = Evictor(self.pool, self.tenants, make_policy(config.eviction, costs))
        self.residency = Residency(self.pool, self.evictor, self.tenants, config.num_slots)
        self.kv = KVCache(
            self.pool,
            self.evictor,
            config.footprint.block_tokens,
            enabled=config.prefix_cache != "off",
            public_owner=TenantAccount("") if config.prefix_cache == "public" else None,
        )

    def could_free(self, num_pages: int, tenant: TenantAccount, *, ignore_pins: bool = False) -> bool:
        """Returns False if even evicting everything evictable would not give `tenant` this many pages.

        A quick check before anything is acquired or evicted. True does not guarantee the pages.

        ignore_pins: pinned adapters may be evicted, too.
        """
        return num_pages <= self.pool.num_free + self.evictor.num_evictable(
            num_pages, tenant, ignore_pins=ignore_pins
        )

    def check_invariants(self, kv_pages: Iterable[int]) -> None:
        """Proves that no page is lost and that every reference has an owner.

        kv_pages: every reference of a running sequence; a page with two references appears twice.
        """
        cached = [*self.residency.cached_pages(), *self.kv.cached_pages()]
        self.pool.check_invariants([*kv_pages, *self.residency.held_pages()], cached)
        self.kv.check_invariants()
