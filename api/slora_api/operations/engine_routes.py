"""/admin/engines: the operator's routes for the engine processes of the host."""

from dataclasses import dataclass

from fastapi import APIRouter, status
from pydantic import BaseModel

from slora.core.errors import EngineUnavailable
from slora_adapters.database.audit_log import AuditLog
from slora_adapters.errors import DiskFull
from slora_api.core.errors import EngineConflict, NotFound
from slora_api.core.listing import ListObject
from slora_api.http.field_types import STRICT
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.operations.engines import Engines, HostEngineObject
from slora_api.tenants.tenant_store import TenantStore

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
