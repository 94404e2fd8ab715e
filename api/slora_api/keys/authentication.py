"""Identifies the caller of each request, and checks the scope that the route needs. Every path except the public ones
(`is_public`) needs a key.

The middleware identifies the caller. The signature of a route names the needed scope with one of the parameter types
below. The two checks are independent, so even a route without a scope refuses callers without a key. Such a route is a
bug: `check_routes` refuses to start a server that has one.

/metrics needs a scope that only operators' keys have, because the metrics show the adapters of all tenants and their
traffic. Prometheus sends a key with `authorization: {credentials_file: ...}`.
"""

import asyncio
import logging
import re
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from slora_adapters.database.audit_log import Actor, ActorKind, acting_as
from slora_adapters.errors import StoreUnavailable
from slora_api.core.errors import (
    Forbidden,
    ServerBusy,
    TenantBusy,
    TenantSuspended,
    Unauthorized,
    error_response,
    speaks_anthropic,
)
from slora_api.core.fair_slots import FairSlots
from slora_api.core.request_context import current_request
from slora_api.core.threads import control_thread
from slora_api.keys.key_record import (
    BOOTSTRAP_KEY,
    OPERATOR_SCOPES,
    AdminKey,
    Caller,
    KeyRecord,
    OperatorKey,
    Scope,
    TenantStatus,
)
from slora_api.keys.key_store import KeyStore
from slora_api.keys.key_use import KeyUse
from slora_api.keys.running_requests import RunningRequests

logger = logging.getLogger(__name__)

# Load balancers and container engines call the paths of health checks without a key. These paths reveal only whether
# the server is up and ready. The version, the document of the API and the files of the console are the same for every
# server of a release.
PUBLIC_PATHS = frozenset(
    {"/", "/healthz", "/readyz", "/health", "/ping", "/version", "/openapi.json", "/docs", "/console"}
)
_PUBLIC_FOLDER = "/console/"

# The maximum number of concurrent key lookups, and of waiting lookups from one client address. A lookup takes a
# millisecond.
_LOOK_UP_SLOTS = 4
_MAX_LOOK_UPS = 128

# The caller of a scrape without a key.
GATEWAY = OperatorKey("gateway", "gateway", 0, scopes=frozenset({Scope.METRICS_READ}))

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


class AuthenticationMiddleware:
    """ASGI middleware: stores the caller in the request's state, or answers 401.

    admits_gateways: whether `/metrics` answers a request without a key, with the few metrics that gateways need.
    """

    def __init__(
        self,
        app: ASGIApp,
        key_store: KeyStore,
        key_use: KeyUse,
        running: RunningRequests,
        admin_key: AdminKey | None,
        *,
        admits_gateways: bool = False,
    ) -> None:
        self._app = app
        self._admits_gateways = admits_gateways
        self._key_store = key_store
        self._key_use = key_use
        self._running = running
        self._look_ups = FairSlots(_LOOK_UP_SLOTS, _MAX_LOOK_UPS, "API keys")
        # Secrets that are being looked up. The result of each future is False if the lookup was cancelled, otherwise
        # True.
        self._pending: dict[str, asyncio.Future[bool]] = {}
        self._admin_key = admin_key

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if not is_public(scope["path"]):
            try:
                header = _find_credentials(scope)
                if not header and self._admits_gateways and scope["path"] == "/metrics":
                    caller: Caller | None = GATEWAY
                else:
                    caller = await self.identify(header, _address(scope))
            except ServerBusy as error:
                await error_response(error)(scope, receive, send)
                return
            except StoreUnavailable as error:
                logger.warning("an API key cannot be checked: %s", error)
                await error_response(error)(scope, receive, send)
                return
            if caller is None:
                await error_response(Unauthorized())(scope, receive, send)
                return
            scope["state"]["caller"] = caller
            if isinstance(caller, KeyRecord) and (context := current_request.get()) is not None:
                context.tenant, context.tenant_id = caller.tenant_name, caller.tenant
                # From here on, the request waits in the queue of its tenant (`FairEventLoop`).
                await asyncio.sleep(0)
            if caller is not BOOTSTRAP_KEY and caller is not GATEWAY:
                self._key_use.note(caller)
            with acting_as(_actor(caller, scope)), self._track(caller, scope["state"]):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _track(self, caller: Caller, state: dict[str, Any]) -> AbstractContextManager[None]:
        """Tracks a tenant's request: the request is ended if its key is revoked or the tenant is suspended. Requests of
        operators are not tracked. Such requests are short, and an operator may revoke the very key that the request was
        sent with.
        """
        return self._running.track(caller.key_id, state) if isinstance(caller, KeyRecord) else nullcontext()

    async def identify(self, header: str, address: str) -> Caller | None:
        match = _BEARER.fullmatch(header.strip())
        if match is None:
            return None
        is_local = self._key_store.is_lookup_local(match[1])
        caller = self._key_store.authenticate(match[1]) if is_local else None
        if caller is None and self._admin_key is not None and self._admin_key.matches(match[1]):
            return BOOTSTRAP_KEY
        return caller if is_local else await self._look_up(match[1], address)

    async def _look_up(self, secret: str, address: str) -> Caller | None:
        """Looks up a key in the database. Lookups are shared fairly among client addresses, so an address that sends
        many unknown keys does not block others. Raises ServerBusy.

        A gateway may send a thousand requests with one key as soon as the server has started. The first request looks
        up the key. The other requests wait for this lookup, and then find the key in the cache.
        """
        while (earlier := self._pending.get(secret)) is not None:
            has_ended = await asyncio.shield(earlier)
            if self._key_store.is_lookup_local(secret):
                return self._key_store.authenticate(secret)
            if has_ended:
                break
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        is_first, has_ended = self._pending.setdefault(secret, ended) is ended, True
        try:
            async with self._look_ups.hold(address):
                return await control_thread(self._key_store.authenticate, secret)
        except asyncio.CancelledError:
            has_ended = False
            raise
        except TenantBusy:
            raise ServerBusy(
                f"{_MAX_LOOK_UPS} API keys from your address wait until they are looked up; try again shortly."
            ) from None
        finally:
            if is_first:
                del self._pending[secret]
                ended.set_result(has_ended)


def _find_credentials(scope: AsgiScope) -> str:
    """Returns the value of `Authorization`. Clients of Anthropic's API send the key in a header of its own."""
    headers = Headers(scope=scope)
    found = headers.get("authorization", "")
    if not found and speaks_anthropic(scope) and (key := headers.get("x-api-key")):
        return f"Bearer {key}"
    return found


def _address(scope: AsgiScope) -> str:
    address: str = scope["client"][0] if scope.get("client") else ""
    return address.removeprefix("::ffff:")  # An IPv4 address on a socket for both.


def _actor(caller: Caller, scope: AsgiScope) -> Actor:
    """Returns the actor that the audit log names for the changes of this request."""
    kind = ActorKind.TENANT if isinstance(caller, KeyRecord) else ActorKind.OPERATOR
    return Actor(kind, caller.key_id, _address(scope), scope["state"].get("request_id", ""))


class RequiredScope:
    """The dependency of a route that needs `scope`. It returns the caller's key, or raises Forbidden if the key does
    not have the scope. None permits every valid key.
    """

    def __init__(self, scope: Scope | None) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Caller:
        caller: Caller = request.state.caller
        if self._is_held(caller.scopes):
            if isinstance(caller, KeyRecord) and caller.status is not TenantStatus.ACTIVE:
                raise TenantSuspended(caller.tenant_name)
            return caller
        held = ", ".join(f"`{scope}`" for scope in sorted(caller.scopes))
        if self.scope in OPERATOR_SCOPES:
            remedy = f"Use an operator's key with the scope `{self.scope}`."
        elif isinstance(caller, OperatorKey):
            remedy = "Use a tenant's API key, because an operator's key has no adapters."
        else:
            remedy = "Ask the operator for a key that has it."
        raise Forbidden(f"This route needs the scope `{self.scope}`, but your key has only {held}. {remedy}")

    def _is_held(self, scopes: Set[Scope]) -> bool:
        includes = self.scope is Scope.METRICS_READ and Scope.ADMIN in scopes
        return self.scope is None or self.scope in scopes or includes


InferenceKey = Annotated[KeyRecord, Depends(RequiredScope(Scope.INFERENCE))]
AdapterReader = Annotated[KeyRecord, Depends(RequiredScope(Scope.ADAPTERS_READ))]
AdapterWriter = Annotated[KeyRecord, Depends(RequiredScope(Scope.ADAPTERS_WRITE))]
UsageReader = Annotated[KeyRecord, Depends(RequiredScope(Scope.USAGE_READ))]
MetricsReader = Annotated[OperatorKey, Depends(RequiredScope(Scope.METRICS_READ))]
Operator = Annotated[OperatorKey, Depends(RequiredScope(Scope.ADMIN))]
AnyKey = Annotated[Caller, Depends(RequiredScope(None))]


def is_public(path: str) -> bool:
    """Whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(_PUBLIC_FOLDER)


def required_scopes(route: APIRoute) -> set[Scope | None]:
    """Returns the scopes that the route's signature names. The element None means that every valid key may call the
    route.
    """

    def walk(dependant: Dependant) -> Iterable[Scope | None]:
        if isinstance(dependant.call, RequiredScope):
            yield dependant.call.scope
        for dependency in dependant.dependencies:
            yield from walk(dependency)

    return set(walk(route.dependant))


def check_routes(routes: Iterable[APIRoute]) -> None:
    """Raises ValueError for a route that does not name exactly one scope, unless it is public."""
    for route in routes:
        if len(scopes := required_scopes(route)) != (not is_public(route.path)):
            raise ValueError(
                f"route {route.path} needs the scopes {sorted(map(str, scopes))}: name exactly one in its signature, "
                "such as `key: InferenceKey`, or add the path to PUBLIC_PATHS"
            )


def is_operator(request: Request) -> bool:
    """Whether the request was sent with a key that has the scope `admin`."""
    caller: Caller | None = getattr(request.state, "caller", None)
    return caller is not None and Scope.ADMIN in caller.scopes
