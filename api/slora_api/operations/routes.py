"""/admin/engines and /admin/audit: the operator's routes for the engine processes of the host and the audit log."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, status
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora.core.errors import EngineUnavailable
from slora_adapters.database.audit_log import ActorKind, AuditEntry, AuditFilter, AuditLog
from slora_adapters.errors import DiskFull
from slora_adapters.registry.registry import Registry
from slora_api.completions.services import Generator
from slora_api.core.errors import EngineConflict, NotFound
from slora_api.core.foundation import Foundation
from slora_api.core.listing import DEFAULT_LIMIT, ListObject, PageObject, list_json
from slora_api.http.field_types import STRICT, Limit
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.live_feed import LiveFeed, LiveServices
from slora_api.metrics.names import ServerNames
from slora_api.metrics.scraper import Scraper
from slora_api.operations.engines import Engines, HostEngineObject
from slora_api.operations.health_routes import HealthServices
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.usage_shipper import UsageShipper

router = APIRouter(prefix="/admin", tags=["operator"])


@dataclass(frozen=True, slots=True)
class OperationServices:
    """What the routes of engines and the audit log use."""

    engines: Engines
    tenant_store: TenantStore
    audit_log: AuditLog


class EngineRestart(BaseModel):
    """POST /admin/engines/{name}/restart.

    allow_outage: restart the engine even if no other engine serves. New requests are then refused until it serves
        again.
    """

    model_config = STRICT
    allow_outage: bool = False


@router.get("/engines")
async def list_engines(
    _operator: Operator, services: Wired[OperationServices]
) -> ListObject[HostEngineObject]:
    """Lists the engine processes of this host. There are at most 64."""
    return {"object": "list", "data": list(await services.engines.list())}


@router.post(
    "/engines/{name}/restart",
    status_code=status.HTTP_202_ACCEPTED,
    responses=errors(NotFound, EngineConflict, EngineUnavailable, DiskFull),
)
async def restart_engine(
    name: str, _operator: Operator, services: Wired[OperationServices], body: EngineRestart | None = None
) -> HostEngineObject:
    """Begins to restart an engine, without a refused request if another engine serves. The other engines continue its
    answers. The restart has ended when `restarts` has grown and `serving` is true.
    """
    wanted = body or EngineRestart()
    return await services.engines.restart(name, allow_outage=wanted.allow_outage)


_Time = Annotated[float, Query(ge=0, allow_inf_nan=False)]
_EntryId = Annotated[int, Query(ge=1, lt=2**63)]


@dataclass(frozen=True, slots=True)
class _AuditParameters:
    tenant: str | None = None
    actor: str | None = None
    action: str | None = None
    since: _Time | None = None
    until: _Time | None = None
    limit: Limit = DEFAULT_LIMIT
    after: _EntryId | None = None


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


@router.get("/audit", responses=errors(NotFound))
def read_audit_log(
    _operator: Operator,
    services: Wired[OperationServices],
    asked: Annotated[_AuditParameters, Depends()],
) -> PageObject[AuditEntryObject]:
    """Lists changes, newest first. tenant: a name or an id. since, until: Unix times."""
    tenant_id = None if asked.tenant is None else services.tenant_store.find_id(asked.tenant)
    wanted = AuditFilter(tenant_id, asked.actor, asked.action, asked.since, asked.until)
    entries = services.audit_log.read(wanted, asked.limit + 1, asked.after)
    names = services.tenant_store.find_names({entry.tenant for entry in entries}, include_former=True)
    return list_json([_entry_json(entry, names) for entry in entries], "id", asked.limit)


@dataclass(frozen=True, slots=True)
class Operations:
    services: OperationServices
    health: HealthServices
    live: LiveServices


def build_operations(
    foundation: Foundation,
    generator: Generator,
    registry: Registry,
    tenant_store: TenantStore,
    running: RunningRequests,
    shipper: UsageShipper,
) -> Operations:
    client, limiter, database = foundation.client, generator.limiter, foundation.database
    engines = Engines(client, generator.metrics, foundation.board, database)
    names = ServerNames.of(registry, tenant_store)
    live = LiveFeed(client, names, lambda: limiter.stopping)
    scraper = Scraper(generator.metrics, client, generator.engine_info, names, foundation.reserve, shipper)
    return Operations(
        OperationServices(engines, tenant_store, AuditLog(database)),
        HealthServices(limiter, generator, foundation.reserve, engines, scraper),
        LiveServices(live, running),
    )
