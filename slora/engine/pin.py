"""What crosses to the engine of a pinned adapter. A plain value."""

from dataclasses import dataclass

from slora.tenant_share import DEFAULT_SHARE, TenantShare
from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class Pin:
    """The operator wants `version` in the pool before anybody asks for it. share: its tenant's, as of now."""

    version: AdapterVersion
    share: TenantShare = DEFAULT_SHARE
