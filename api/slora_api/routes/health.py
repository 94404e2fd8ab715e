"""/healthz, /readyz and /metrics, for load balancers, container engines and dashboards."""

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

# The engine answers between two steps. The longest steps take well below a second.
_STATS_S = 2.0


@router.get("/healthz")
async def healthz() -> dict[str, Any]:
    """Always 200 while this process answers. A restart of the engine does not change that: killing the server would not
    help.
    """
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: Wired) -> dict[str, Any]:
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
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(_operator: Operator, services: Wired) -> Response:
    generator = services.generator
    generator.metrics.set_read_only(is_read_only=services.reserve.is_full)
    return Response(
        generator.metrics.render(await _engine_numbers(generator)), media_type=CONTENT_TYPE_LATEST
    )


async def _engine_numbers(generator: Generator) -> tuple[EngineInfo, EngineStats] | None:
    """Returns None if no engine answers in time, because a scrape must not wait for one."""
    try:
        async with asyncio.timeout(_STATS_S):
            return generator.engine_info(), await generator.client.stats()
    except (EngineUnavailable, Starting, TimeoutError):
        return None
