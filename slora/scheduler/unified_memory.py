"""The page pool and its users: running KV, cached prefixes and adapters, each tenant within its bounds."""

from slora.cost_model import Costs
from slora.pool.eviction_policy import make_policy
from slora.pool.evictor import Evictor
from slora.pool.kv_cache import KVCache
from slora.pool.page_pool import PagePool
from slora.pool.residency import Residency
from slora.pool.tenant_account import TenantAccount, TenantAccounts
from slora.scheduler.sequence import Sequence
from slora.scheduler_config import SchedulerConfig


class UnifiedMemory:
    """Wires together the page pool, the evictor, the KV cache and the residency."""

    def __init__(self, config: SchedulerConfig, costs: Costs) -> None:
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
        """Whether eviction could at best give `tenant` this many pages.

        A quick check before anything is acquired or evicted.

        ignore_pins: pinned adapters may be evicted, too.
        """
        return num_pages <= self.pool.num_free + self.evictor.num_evictable(
            num_pages, tenant, ignore_pins=ignore_pins
        )

    def check(self, running: list[Sequence]) -> None:
        """Proves that no page is lost and that every reference has an owner."""
        held = [page for sequence in running for page in sequence.blocks.held_pages]
        cached = [*self.residency.cached_pages(), *self.kv.cached_pages()]
        self.pool.check_invariants([*held, *self.residency.held_pages()], cached)
        self.kv.check_invariants()
