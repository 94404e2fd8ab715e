"""/healthz, /readyz and /metrics: for load balancers, container engines and dashboards."""

import asyncio
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from slora.engine.info import EngineInfo, EngineStats
from slora.errors import EngineUnavailable
from slora_api.errors import Starting
from slora_api.generation.generation import Generator
from slora_api.routes.services import Wired
from slora_api.tenants.authentication import Operator

__all__ = ["router"]

router = APIRouter()

# An engine answers between two steps; the longest take well below a second.
_STATS_S = 2.0


@router.get("/healthz")
async def healthz() -> dict[str, Any]:
    """The process answers. It stays so while an engine is restarted: killing us would not help."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: Wired) -> dict[str, Any]:
    """200 when a request sent now would be computed; 503 with what is missing otherwise.

    A server in demo mode is ready when the demo's adapters answer. An engine or loader that makes no progress while it
    has work makes this 503 within 5 seconds. A full disk does not make a server unready: it answers requests and
    refuses changes.
    """
    missing = services.generator.missing()
    if missing is not None:
        raise Starting(f"Not ready: {missing}.")
    if services.reserve.is_full:
        return {"status": "ready", "read_only": True, "detail": "The disk of the data directory is full."}
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(_operator: Operator, services: Wired) -> Response:
    generator = services.generator
    generator.metrics.set_read_only(is_read_only=services.reserve.is_full)
    return Response(
        generator.metrics.render(await _engine_numbers(generator)), media_type=CONTENT_TYPE_LATEST
    )


async def _engine_numbers(generator: Generator) -> tuple[EngineInfo, EngineStats] | None:
    """None when there is no engine that answers: a scrape must not wait for one."""
    try:
        async with asyncio.timeout(_STATS_S):
            return generator.engine_info(), await generator.client.stats()
    except (EngineUnavailable, Starting, TimeoutError):
        return None
