"""Calls every route of the OpenAPI document with every kind of key that the route must refuse.

An isolated server refuses all these calls, so they change nothing. If a server accepts a call by mistake, the names in
the call's path still belong to no object.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from slora_api.cli.isolation.audited_server import AuditedServer, AuditedTenant
from slora_api.cli.isolation.finding import Finding
from slora_api.cli.remote import check

__all__ = ["walk_routes", "walk_suspended"]

_PROBE = "routes"
_ADMIN, _METRICS = "admin", "metrics:read"
_OPERATOR_SCOPES = frozenset({_ADMIN, _METRICS})
# Routes that need no key, routes that accept any valid key, and routes for operators only. The audit has these lists of
# its own, because the server's rules may be wrong.
_PUBLIC = ("/healthz", "/readyz", "/health", "/ping", "/version", "/openapi.json", "/docs")
_ANY_KEY = ("/v1/me",)
_OPERATORS = re.compile(r"/admin(/.*)?|/metrics|/load|/v1/(un)?load_lora_adapter")
# Paths that other LLM servers left open, and path spellings that bypassed the checks of such servers.
_HIDDEN = (
    "/redoc", "/pause", "/invocations", "/server_info", "/v1",
    "/load_lora_adapter_from_tensors", "/v1/models/", "//v1/models", "/V1/models", "/v1/models;x", "/v1%2fmodels",
    "/healthz/../v1/models", "/healthz/%2e%2e/v1/models", "/healthz/", "/openapi.json/../admin/tenants",
)  # fmt: skip
_UNKNOWN_KEY = "slora_AAAAAAAA_" + 43 * "A" + "_AAAAAA"


class _Operation(NamedTuple):
    method: str
    path: str
    scopes: frozenset[str]

    @property
    def is_public(self) -> bool:
        return self.path in _PUBLIC

    def url(self) -> str:
        """Returns the path, with each parameter replaced by a name that does not exist."""
        return re.sub(r"\{.*?\}", "audit-nothing", self.path)


def walk_routes(server: AuditedServer, tenant: AuditedTenant) -> Iterator[Finding]:
    operations = list(_operations(check(server.send("GET", "/openapi.json"))))
    closed = [one for one in operations if not one.is_public]

    def refused(cell: str, status: int, key: str | None, which: Callable[[_Operation], bool]) -> Finding:
        called = [one for one in closed if which(one)]
        return _expect_status(server, cell, status, key, called)

    def anything(_: _Operation) -> bool:
        return True

    yield _undeclared(operations)
    yield refused("without a key", 401, None, anything)
    yield refused("with an unknown key", 401, _UNKNOWN_KEY, anything)
    yield refused("with a revoked key", 401, tenant.revoked_key, anything)
    yield refused("operators' routes with a tenant's key", 403, tenant.key, _is_for_operators)
    yield refused(
        "tenants' routes with the admin key", 403, server.admin_key,
        lambda one: bool(one.scopes) and not _is_for_operators(one),
    )  # fmt: skip
    for scope in sorted({scope for one in closed for scope in one.scopes} - {_ADMIN}):

        def needs_another(one: _Operation, scope: str = scope) -> bool:
            return bool(one.scopes - {scope})

        with _key_with(scope, server, tenant) as key:
            yield refused(f"with the scope {scope} alone", 403, key, needs_another)
    yield _hidden_paths(server)
    # Without this check, a server that refuses everything would pass.
    opened = server.send("GET", "/v1/models", tenant.key).status_code
    yield Finding(_PROBE, "a tenant's own route with its key", "200", str(opened), opened == 200)


@contextmanager
def _key_with(scope: str, server: AuditedServer, tenant: AuditedTenant) -> Iterator[str]:
    """Yields a key that has only this scope. If the scope is an operator's, the key is revoked at the end."""
    if scope not in _OPERATOR_SCOPES:
        yield tenant.make_key([scope])
        return
    made = server.manage("POST", "/admin/keys", {"name": "audit", "scopes": [scope]})
    try:
        yield made["key"]
    finally:
        server.manage("DELETE", f"/admin/keys/{made['key_id']}")


def _is_for_operators(operation: _Operation) -> bool:
    return not operation.scopes.isdisjoint(_OPERATOR_SCOPES)


def walk_suspended(server: AuditedServer, tenant: AuditedTenant) -> Finding:
    """Suspends the tenant, and checks that its key is refused. The tenant stays suspended."""
    server.manage("POST", f"/admin/tenants/{tenant.name}/suspend")
    operations = _operations(check(server.send("GET", "/openapi.json")))
    called = [one for one in operations if not one.is_public and not _is_for_operators(one)]
    return _expect_status(server, "with the key of a suspended tenant", 403, tenant.key, called)


def _operations(document: Mapping[str, Any]) -> Iterator[_Operation]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            needs = [scope for one in operation.get("security", ()) for scope in one.get("api_key", ())]
            yield _Operation(method.upper(), path, frozenset(needs))


def _undeclared(operations: list[_Operation]) -> Finding:
    """Compares the scopes that the OpenAPI document declares with the audit's own rules."""
    wrong = [
        f"{one.method} {one.path}"
        for one in operations
        if (not one.scopes) != (one.is_public or one.path in _ANY_KEY)
        or _is_for_operators(one) != bool(_OPERATORS.fullmatch(one.path))
    ]
    return Finding(
        _PROBE, "declared scopes", "a scope on each of the routes that need a key",
        _summary(len(operations), wrong), not wrong,
    )  # fmt: skip


def _expect_status(
    server: AuditedServer, cell: str, status: int, key: str | None, called: list[_Operation]
) -> Finding:
    wrong = []
    for one in called:
        answer = server.send(one.method, one.url(), key)
        if answer.status_code != status:
            wrong.append(f"{one.method} {one.path} answered {answer.status_code}")
    return Finding(
        _PROBE, cell, f"{status} from all", _summary(len(called), wrong), bool(called) and not wrong
    )


def _hidden_paths(server: AuditedServer) -> Finding:
    wrong = []
    for path in _HIDDEN:
        for method in ("GET", "POST"):
            answer = _send_raw(server, method, path)
            if answer.status_code != 401:
                wrong.append(f"{method} {path} answered {answer.status_code}")
    cell = "odd and undocumented paths without a key"
    return Finding(_PROBE, cell, "401 from all", _summary(2 * len(_HIDDEN), wrong), not wrong)


def _send_raw(server: AuditedServer, method: str, path: str) -> httpx.Response:
    """Sends a request with exactly this path, without normalizing it."""
    url = server.client.base_url.copy_with(raw_path=path.encode())
    return server.client.send(server.client.build_request(method, url))


def _summary(num_called: int, wrong: list[str]) -> str:
    if not wrong:
        return f"all {num_called}"
    shown = "; ".join(wrong[:3])
    return f"{shown}; and {len(wrong) - 3} more" if len(wrong) > 3 else shown
