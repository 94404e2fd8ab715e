"""The terms on which the engine serves a request: its tenant, the tenant's share, its priority and its deadline."""

from dataclasses import dataclass

from slora.tenant_share import TenantShare
from slora_api.schemas import AnswerFields
from slora_api.tenants.key_record import KeyRecord

__all__ = ["ServiceTerms"]


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """The terms of one request.

    share: the tenant's share when the key was read.
    priority: order among the tenant's own requests; lower is served sooner.
    deadline_s: limit for each first token, from the request's arrival at the engine; None for no limit.
    """

    tenant: str
    key_id: str
    share: TenantShare
    priority: int = 0
    deadline_s: float | None = None

    @staticmethod
    def of(key: KeyRecord, fields: AnswerFields) -> "ServiceTerms":
        deadline_s = None if fields.deadline_ms is None else fields.deadline_ms / 1000
        return ServiceTerms(key.tenant, key.key_id, key.share, fields.priority or 0, deadline_s)
