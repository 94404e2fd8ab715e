"""What a tenant is entitled to, beside others. A plain value; knows no pool and no request."""

import math
from dataclasses import dataclass

from slora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TenantShare:
    """weight: of service, against other tenants': weight 2 is served twice the tokens of weight 1.

    min_share: fraction of the pool's pages that others can't take from it once it has them. max_share: fraction that
    it never holds more than, cached pages included. priority: the class that it is served in; lower goes first.

    Worked example: min_share 0.1 in a pool of 500 pages. When it owns 80, others may have 30 of those that it caches.
    """

    weight: float = 1.0
    min_share: float = 0.0
    max_share: float = 1.0
    priority: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError with the field, its value and the limit."""
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"a tenant's weight is {self.weight!r}; it must be above 0 and finite")
        for name, share in (("min_share", self.min_share), ("max_share", self.max_share)):
            if not 0 <= share <= 1:
                raise ConfigError(
                    f"a tenant's {name} is {share!r}; it must be from 0 to 1, a fraction of the pool"
                )
        if self.min_share > self.max_share:
            raise ConfigError(
                f"a tenant's min_share is {self.min_share!r}, more than its max_share {self.max_share!r}; "
                "lower the one or raise the other"
            )


DEFAULT_SHARE = TenantShare()
