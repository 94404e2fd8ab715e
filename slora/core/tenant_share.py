"""The share of a tenant: its weight, its bounds in the page pool and its priority class. A plain value."""

import math
from dataclasses import dataclass

from slora.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The service, pages and priority that one tenant is entitled to.

    weight: service relative to other tenants; a tenant of weight 2 gets twice as many tokens as one of weight 1.
    min_share: fraction of the pool's pages that other tenants cannot evict once this tenant owns them (its floor).
    max_share: largest fraction of the pool's pages that the tenant may own, cached pages included (its ceiling).
    priority: its priority class; classes with lower numbers are served first.

    Worked example: min_share 0.1 in a pool of 500 pages is a floor of 50. When the tenant owns 80 pages, other tenants
    may evict up to 30 of its cached pages.
    """

    weight: float = 1.0
    min_share: float = 0.0
    max_share: float = 1.0
    priority: int = 0

    def __post_init__(self) -> None:
        """Checks the fields. Raises ConfigError with the field, its value and the limit."""
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"a tenant's weight is {self.weight!r}; it must be above 0 and finite")
        for name, share in (("min_share", self.min_share), ("max_share", self.max_share)):
            if not 0 <= share <= 1:
                raise ConfigError(
                    f"a tenant's {name} is {share!r}; it must be from 0 to 1, a fraction of the pool"
                )
        if self.min_share > self.max_share:
            raise ConfigError(
                f"a tenant's min_share is {self.min_share!r}, more than its max_share "
                f"{self.max_share!r}; lower min_share or raise max_share"
            )


DEFAULT_SHARE = TenantShare()
