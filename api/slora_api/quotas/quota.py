"""The quota of a tenant or of an API key: the limits of its use.

A request must fit into the quota of its tenant and into the quota of its key. A field that is None sets no limit. For a
tenant, the default of the server's settings then applies, if there is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from slora.core.request import MAX_COMPOSED_ADAPTERS
from slora_api.core.errors import BadRequest
from slora_api.core.settings import Settings

# Field -> the largest limit that it accepts. JSON numbers above 2**53 lose digits in some clients.
_MOST = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "tokens_per_day": 10**15,
    "tokens_per_month": 10**15,
    "concurrent_answers": 10**6,
    "composed_adapters": MAX_COMPOSED_ADAPTERS,
    "adapter_versions": 10**9,
    "stored_bytes": 2**50,
}
QUOTA_FIELDS = tuple(_MOST)
# A key cannot have these limits, because adapters belong to its tenant.
TENANT_ONLY = ("adapter_versions", "stored_bytes")


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one tenant or key. Token limits count prompt tokens and generated tokens.

    requests_per_minute, tokens_per_minute: limits for any period of 60 seconds.
    tokens_per_day, tokens_per_month: budgets for a day and for a month, in UTC.
    concurrent_answers: answers in progress; each prompt and each choice of a request counts.
    composed_adapters: adapters that one request may combine.
    adapter_versions, stored_bytes: limits for the adapters that a tenant keeps. A key cannot have these limits.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    concurrent_answers: int | None = None
    composed_adapters: int | None = None
    adapter_versions: int | None = None
    stored_bytes: int | None = None

    @property
    def limits_requests(self) -> bool:
        """Whether any field applies to requests."""
        return any(
            limit is not None
            for limit in (
                self.requests_per_minute,
                self.tokens_per_minute,
                self.tokens_per_day,
                self.tokens_per_month,
                self.concurrent_answers,
                self.composed_adapters,
            )
        )

    @property
    def has_budget(self) -> bool:
        return self.tokens_per_day is not None or self.tokens_per_month is not None

    @property
    def least_tokens(self) -> int | None:
        """The smallest token limit; None if there is none."""
        limits = (self.tokens_per_minute, self.tokens_per_day, self.tokens_per_month)
        return min((limit for limit in limits if limit is not None), default=None)

    def changed(self, changes: Mapping[str, int | None], *, of_key: bool = False) -> "Quota":
        """Returns the quota with `changes` applied; None removes a limit. Raises BadRequest naming the field."""
        for name, value in changes.items():
            if of_key and name in TENANT_ONLY and value is not None:
                raise BadRequest(
                    f"`{name}` is {value}, but a key has no adapters of its own; set it for the tenant.", name
                )
            if value is not None and not 1 <= value <= _MOST[name]:
                raise BadRequest(
                    f"`{name}` is {value}; it must be from 1 to {_MOST[name]}, or null for no limit.", name
                )
        return replace(self, **changes)

    def or_default(self, default: "Quota") -> "Quota":
        """Returns the quota with each missing limit taken from `default`."""
        missing = {
            one.name: getattr(default, one.name) for one in fields(self) if getattr(self, one.name) is None
        }
        return replace(self, **missing)

    def to_json(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in QUOTA_FIELDS}


NO_QUOTA = Quota()


def default_quota(settings: Settings) -> Quota:
    """Returns the server's default limits, which apply wherever a tenant's quota sets no limit."""
    return Quota(
        concurrent_answers=settings.max_concurrent_per_tenant,
        adapter_versions=settings.max_versions_per_tenant,
        stored_bytes=settings.max_adapter_bytes_per_tenant,
    )
