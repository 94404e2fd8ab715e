"""The tenants as the engine sees them: what each one has, and what it has been served.

`PagePool` keeps the counts of pages, the queue those of service and of waiting requests. Knows no request, no page and
no key: who may speak for a tenant was decided before.
"""

from collections.abc import Iterator

from slora.tenant_share import TenantShare


class Tenant:
    """The state of one tenant.

    service: weighted virtual tokens (VTC, OSDI'24): grows by cost / weight. num_pages: of the pool, that it owns, held
    and cached; num_cached: the cached ones of these. max_pages: None if it has no ceiling.
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
        return f"Tenant({self.name!r}, {self.num_pages} pages, {self.num_cached} of them cached)"

    @property
    def is_bounded(self) -> bool:
        """Whether it has a floor or a ceiling."""
        return self.min_pages > 0 or self.max_pages is not None

    def charge(self, tokens: float) -> None:
        """Worked example: 30 tokens cost a tenant of weight 2 as much as 15 cost one of weight 1."""
        self.service += tokens / self.share.weight

    @property
    def is_above_floor(self) -> bool:
        """Whether others may take what it has cached."""
        return self.num_pages > self.min_pages

    def exceeds(self, num_more: int) -> bool:
        """Whether `num_more` held pages are too many for it, even if all of its cached ones left."""
        return self.max_pages is not None and self.num_pages - self.num_cached + num_more > self.max_pages

    def pages_over_ceiling(self, num_more: int) -> int:
        """How many of its pages it has to give up before it may take `num_more`."""
        return 0 if self.max_pages is None else max(0, self.num_pages + num_more - self.max_pages)


class Tenants:
    """All tenants that the engine has heard of. num_pages: of the pool that they share."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._tenants: dict[str, Tenant] = {}
        # A new list with each change, never the old one changed: so that one can see whether it is still the same.
        self.bounded: list[Tenant] = []

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def most_pages(self, tenant: Tenant) -> int:
        """That it could ever hold: its ceiling, or what the floors of others leave."""
        rest = self._num_pages - sum(other.min_pages for other in self.bounded if other is not tenant)
        return rest if tenant.max_pages is None else min(rest, tenant.max_pages)

    @property
    def has_floors(self) -> bool:
        return any(tenant.min_pages for tenant in self.bounded)

    def find(self, name: str) -> Tenant:
        """Made on first use, with the default share."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        return tenant

    def set_share(self, name: str, share: TenantShare) -> None:
        """Nobody loses a page at once: floors and ceilings are kept from the next page that somebody takes."""
        tenant = self.find(name)
        if tenant.share == share:
            return
        was_bounded = tenant.is_bounded
        tenant.share = share
        tenant.min_pages = self._pages(share.min_share)
        tenant.max_pages = self._pages(share.max_share) if share.max_share < 1 else None
        if tenant.is_bounded != was_bounded:
            self.bounded = [tenant for tenant in self if tenant.is_bounded]

    def is_over_share(self, tenant: Tenant) -> bool:
        """Whether it owns more pages than its weight entitles it to, among the tenants that own pages or wait.

        Worked example: weight 1 beside one other active tenant of weight 3, in a pool of 400 pages: more than 100.
        """
        active = sum(other.share.weight for other in self if other.num_pages or other.num_waiting)
        return tenant.num_pages * active > tenant.share.weight * self._num_pages

    def _pages(self, share: float) -> int:
        # Down, so that floors that add up to 1 fit into the pool; 0.29 of 100 pages is 29, not 28.999.
        return int(share * self._num_pages + 1e-6)
