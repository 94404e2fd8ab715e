"""Identifies the caller of each request. Every path needs a key, except those in PUBLIC_PATHS.

The middleware identifies the caller. A route's signature states which caller it accepts: `CurrentKey` for a tenant's
API key, `Operator` for the admin key. The two checks are independent, so a route that declares neither is still closed
to callers without a key.

/metrics is for the operator only, because it names the adapters of all tenants and shows how much each is used.
Prometheus sends a key with `authorization: {credentials_file: ...}`.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slora_adapters.database.audit_log import Actor, ActorKind, acting_as
from slora_adapters.errors import StoreUnavailable
from slora_api.errors import Forbidden, TenantSuspended, Unauthorized, error_response
from slora_api.tenants.admin_key import AdminKey
from slora_api.tenants.tenant_store import KeyRecord, TenantStatus, TenantStore

__all__ = [
    "PUBLIC_PATHS",
    "AuthenticationMiddleware",
    "CurrentKey",
    "Operator",
    "find_needed_key",
    "is_operator",
]

logger = logging.getLogger(__name__)

# Load balancers and container engines call the first two without a key. They reveal only whether the server is up and
# ready. The document of the API is the same for every server of a release.
PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})

# The audit log's name of the admin key.
BOOTSTRAP_KEY_ID = "bootstrap"

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _OperatorCaller:
    """The caller has sent the admin key."""


_Caller = _OperatorCaller | KeyRecord


class AuthenticationMiddleware:
    """ASGI middleware: stores the caller in the request's state, or answers 401."""

    def __init__(self, app: ASGIApp, tenant_store: TenantStore, admin_key: AdminKey) -> None:
        self._app = app
        self._tenant_store = tenant_store
        self._admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PUBLIC_PATHS:
            try:
                caller = await self._identify(Headers(scope=scope).get("authorization", ""))
            except StoreUnavailable as error:
                logger.warning("an API key cannot be checked: %s", error)
                await error_response(error)(scope, receive, send)
                return
            if caller is None:
                await error_response(Unauthorized())(scope, receive, send)
                return
            scope["state"]["caller"] = caller
            with acting_as(_actor(caller, scope)):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _identify(self, header: str) -> _Caller | None:
        match = _BEARER.fullmatch(header.strip())
        if match is None:
            return None
        if self._admin_key.matches(match[1]):
            return _OperatorCaller()
        if self._tenant_store.is_lookup_local(match[1]):
            return self._tenant_store.authenticate(match[1])
        return await asyncio.to_thread(self._tenant_store.authenticate, match[1])


def _actor(caller: _Caller, scope: Scope) -> Actor:
    """Returns whom the audit log names for changes that this request makes."""
    address = scope["client"][0] if scope.get("client") else ""
    request_id = scope["state"].get("request_id", "")
    if isinstance(caller, KeyRecord):
        return Actor(ActorKind.TENANT, caller.key_id, address, request_id)
    return Actor(ActorKind.OPERATOR, BOOTSTRAP_KEY_ID, address, request_id)


def _current_key(request: Request) -> KeyRecord:
    caller = getattr(request.state, "caller", None)
    if not isinstance(caller, KeyRecord):
        raise Forbidden(
            "This route is for tenants; the operator's key has no adapters. Use a tenant's API key."
        )
    if caller.status is not TenantStatus.ACTIVE:
        raise TenantSuspended(caller.tenant)
    return caller


def _operator(request: Request) -> None:
    if not is_operator(request):
        raise Forbidden("This route is for the operator; use the admin key.")


def find_needed_key(dependency: Callable[..., Any]) -> str | None:
    """Returns the kind of key that a dependency of a route demands. None if it demands no key."""
    return {_current_key: "tenant", _operator: "admin"}.get(dependency)


def is_operator(request: Request) -> bool:
    """Whether the request was sent with the admin key."""
    return isinstance(getattr(request.state, "caller", None), _OperatorCaller)


CurrentKey = Annotated[KeyRecord, Depends(_current_key)]
Operator = Annotated[None, Depends(_operator)]
