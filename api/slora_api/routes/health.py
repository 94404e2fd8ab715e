"""/healthz, /readyz and /metrics: for load balancers, container engines and dashboards."""

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from slora.errors import EngineUnavailable
from slora_api.authentication import Operator
from slora_api.errors import Starting
from slora_api.services import Wired

__all__ = ["router"]

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, Any]:
    """The process answers. It stays so while an engine is restarted: killing us would not help."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: Wired) -> dict[str, Any]:
    """200 when a request sent now would be computed; 503 with what is missing otherwise."""
    missing = services.generator.missing()
    if missing is not None:
        raise Starting(f"Not ready: {missing}.")
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(_operator: Operator, services: Wired) -> Response:
    generator = services.generator
    try:
        engine = (generator.engine_info(), await generator.client.stats()) if generator.client.ready else None
    except EngineUnavailable:
        engine = None
    return Response(generator.metrics.render(engine), media_type=CONTENT_TYPE_LATEST)
