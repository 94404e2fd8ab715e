"""The ASGI application: the routes, with authentication, body limits and the request scope as layers around them."""

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from slora_adapters.errors import SloraError, StoreUnavailable
from slora_api.adapters.model_routes import router as models
from slora_api.adapters.operator_routes import router as operator_adapters
from slora_api.adapters.routes import router as adapters
from slora_api.adapters.routes import vllm_router as vllm_adapters
from slora_api.batches.file_routes import router as files
from slora_api.batches.routes import router as batches
from slora_api.completions.routes import limits_router as limits
from slora_api.completions.routes import router as completions
from slora_api.completions.routes import token_router as tokens
from slora_api.console.routes import router as console
from slora_api.core.errors import error_response
from slora_api.core.host_board import HostBoard
from slora_api.embeddings.routes import router as embeddings
from slora_api.http.body_limit import BodyLimitMiddleware, BodyLimits
from slora_api.http.openapi import OpenApiDocument
from slora_api.http.openapi import router as openapi
from slora_api.http.request_scope import RequestScopeMiddleware
from slora_api.http.wiring import DirectApp, wire
from slora_api.keys.authentication import AuthenticationMiddleware, check_routes, is_operator, required_scopes
from slora_api.keys.key_record import AdminKey
from slora_api.keys.routes import own_router as me
from slora_api.keys.routes import router as keys
from slora_api.messages.routes import router as messages
from slora_api.metrics.live_feed import router as live
from slora_api.operations.routes import health_router as health
from slora_api.operations.routes import router as engines
from slora_api.operations.tenant_purge import router as purges
from slora_api.quotas.routes import router as quotas
from slora_api.responses.routes import router as responses
from slora_api.serve.services import Services
from slora_api.tenants.routes import router as tenants
from slora_api.usage.prices import router as prices
from slora_api.usage.routes import router as usage

if TYPE_CHECKING:
    from slora_api.core.otel_tracing import OtelTracing

logger = logging.getLogger(__name__)

_ROUTERS = (
    *(
        completions,
        responses,
        messages,
        embeddings,
        tokens,
        models,
        limits,
        me,
        live,
        adapters,
        vllm_adapters,
        usage,
        prices,
        quotas,
        tenants,
        purges,
        operator_adapters,
        keys,
        engines,
    ),
    *(files, batches),
    *(health, openapi, console),
)
ROUTES = tuple(route for router in _ROUTERS for route in router.routes if isinstance(route, APIRoute))
# All other errors are bugs, which RequestScopeMiddleware logs.
_ERRORS = (SloraError, HTTPException, RequestValidationError, ClientDisconnect)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, StoreUnavailable):  # The answer to a tenant omits the details.
        logger.warning("request %s: %s", request.state.request_id, error)
    answer = error_response(error, for_operator=is_operator(request))
    if answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        answer.headers["Allow"] = ", ".join(sorted(_allowed_methods(request)))
    return answer


def _allowed_methods(request: Request) -> set[str]:
    """Returns the methods of all routes with this path. Starlette names only the methods of the first route."""
    return {
        method
        for route in ROUTES
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


def _find_route(scope: Scope) -> str:
    """Returns the pattern of the path, for the metrics of requests that were answered before they reached a route."""
    return next((route.path for route in ROUTES if route.matches(scope)[0] is not Match.NONE), "unknown")


def make_router(services: Services, *, has_bootstrap_key: bool = True) -> FastAPI:
    """Makes the application with the routes, but without the layers that guard them. FastAPI's documentation pages are
    off, because they load scripts from other hosts.
    """
    check_routes(ROUTES)
    # `include_router` would build each route a second time, at the first request.
    app = DirectApp(
        ROUTES, _ERRORS, _answer_error, title="slora", docs_url=None, redoc_url=None, openapi_url=None
    )
    wire(app, services.for_routes)
    app.state.has_bootstrap_key = has_bootstrap_key
    app.state.openapi_document = OpenApiDocument(ROUTES, required_scopes)
    return app


def make_app(
    services: Services,
    admin_key: AdminKey | None,
    board: HostBoard | None = None,
    tracing: "OtelTracing | None" = None,
) -> ASGIApp:
    """Makes the application: the routes and the layers around them. The last layer added is the outermost, so it sees a
    request first.

    admin_key: the bootstrap key, if there is one. board: None if this process is the only API process. tracing: if
    None, no spans are made.
    """
    settings = services.settings
    app: ASGIApp = make_router(services, has_bootstrap_key=admin_key is not None)
    app = AuthenticationMiddleware(
        app,
        services.keys.store,
        services.keys.use,
        services.keys.running,
        admin_key,
        admits_gateways=settings.gateway_metrics,
    )
    body_limits = BodyLimits(
        settings.max_body_bytes,
        settings.max_upload_bytes,
        settings.min_body_bytes_per_s,
        max_file_bytes=settings.max_file_bytes,
        find_max_model_len=services.generator.find_max_model_len,
    )
    app = BodyLimitMiddleware(app, body_limits, board)
    return RequestScopeMiddleware(app, services.generator.metrics.count_answer, _find_route, tracing)
