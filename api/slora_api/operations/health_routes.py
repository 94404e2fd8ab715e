"""Health, version, load and metrics, for load balancers, container engines and dashboards."""

from dataclasses import dataclass
from typing import Literal, NotRequired

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from typing_extensions import TypedDict

from slora_adapters.process.full_disk import DiskReserve
from slora_api.completions.services import Generator
from slora_api.core.errors import Starting
from slora_api.core.package_version import find_package_version
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import GATEWAY, MetricsReader, Operator
from slora_api.metrics.scraper import Scraper
from slora_api.operations.engines import Engines
from slora_api.quotas.request_limiter import RequestLimiter

router = APIRouter(tags=["server"])


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


@router.get("/healthz")
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


@router.get("/version")
async def version() -> Version:
    return {"version": find_package_version()}


@router.get("/load")
async def load(_operator: Operator, services: Wired[HealthServices]) -> Load:
    return {"server_load": services.limiter.num_generations}


# Health checks are at /health in vLLM's servers, and at /ping on SageMaker.
@router.get("/ping", name="ping", responses=errors(Starting))
@router.get("/health", name="health", responses=errors(Starting))
@router.get("/readyz", responses=errors(Starting))
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


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(reader: MetricsReader, services: Wired[HealthServices]) -> Response:
    """Answers with all metrics, or with those for gateways if `--gateway-metrics on` admits a scrape without a key."""
    scraper = services.scraper
    text = await (scraper.render_for_gateway() if reader is GATEWAY else scraper.render())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
