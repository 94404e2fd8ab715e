"""The engine's accounts of tenants: their pages and the service that they have received.

`PagePool` updates the page counts, and the queue updates service and waiting requests. This module does not depend on
requests, pages or API keys: the API has authenticated the tenant before.
"""

from collections.abc import Iterator

from slora.tenant_share import TenantShare


class TenantAccount:
    """The account of one tenant.

    service: virtual token counter (VTC, OSDI'24): grows by tokens / weight.
    num_pages: number of pool pages that it owns, held and cached.
    num_cached: how many of these are cached.
    min_pages: its floor in pages; 0: no floor.
    max_pages: its ceiling in pages; None: no ceiling.
    num_waiting: number of its sequences in the waiting queue.
    """

    __slots__ = (
        "max_pages",
        "min_pages",
        "name",
        "num_cached",
        "num_pages",
        "num_waiting",
        "service",
        "share",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.share = TenantShare()
        self.service = 0.0
        self.num_pages = 0
        self.num_cached = 0
        self.min_pages = 0
        self.max_pages: int | None = None
        self.num_waiting = 0

    def __repr__(self) -> str:
        return f"TenantAccount({self.name!r}, {self.num_pages} pages, {self.num_cached} of them cached)"

    @property
    def is_bounded(self) -> bool:
        """Whether it has a floor or a ceiling."""
        return self.min_pages > 0 or self.max_pages is not None

    def charge(self, tokens: float) -> None:
        """Adds `tokens` / weight to `service`.

        Worked example: 30 tokens cost a tenant of weight 2 as much as 15 tokens cost a tenant of weight 1.
        """
        self.service += tokens / self.share.weight

    @property
    def is_above_floor(self) -> bool:
        """Whether other tenants may evict its cached pages."""
        return self.num_pages > self.min_pages

    def would_exceed_ceiling(self, num_pages: int) -> bool:
        """Whether `num_pages` further held pages would exceed its ceiling even if all its cached pages were evicted."""
        return self.max_pages is not None and self.num_pages - self.num_cached + num_pages > self.max_pages

    def pages_over_ceiling(self, num_pages: int) -> int:
        """Number of its pages that must be evicted before it may allocate `num_pages`."""
        return 0 if self.max_pages is None else max(0, self.num_pages + num_pages - self.max_pages)


class TenantAccounts:
    """The accounts of all tenants that the engine has seen. num_pages: number of pages in the pool that they share."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._tenants: dict[str, TenantAccount] = {}
        # Every change creates a new list, so that the evictor can detect a change by identity.
        self.bounded: list[TenantAccount] = []

    def __iter__(self) -> Iterator[TenantAccount]:
        return iter(self._tenants.values())

    def page_limit(self, tenant: TenantAccount) -> int:
        """The most pages that the tenant can ever hold: what the floors of other tenants leave, at most its ceiling."""
        rest = self._num_pages - sum(other.min_pages for other in self.bounded if other is not tenant)
        return rest if tenant.max_pages is None else min(rest, tenant.max_pages)

    @property
    def has_floors(self) -> bool:
        return any(tenant.min_pages for tenant in self.bounded)

    def find(self, name: str) -> TenantAccount:
        """The tenant of this name; created with the default share at the first call."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = TenantAccount(name)
        return tenant

    def set_share(self, name: str, share: TenantShare) -> None:
        """Changes a tenant's share. No page is evicted at once: the new bounds apply from the next allocation on."""
        tenant = self.find(name)
        if tenant.share == share:
            return
        was_bounded = tenant.is_bounded
        tenant.share = share
        tenant.min_pages = self._pages(share.min_share)
        tenant.max_pages = self._pages(share.max_share) if share.max_share < 1 else None
        if tenant.is_bounded != was_bounded:
            self.bounded = [tenant for tenant in self if tenant.is_bounded]

    def is_over_share(self, tenant: TenantAccount) -> bool:
        """Whether the tenant owns more pages than its share, if the pool is divided by weight among the active tenants.

        A tenant is active if it owns pages or has waiting sequences.

        Worked example: a tenant of weight 1 and another active tenant of weight 3 share 400 pages. The first tenant is
        over its share if it owns more than 100 pages.
        """
        active = sum(other.share.weight for other in self if other.num_pages or other.num_waiting)
        return tenant.num_pages * active > tenant.share.weight * self._num_pages

    def _pages(self, share: float) -> int:
        # Rounded down, so that floors that add up to 1 fit into the pool. The 1e-6 makes 0.29 of 100 pages 29, not 28.
        return int(share * self._num_pages + 1e-6)
