"""The terms on which the engine serves a request: its tenant, the tenant's share, its priority and its deadline."""

from dataclasses import dataclass

from fastapi import Request

from slora.core.request import TenantShare
from slora_api.completions.schemas import AnswerFields
from slora_api.keys.key_record import KeyRecord

# The batch runner passes the id of a batch line under this key in the request's state. Clients cannot set it.
BACKGROUND_ID = "background_id"


def background_id(request: Request) -> str | None:
    """Returns the id of the batch line that the request computes; None for a request of a client."""
    found: str | None = getattr(request.state, BACKGROUND_ID, None)
    return found


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """The terms of one request.

    share: the tenant's share when the key was read.
    priority: order among the tenant's own requests; lower is served sooner.
    deadline_s: limit for each first token, from the request's arrival at the engine; None for no limit.
    background_id: the id of the batch line, which runs in the background; None for a request of a client.
    """

    tenant: str
    key_id: str
    share: TenantShare
    priority: int = 0
    deadline_s: float | None = None
    background_id: str | None = None

    @staticmethod
    def of(key: KeyRecord, fields: AnswerFields, request: Request | None = None) -> "ServiceTerms":
        deadline_s = None if fields.deadline_ms is None else fields.deadline_ms / 1000
        line_id = None if request is None else background_id(request)
        return ServiceTerms(key.tenant, key.key_id, key.share, fields.priority or 0, deadline_s, line_id)
