"""The probes of `slora audit isolation`. Each one tries to see or use the data of another tenant.

`walk_routes` and `walk_suspended` call every route of the OpenAPI document with every kind of key that the route must
refuse. An isolated server refuses all these calls, so they change nothing. If a server accepts a call by mistake, the
names in the call's path still belong to no object.

`compare_lookups` compares what a tenant learns about another tenant's adapters and about missing adapters.

`compare_prefixes` checks for pairs of tenants and adapters whether a request reuses the computed prefix of an earlier
request. With the same tenant and adapter, the prefix must be reused. Otherwise, the other cells would prove nothing.
"""

import json
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from slora_api.cli.remote import CommandFailed, check
from slora_api.operations.isolation.audited_server import AuditedServer, AuditedTenant

_ROUTES = "routes"
_ADMIN, _METRICS = "admin", "metrics:read"
_OPERATOR_SCOPES = frozenset({_ADMIN, _METRICS})
# Routes that need no key, routes that accept any valid key, and routes for operators only. The audit has these lists of
# its own, because the server's rules may be wrong.
_PUBLIC = ("/healthz", "/readyz", "/health", "/ping", "/version", "/openapi.json", "/docs")
_ANY_KEY = ("/v1/me", "/v1/prices")
_OPERATORS = re.compile(r"/admin(/.*)?|/metrics|/load|/v1/(un)?load_lora_adapter")
# Paths that other LLM servers left open, and path spellings that bypassed the checks of such servers.
_HIDDEN = (
    "/redoc", "/pause", "/invocations", "/server_info", "/v1",
    "/load_lora_adapter_from_tensors", "/v1/models/", "//v1/models", "/V1/models", "/v1/models;x", "/v1%2fmodels",
    "/healthz/../v1/models", "/healthz/%2e%2e/v1/models", "/healthz/", "/openapi.json/../admin/tenants",
)  # fmt: skip
_UNKNOWN_KEY = "slora_AAAAAAAA_" + 43 * "A" + "_AAAAAA"

_ENUMERATION = "enumeration"
# Requests that name an adapter. NAME is replaced by the adapter's name.
_LOOKUPS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/v1/models/NAME", None),
    ("GET", "/v1/adapters/NAME", None),
    ("GET", "/v1/adapters/NAME@1", None),
    ("GET", "/v1/adapters/NAME/versions", None),
    ("GET", "/v1/adapters/NAME/aliases", None),
    ("GET", "/v1/adapters/NAME/aliases/latest", None),
    ("PUT", "/v1/adapters/NAME/aliases/prod", {"versions": {"1": 100}}),
    ("DELETE", "/v1/adapters/NAME/aliases/prod", None),
    ("POST", "/v1/adapters/NAME/aliases/latest/rollback", None),
    ("POST", "/v1/adapters/NAME/prewarm", None),
    ("DELETE", "/v1/adapters/NAME", None),
    ("POST", "/v1/completions", {"model": "NAME", "prompt": "a", "max_tokens": 1}),
    ("POST", "/v1/chat/completions", {"model": "NAME", "messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/responses", {"model": "NAME", "input": "a"}),
    ("POST", "/v1/responses/input_tokens", {"model": "NAME", "input": "a"}),
    (
        "POST",
        "/v1/messages",
        {"model": "NAME", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    ),
    ("POST", "/v1/messages/count_tokens", {"model": "NAME", "messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/embeddings", {"model": "NAME", "input": "a"}),
    ("POST", "/v1/classify", {"model": "NAME", "input": "a"}),
    ("POST", "/v1/score", {"model": "NAME", "text_1": "a", "text_2": "a"}),
    ("POST", "/v1/rerank", {"model": "NAME", "query": "a", "documents": ["a"]}),
)

_PREFIXES = "prefix cache"
# Attempts per cell. On a busy server, the prefix may be evicted between the two requests, which hides a hit.
_TRIES = 3
_MAX_PROMPT_CHARS = 1024


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One check of the audit, which the output calls a cell.

    expected: what an isolated server answers. seen: what this server answered.
    """

    probe: str
    cell: str
    expected: str
    seen: str
    ok: bool


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


def walk_routes(server: AuditedServer, tenant: AuditedTenant) -> Iterator[ProbeResult]:
    operations = list(_operations(check(server.send("GET", "/openapi.json"))))
    closed = [one for one in operations if not one.is_public]

    def refused(cell: str, status: int, key: str | None, which: Callable[[_Operation], bool]) -> ProbeResult:
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
    yield ProbeResult(_ROUTES, "a tenant's own route with its key", "200", str(opened), opened == 200)


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


def walk_suspended(server: AuditedServer, tenant: AuditedTenant) -> ProbeResult:
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


def _undeclared(operations: list[_Operation]) -> ProbeResult:
    """Compares the scopes that the OpenAPI document declares with the audit's own rules."""
    wrong = [
        f"{one.method} {one.path}"
        for one in operations
        if (not one.scopes) != (one.is_public or one.path in _ANY_KEY)
        or _is_for_operators(one) != bool(_OPERATORS.fullmatch(one.path))
    ]
    return ProbeResult(
        _ROUTES, "declared scopes", "a scope on each of the routes that need a key",
        _summary(len(operations), wrong), not wrong,
    )  # fmt: skip


def _expect_status(
    server: AuditedServer, cell: str, status: int, key: str | None, called: list[_Operation]
) -> ProbeResult:
    wrong = []
    for one in called:
        answer = server.send(one.method, one.url(), key)
        if answer.status_code != status:
            wrong.append(f"{one.method} {one.path} answered {answer.status_code}")
    return ProbeResult(
        _ROUTES, cell, f"{status} from all", _summary(len(called), wrong), bool(called) and not wrong
    )


def _hidden_paths(server: AuditedServer) -> ProbeResult:
    wrong = []
    for path in _HIDDEN:
        for method in ("GET", "POST"):
            answer = _send_raw(server, method, path)
            if answer.status_code != 401:
                wrong.append(f"{method} {path} answered {answer.status_code}")
    cell = "odd and undocumented paths without a key"
    return ProbeResult(_ROUTES, cell, "401 from all", _summary(2 * len(_HIDDEN), wrong), not wrong)


def _send_raw(server: AuditedServer, method: str, path: str) -> httpx.Response:
    """Sends a request with exactly this path, without normalizing it."""
    url = server.client.base_url.copy_with(raw_path=path.encode())
    return server.client.send(server.client.build_request(method, url))


def _summary(num_called: int, wrong: list[str]) -> str:
    if not wrong:
        return f"all {num_called}"
    shown = "; ".join(wrong[:3])
    return f"{shown}; and {len(wrong) - 3} more" if len(wrong) > 3 else shown


# -- enumeration ------------------------------------------------------------------------------------------------------


def compare_lookups(prober: AuditedTenant, foreign: str) -> Iterator[ProbeResult]:
    """Compares the answers about another tenant's adapter with the answers about a missing adapter.

    foreign: the name of an adapter that only another tenant has.
    """
    # The missing name has the same length, so that the sizes of the answers can also be compared.
    nothing = foreign[:-1] + ("0" if foreign[-1] != "0" else "1")
    for method, path, body in _LOOKUPS:
        known, unknown = (_look_up(prober, method, path, body, name) for name in (foreign, nothing))
        seen = known[0] if known == unknown else f"{_show(known)} instead of {_show(unknown)}"
        cell = f"{method} {path.replace('NAME', '{name}')} of another tenant"
        yield ProbeResult(
            _ENUMERATION,
            cell,
            "the 404 of a name that does not exist",
            str(seen),
            known == unknown and known[0] == 404,
        )


def _look_up(
    prober: AuditedTenant, method: str, path: str, body: dict[str, Any] | None, name: str
) -> tuple[int, str, tuple[str, ...]]:
    """Returns the status, the body with a placeholder for the name, and the header names."""
    sent = None if body is None else json.loads(json.dumps(body).replace("NAME", name))
    # Some answers repeat the id of their request.
    headers = {"x-request-id": "audit"}
    answer = prober.server.send(method, path.replace("NAME", name), prober.key, headers, json=sent)
    return answer.status_code, answer.text.replace(name, "NAME"), tuple(sorted(answer.headers))


def _show(answer: tuple[int, str, tuple[str, ...]]) -> str:
    return f"{answer[0]} {answer[1][:80]}"


# -- prefixes ---------------------------------------------------------------------------------------------------------


class Prompts:
    """Random prompts of one length, which no tenant has sent before."""

    def __init__(self, server: AuditedServer, key: str) -> None:
        limits = check(server.send("GET", "/v1/limits", key))
        # A token has at least one character, so a prompt fills at most half of the context.
        self._num_chars = min(limits["max_model_len"] // 2, _MAX_PROMPT_CHARS)
        self._random = random.Random()

    def draw(self) -> str:
        return "".join(self._random.choices(string.ascii_lowercase + " ", k=self._num_chars - 1)) + "."


class _Sender(NamedTuple):
    tenant: AuditedTenant
    model: str


def compare_prefixes(
    owner: AuditedTenant, other: AuditedTenant, shared: tuple[str, str], own: str, base: str
) -> Iterator[ProbeResult]:
    """Yields one finding for each pair of tenants and adapters.

    shared: the names that the owner and the other tenant gave to the same adapter. own: the name that both tenants gave
        to a second adapter. base: the name of the base model.
    """
    prompts = Prompts(owner.server, owner.key)
    adapted = _Sender(owner, shared[0])
    plain = _Sender(owner, base)
    cells = (
        ("same tenant, same adapter", adapted, adapted, True),
        ("same tenant, other adapter", adapted, _Sender(owner, own), False),
        ("other tenant, same adapter", adapted, _Sender(other, shared[1]), False),
        ("other tenant, other adapter", adapted, _Sender(other, own), False),
        ("same tenant, base model", plain, plain, True),
        ("other tenant, base model", plain, _Sender(other, base), False),
        ("same tenant, base model after an adapter", adapted, plain, False),
        ("same tenant, adapter after the base model", plain, adapted, False),
    )
    for cell, first, second, is_hit in cells:
        cached = _count_reused(prompts, first, second)
        yield ProbeResult(
            _PREFIXES,
            cell,
            "> 0 tokens reused" if is_hit else "0 tokens reused",
            str(cached),
            (cached > 0) == is_hit,
        )


def _count_reused(prompts: Prompts, first: _Sender, second: _Sender) -> int:
    """Returns how many prompt tokens the second request found in the cache. Tries several fresh prompts until the
    second request finds a token.
    """
    cached = 0
    for _ in range(_TRIES):
        prompt = prompts.draw()
        _cached_tokens(first, prompt)
        cached = _cached_tokens(second, prompt)
        if cached:
            break
    return cached


def _cached_tokens(sender: _Sender, prompt: str) -> int:
    answer = check(sender.tenant.server.complete(sender.tenant.key, sender.model, prompt))
    try:
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    except KeyError:
        raise CommandFailed(
            "the server's answers have no usage.prompt_tokens_details.cached_tokens"
        ) from None
    return cached
