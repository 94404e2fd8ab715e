"""Health, version, load and metrics, for load balancers, container engines and dashboards; /admin/engines,
/admin/history and /admin/audit, the operator's routes for the engine processes of the host, its health in the last
hours, and the audit log.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Depends, Query, Response, status
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora.core.errors import EngineUnavailable
from slora_adapters.database.audit_log import ActorKind, AuditEntry, AuditFilter, AuditLog
from slora_adapters.errors import DiskFull
from slora_adapters.process.full_disk import DiskReserve
from slora_adapters.registry.registry import Registry
from slora_api.completions.services import Generator
from slora_api.core.errors import EngineConflict, NotFound, Starting
from slora_api.core.foundation import Foundation
from slora_api.core.listing import DEFAULT_LIMIT, ListObject, PageObject, list_json
from slora_api.core.package_version import find_package_version
from slora_api.http.field_types import STRICT, Limit
from slora_api.http.openapi import errors
from slora_api.http.permit_pool import RequestLimiter
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import GATEWAY, MetricsReader, Operator
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.history import (
    NUM_MINUTES,
    HistoryFile,
    Record,
    find_conditions,
    merge,
    merge_records,
)
from slora_api.metrics.live_feed import LiveFeed, LiveServices
from slora_api.metrics.names import ServerNames
from slora_api.metrics.scraper import Scraper
from slora_api.operations.engines import Engines, HostEngineObject
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.usage_shipper import UsageShipper

health_router = APIRouter(tags=["server"])


@dataclass(frozen=True, slots=True)
class HealthServices:
    """What the routes of health and metrics use."""

    limiter: RequestLimiter
    generator: Generator
    reserve: DiskReserve
    engines: Engines
    scraper: Scraper


class Health(TypedDict):
    status: Literal["ok"]


class Readiness(TypedDict):
    """The answer of a ready server. read_only: true if the disk of the data directory is full, otherwise absent.

    detail: what is wrong, although the server is ready.
    """

    status: Literal["ready"]
    read_only: NotRequired[bool]
    detail: NotRequired[str]


@health_router.get("/healthz")
async def healthz() -> Health:
    """Answers 200 as long as this process works, even while the engine restarts, because restarting the server would
    not help the engine.
    """
    return {"status": "ok"}


class Version(TypedDict):
    version: str


class Load(TypedDict):
    """server_load: answers in progress in all API processes of the host."""

    server_load: int


@health_router.get("/version")
async def version() -> Version:
    return {"version": find_package_version()}


@health_router.get("/load")
async def load(_operator: Operator, services: Wired[HealthServices]) -> Load:
    return {"server_load": services.limiter.num_generations}


# Health checks are at /health in vLLM's servers, and at /ping on SageMaker.
@health_router.get("/ping", name="ping", responses=errors(Starting))
@health_router.get("/health", name="health", responses=errors(Starting))
@health_router.get("/readyz", responses=errors(Starting))
async def readyz(services: Wired[HealthServices]) -> Readiness:
    """Answers 200 if a request sent now would be computed, else 503 with the reason.

    In demo mode the server is ready when the demo's adapters are published. If the engine or the loader makes no
    progress while it has work, this route answers 503 within 5 seconds. A server whose disk is full stays ready: it
    answers requests and refuses changes.
    """
    missing = services.generator.missing()
    if missing is not None:
        raise Starting(f"Not ready: {missing}.")
    if services.reserve.is_full:
        return {"status": "ready", "read_only": True, "detail": "The disk of the data directory is full."}
    lost = [f"{name} ({why})" for name, why in services.engines.problems.items() if why is not None]
    return {"status": "ready", "detail": f"Not serving: {', '.join(lost)}."} if lost else {"status": "ready"}


@health_router.get("/metrics", response_class=PlainTextResponse)
async def metrics(reader: MetricsReader, services: Wired[HealthServices]) -> Response:
    """Answers with all metrics, or with those for gateways if `--gateway-metrics on` admits a scrape without a key."""
    scraper = services.scraper
    text = await (scraper.render_for_gateway() if reader is GATEWAY else scraper.render())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


router = APIRouter(prefix="/admin", tags=["operator"])


@dataclass(frozen=True, slots=True)
class OperationServices:
    """What the routes of engines, the history and the audit log use. started_at: Unix time of the server's start."""

    engines: Engines
    tenant_store: TenantStore
    audit_log: AuditLog
    history: HistoryFile
    started_at: int


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


class HistoryPoint(TypedDict):
    """An interval of the history. Times are in seconds.

    at: Unix time of its beginning. minutes: its recorded minutes; fewer than the interval has if the server was not
    running. answers: to requests of tenants, by status; status 0 counts clients that left. failures: the most frequent
    ones, by status and route. failing: the tenants with the most failed answers, by status and name. first_token, gap:
    p50, p95, p99 and number of the times to the first token, and between
    tokens. queue_p95: of the times in the queue. starts: requests by where their adapters were. tokens: generated.
    engines: the smallest number of engines that served, and the number of all. pages: used, held by requests, and all.
    disk_free: bytes. ledger_lag, journal_bytes: of the usage that is not in the database yet. restarts: of processes.
    """

    at: int
    minutes: int
    answers: dict[str, int]
    failures: dict[str, int]
    failing: dict[str, int]
    first_token: list[float | None]
    gap: list[float | None]
    queue_p95: float | None
    starts: dict[str, int]
    tokens: int
    prompt_tokens: int
    running: int | None
    waiting: int | None
    engines: list[int]
    pages: list[int] | None
    disk_free: int
    ledger_lag: float | None
    journal_bytes: int | None
    preemptions: int
    fetch_failures: int
    not_finite: int
    pins_missing: int | None
    restarts: dict[str, int]
    ready: bool
    read_only: bool


class ConditionObject(TypedDict):
    """A condition of the rules for Prometheus. holds: whether it holds now. minutes: how long it must hold."""

    name: str
    severity: Literal["critical", "warning"]
    text: str
    minutes: int
    holds: bool


class HistoryObject(TypedDict):
    """The health of this host. time: the server's Unix time. started: when the server started. recent: the last five
    minutes; null if none of them was recorded.
    """

    object: Literal["history"]
    time: float
    started: int
    step: int
    recent: HistoryPoint | None
    points: list[HistoryPoint]
    conditions: list[ConditionObject]


_Hours = Annotated[int, Query(ge=1, le=NUM_MINUTES // 60)]
# The history has at most this many points.
_MAX_POINTS = 120
_RECENT_MINUTES = 5


@router.get("/history")
def read_history(_operator: Operator, services: Wired[OperationServices], hours: _Hours = 1) -> HistoryObject:
    """Shows the health of this host in the last hours, and which conditions need a person. The server records it each
    minute, for 24 hours.
    """
    now = time.time()
    step_s = math.ceil(hours * 60 / _MAX_POINTS) * 60
    records = services.history.read((now // 60 - hours * 60) * 60)
    records = _name_tenants(records, services.tenant_store)
    recent = [record for record in records if record["at"] >= (now // 60 - _RECENT_MINUTES) * 60]
    return {
        "object": "history",
        "time": now,
        "started": services.started_at,
        "step": step_s,
        "recent": merge(recent) if recent else None,  # type: ignore[typeddict-item]
        "points": merge_records(records, step_s),  # type: ignore[typeddict-item]
        "conditions": find_conditions(records, now),  # type: ignore[typeddict-item]
    }


def _name_tenants(records: list[Record], tenant_store: TenantStore) -> list[Record]:
    """Replaces the ids of tenants in `failing` by their present names. A deleted tenant keeps its id."""
    ids = {tenant for record in records for _, tenant in map(str.split, record.get("failing", ()))}
    names = tenant_store.find_names(ids)

    def name(failing: Mapping[str, int]) -> dict[str, int]:
        pairs = ((key.split(), count) for key, count in failing.items())
        return {f"{status} {names.get(tenant, tenant)}": count for (status, tenant), count in pairs}

    return [{**record, "failing": name(record.get("failing", {}))} for record in records]


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
    started_at: int,
) -> Operations:
    client, limiter, database = foundation.client, generator.limiter, foundation.database
    engines = Engines(client, generator.metrics, foundation.board, database)
    names = ServerNames.of(registry, tenant_store)
    live = LiveFeed(client, names, lambda: limiter.stopping)
    scraper = Scraper(generator.metrics, client, generator.engine_info, names, foundation.reserve, shipper)
    return Operations(
        OperationServices(
            engines, tenant_store, AuditLog(database), HistoryFile(foundation.data.history), started_at
        ),
        HealthServices(limiter, generator, foundation.reserve, engines, scraper),
        LiveServices(live, running),
    )
