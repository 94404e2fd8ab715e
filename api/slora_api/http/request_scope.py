"""The outermost layer of the application: gives each request an id, measures its time, and answers unforeseen errors.

An unforeseen error is logged with the request's id and answered in the API's own form.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slora_adapters.process.shortage import find_shortage
from slora_api.core.errors import ApiError, Stopping, error_response, speaks_anthropic
from slora_api.core.key_masking import mask_keys
from slora_api.core.request_context import RequestContext, current_request

if TYPE_CHECKING:
    from slora_api.core.otel_tracing import OtelTracing

logger = logging.getLogger(__name__)

# The request ids that a client may choose. They are safe in a header and in a log line.
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)

Observe = Callable[[str, int, float, str | None], None]


def _request_id(headers: Headers) -> str:
    sent = headers.get("x-request-id", "")
    is_usable = _SANE_ID.fullmatch(sent) and mask_keys(sent) == sent
    return sent if is_usable else f"req_{uuid.uuid4().hex}"


class _ResponseSender:
    """Sends an answer. Adds the headers that every answer has, and the headers of the request's meter, if any."""

    __slots__ = ("_context", "_id_headers", "_send", "_started_at", "_state", "status")

    def __init__(self, send: Send, scope: Scope, context: RequestContext) -> None:
        self._send = send
        self._state: Mapping[str, Any] = scope["state"]
        self._id_headers = ["x-request-id", *(["request-id"] if speaks_anthropic(scope) else [])]
        self._context = context
        self._started_at = time.perf_counter()
        self.status: int | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started_at

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            # No route sets these headers.
            headers = dict.fromkeys(self._id_headers, self._context.request_id)
            if self._context.span is not None:
                headers["traceresponse"] = self._context.span.traceparent
            headers["openai-processing-ms"] = str(round(self.seconds * 1000))
            if (meter := self._state.get("meter")) is not None:
                headers.update(await meter.headers())
            if (ignored := self._state.get("ignored")) is not None and ignored.names:
                headers["x-slora-ignored"] = mask_keys(ignored.listed)
            encoded = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
            message = {**message, "headers": [*message.get("headers", ()), *encoded]}
        await self._send(message)


class RequestScopeMiddleware:
    """ASGI middleware. observe: called with the route, the status and the seconds of every answer, and with the id of
    the tenant, if any. find_route: returns the route of a request that was answered before it reached its route.
    tracing: if None, no spans are made.
    """

    def __init__(
        self,
        app: ASGIApp,
        observe: Observe,
        find_route: Callable[[Scope], str],
        tracing: "OtelTracing | None" = None,
    ) -> None:
        self._app = app
        self._observe = observe
        self._find_route = find_route
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The server runs without lifespan and websockets, so any scope but HTTP is a bug.
            raise RuntimeError(f"this application answers HTTP, not {scope['type']!r}")
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        context = RequestContext(request_id)
        if self._tracing is not None:
            context.span = self._tracing.begin(scope["method"], scope["path"], headers)
        # The server runs each request in a task of its own, so the variable need not be reset.
        current_request.set(context)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        sender = _ResponseSender(send, scope, context)
        try:
            await self._app(scope, receive, sender.send)
        except asyncio.CancelledError:
            # When the drain time is over, uvicorn cancels the remaining requests. Answer these requests before uvicorn
            # closes the connections.
            if sender.status is None:
                await error_response(Stopping())(scope, receive, sender.send)
        except ApiError as error:  # A layer around the routes has refused or ended the request.
            if sender.status is None:
                await error_response(error)(scope, receive, sender.send)
        except Exception as error:  # A bug is logged, and fails only this request.
            bug = error if (lacking := find_shortage(error)) is None else None
            reason = "" if lacking is None else f", because the machine lacks {lacking}: {error}"
            logger.error(
                "request %s: %s %s failed%s", request_id, scope["method"], scope["path"], reason, exc_info=bug
            )
            if sender.status is None:
                await error_response(error)(scope, receive, sender.send)
        finally:
            route = getattr(scope.get("route"), "path", None) or self._find_route(scope)
            self._observe(route, sender.status or 0, sender.seconds, context.tenant_id)
            if context.span is not None:
                context.span.end(context, route, sender.status or 0)
