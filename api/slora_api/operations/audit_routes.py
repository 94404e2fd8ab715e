"""/admin/audit: the audit log, for operators."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from slora_adapters.database.audit_log import ActorKind, AuditEntry, AuditFilter
from slora_api.core.errors import NotFound
from slora_api.core.listing import DEFAULT_LIMIT, PageObject, list_json
from slora_api.http.field_types import Limit
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.operations.engine_routes import OperationServices

router = APIRouter(tags=["operator"])

_Time = Annotated[float, Query(ge=0, allow_inf_nan=False)]
_EntryId = Annotated[int, Query(ge=1, lt=2**63)]


class AuditEntryObject(TypedDict):
    """One entry of the audit log. tenant: the name of the tenant, or the last name of a purged tenant; empty if the
    change concerns no tenant. created: Unix time in seconds. actor: the id of a key, or the user who ran a command.
    details: fields that depend on the action.
    """

    object: Literal["audit_entry"]
    id: int
    created: float
    actor: str
    actor_kind: ActorKind
    address: str
    request_id: str
    action: str
    tenant: str
    tenant_id: str
    target: str
    details: dict[str, Any]


def _entry_json(entry: AuditEntry, names: Mapping[str, str]) -> AuditEntryObject:
    return {
        "object": "audit_entry",
        "id": entry.entry_id,
        "created": entry.created_at,
        "actor": entry.actor.name,
        "actor_kind": entry.actor.kind,
        "address": entry.actor.address,
        "request_id": entry.actor.request_id,
        "action": entry.action,
        "tenant": names.get(entry.tenant, entry.tenant),
        "tenant_id": entry.tenant,
        "target": entry.target,
        "details": dict(entry.details),
    }


@router.get("/admin/audit", responses=errors(NotFound))
def read_audit_log(
    _operator: Operator,
    services: Wired[OperationServices],
    tenant: str | None = None,
    actor: str | None = None,
    action: str | None = None,
    since: _Time | None = None,
    until: _Time | None = None,
    limit: Limit = DEFAULT_LIMIT,
    after: _EntryId | None = None,
) -> PageObject[AuditEntryObject]:
    """Lists changes, newest first. tenant: a name or an id. since, until: Unix times."""
    tenant_id = None if tenant is None else services.tenant_store.find_id(tenant)
    wanted = AuditFilter(tenant_id, actor, action, since, until)
    entries = services.audit_log.read(wanted, limit + 1, after)
    names = services.tenant_store.find_names({entry.tenant for entry in entries}, include_former=True)
    return list_json([_entry_json(entry, names) for entry in entries], "id", limit)
