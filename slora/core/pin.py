"""The message that tells the engine about one pinned adapter."""

from dataclasses import dataclass

from slora.core.tenant_share import DEFAULT_SHARE, TenantShare
from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class Pin:
    """An adapter that the operator wants in the pool before its first request.

    share: the current share of the adapter's tenant.
    """

    version: AdapterVersion
    share: TenantShare = DEFAULT_SHARE
