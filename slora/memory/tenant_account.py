"""The engine's accounts of tenants: their pages and the service that they have received.

A tenant has two accounts: one for its interactive requests and one for its background requests. So background requests
use up neither the tenant's turn nor its ceiling, and its floor protects only what interactive requests use. The
priority class of the background account comes after the classes of all interactive accounts.

`PagePool` updates the page counts, and the queue updates service and waiting requests. This module does not depend on
requests, pages or API keys: the API has already authenticated the tenant.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from operator import attrgetter

from slora.core.engine_state import ServiceSpan
from slora.core.request import TenantShare

# Added to a tenant's priority class for its background requests. It exceeds every class that operators can set.
_BACKGROUND_CLASS = 1 << 30
# The sort key of tenants: the tenant with the smallest is served first.
TURN = attrgetter("priority", "service")


class TenantAccount:
    """An account of one tenant.

    is_background: whether it is the account of the tenant's background requests.
    priority, weight: those of `share`, which are read often.
    service: virtual token counter (VTC, OSDI'24): grows by tokens / weight.
    charged: the tokens that were charged since the engine's start. reported: those that `pop_spans` has returned.
    num_pages: number of pool pages that the account owns, held and cached.
    num_cached: number of cached pages that the account owns.
    min_pages: the floor in pages; 0: no floor.
    max_pages: the ceiling in pages; None: no ceiling.
    num_waiting: number of the account's sequences in the waiting queue.
    num_preemptions, num_prefix_evictions: preemptions of the account's sequences, and evictions of its cached prefixes.
    """

    __slots__ = (
        "_changed",
        "_share",
        "charged",
        "is_background",
        "max_pages",
        "min_pages",
        "name",
        "num_cached",
        "num_pages",
        "num_preemptions",
        "num_prefix_evictions",
        "num_waiting",
        "priority",
        "reported",
        "service",
        "weight",
    )

    def __init__(
        self,
        name: str,
        *,
        is_background: bool = False,
        changed: "dict[TenantAccount, None] | None" = None,
    ) -> None:
        """changed: gets each account that is charged."""
        self._changed = {} if changed is None else changed
        self.name = name
        self.is_background = is_background
        self.share = TenantShare()
        self.service = self.charged = self.reported = 0.0
        self.num_pages = 0
        self.num_cached = 0
        self.min_pages = 0
        self.max_pages: int | None = None
        self.num_waiting = 0
        self.num_preemptions = self.num_prefix_evictions = 0

    def __repr__(self) -> str:
        return f"TenantAccount({self.name!r}, {self.num_pages} pages, {self.num_cached} of them cached)"

    @property
    def share(self) -> TenantShare:
        """What the operator grants the tenant."""
        return self._share

    @share.setter
    def share(self, share: TenantShare) -> None:
        self._share, self.priority, self.weight = share, share.priority, share.weight

    @property
    def is_bounded(self) -> bool:
        """Whether the tenant has a floor or a ceiling."""
        return self.min_pages > 0 or self.max_pages is not None

    def charge(self, tokens: float) -> None:
        """Adds `tokens` / weight to `service`.

        Worked example: 30 tokens cost a tenant of weight 2 as much as 15 tokens cost a tenant of weight 1.
        """
        self.service += tokens / self.weight
        self.charged += tokens
        self._changed[self] = None

    @property
    def is_above_floor(self) -> bool:
        """Whether other tenants may evict this tenant's cached pages."""
        return self.num_pages > self.min_pages

    def would_exceed_ceiling(self, num_pages: int) -> bool:
        """Whether `num_pages` more pages would exceed the ceiling even after evicting all the tenant's cached pages."""
        return self.max_pages is not None and self.num_pages - self.num_cached + num_pages > self.max_pages

    def pages_over_ceiling(self, num_pages: int) -> int:
        """Number of the tenant's pages that must be evicted before the tenant may allocate `num_pages`."""
        return 0 if self.max_pages is None else max(0, self.num_pages + num_pages - self.max_pages)


class TenantAccounts:
    """The accounts of all tenants that the engine has seen. num_pages: number of pages in the pool that they share."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._interactive: dict[str, TenantAccount] = {}
        self._background: dict[str, TenantAccount] = {}
        # The accounts that were charged since `pop_spans` returned them, oldest charge first.
        self._changed: dict[TenantAccount, None] = {}
        # Every change creates a new list, so that the evictor can detect a change by identity.
        self.bounded: list[TenantAccount] = []

    def __iter__(self) -> Iterator[TenantAccount]:
        return chain(self._interactive.values(), self._background.values())

    def page_limit(self, tenant: TenantAccount) -> int:
        """Returns the maximum number of pages that the tenant can hold, given its ceiling and other tenants' floors."""
        rest = self._num_pages - sum(other.min_pages for other in self.bounded if other.name != tenant.name)
        return rest if tenant.max_pages is None else min(rest, tenant.max_pages)

    @property
    def has_floors(self) -> bool:
        return any(tenant.min_pages for tenant in self.bounded)

    def find(self, name: str, *, is_background: bool = False) -> TenantAccount:
        """Returns the account of the tenant's interactive or background requests.

        The first call creates the account. An interactive account gets the default share, and a background account
        gets the share of the interactive account.
        """
        accounts = self._background if is_background else self._interactive
        tenant = accounts.get(name)
        if tenant is None:
            tenant = TenantAccount(name, is_background=is_background, changed=self._changed)
            accounts[name] = tenant
            if is_background:
                self._apply(tenant, self.find(name).share)
        return tenant

    def find_known(self, name: str, *, is_background: bool) -> TenantAccount | None:
        """Returns an account if there is one."""
        return (self._background if is_background else self._interactive).get(name)

    def pop_spans(self, most: int) -> list[ServiceSpan]:
        """Returns what was charged since the last call, for `most` accounts at most. The next call has the rest."""
        spans = []
        for account in list(islice(self._changed, most)):
            del self._changed[account]
            spans.append(ServiceSpan(account.name, account.is_background, account.reported, account.charged))
            account.reported = account.charged
        return spans

    def find_both(self, name: str) -> list[TenantAccount]:
        """Returns the tenant's accounts: none, the interactive one, or both."""
        return [account for account in self if account.name == name]

    def set_share(self, name: str, share: TenantShare) -> None:
        """Changes a tenant's share. Evicts no page: the new bounds apply from the next allocation on."""
        if self.find(name).share == share:
            return
        for account in self.find_both(name):
            self._apply(account, share)

    def _apply(self, tenant: TenantAccount, share: TenantShare) -> None:
        if tenant.is_background:
            share = replace(share, min_share=0.0, priority=_BACKGROUND_CLASS + share.priority)
        was_bounded = tenant.is_bounded
        tenant.share = share
        tenant.min_pages = self._pages(share.min_share)
        tenant.max_pages = self._pages(share.max_share) if share.max_share < 1 else None
        if tenant.is_bounded != was_bounded:
            self.bounded = [tenant for tenant in self if tenant.is_bounded]

    def is_over_share(self, tenant: TenantAccount) -> bool:
        """Whether the tenant owns more pages than its share, if the pool is divided by weight among the active tenants.

        A tenant is active if its interactive requests own pages or wait. A background account is always over its share.

        Worked example: a tenant of weight 1 and another active tenant of weight 3 share 400 pages. The first tenant is
        over its share if it owns more than 100 pages.
        """
        if tenant.is_background:
            return True
        interactive = self._interactive.values()
        active = sum(other.weight for other in interactive if other.num_pages or other.num_waiting)
        return tenant.num_pages * active > tenant.weight * self._num_pages

    def _pages(self, share: float) -> int:
        # Rounded down, so that floors that add up to 1 fit into the pool. Without the 1e-6, a rounding error could lose
        # a page: 0.29 of 100 pages are 29 pages, not 28.
        return int(share * self._num_pages + 1e-6)
