"""On which terms a request is served: whose it is, what the operator grants its tenant, and how soon it is wanted."""

from dataclasses import dataclass

from slora.tenant_share import TenantShare
from slora_api.schemas import GenerationFields
from slora_api.tenants.tenancy import KeyRecord

__all__ = ["ServiceTerms"]


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """share: the tenant's, as of when the key was read. priority: among the tenant's requests, lower for sooner.

    deadline_s: for each first token, from when the engine takes the request in; None if it waits.
    """

    tenant: str
    share: TenantShare
    priority: int = 0
    deadline_s: float | None = None

    @staticmethod
    def of(key: KeyRecord, fields: GenerationFields) -> "ServiceTerms":
        deadline_s = None if fields.deadline_ms is None else fields.deadline_ms / 1000
        return ServiceTerms(key.tenant, key.share, fields.priority or 0, deadline_s)
