import time

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from slora_api.keys.authentication import PUBLIC_PATHS, check_routes, is_public, required_scopes
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import TENANT_SCOPES, Scope, make_key
from slora_api.serve.app import make_router
from tests.api.platform import ADMIN_KEY, Platform, bearer, post


def walk_routes(platform: Platform) -> list[APIRoute]:
    routes = make_router(platform.services).routes
    found = [route for route in routes if isinstance(route, APIRoute)]
    assert len(found) == len(routes)
    return found


def needs(platform: Platform) -> list[tuple[str, str, Scope | None]]:
    """Method, path and scope of every route that needs a key, with a value for each path parameter. The scope is None
    if every valid key will do.
    """
    return [
        (method, route.path.replace("{", "").replace(":path}", "").replace("}", ""), scope)
        for route in walk_routes(platform)
        for scope in required_scopes(route)
        for method in route.methods
    ]


def routes(platform: Platform) -> list[tuple[str, str]]:
    """Method and path of every route, with a value for each path parameter."""
    found = [(method, path) for method, path, _ in needs(platform)]
    assert len(found) >= 25
    return found + [("GET", path) for path in PUBLIC_PATHS]


def ask(platform: Platform, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    return platform.api(None).request(method, platform.url + path, headers=headers)


def test_every_route_but_the_public_ones_is_closed_without_a_key(platform: Platform) -> None:
    for method, path in routes(platform):
        answer = ask(platform, method, path, {})
        assert (answer.status_code != 401) == is_public(path), (method, path)


def test_the_public_paths_are_those_of_health_checks_the_document_of_the_api_and_the_console() -> None:
    assert set(PUBLIC_PATHS) == {
        "/", "/healthz", "/readyz", "/health", "/ping", "/version", "/openapi.json", "/docs", "/console",
    }  # fmt: skip
    assert is_public("/console/app.js")


def test_a_route_that_does_not_exist_is_closed_too(platform: Platform) -> None:
    for path in (
        "/docs/",
        "/consoles",
        "//console/app.js",
        "/v1/nothing",
        "/healthz/",
        "//healthz",
        "/readyz/../metrics",
    ):
        assert ask(platform, "GET", path, {}).status_code == 401, path


def test_every_route_answers_only_keys_with_its_scope(platform: Platform) -> None:
    key_store = platform.services.keys.store
    platform.key("walker")

    def key_with(*scopes: Scope) -> dict[str, str]:
        return bearer(
            KeyAdmin(key_store).create_key(platform.tenant_id("walker"), scopes=frozenset(scopes))[1].secret
        )

    operator = bearer(KeyAdmin(key_store).create_operator_key("walker")[1].secret)
    scraper = bearer(
        KeyAdmin(key_store).create_operator_key("scraper", scopes={Scope.METRICS_READ})[1].secret
    )
    for method, path, needed in needs(platform):
        others = [] if needed is None else [key_with(*TENANT_SCOPES - {needed})]
        if needed is None:
            holders = [operator, bearer(ADMIN_KEY), scraper, *(key_with(scope) for scope in TENANT_SCOPES)]
        elif needed is Scope.METRICS_READ:
            holders = [operator, bearer(ADMIN_KEY), scraper]
        elif needed is Scope.ADMIN:
            holders = [operator, bearer(ADMIN_KEY)]
            others.append(scraper)
        else:
            holders = [key_with(needed)]
            others += [operator, bearer(ADMIN_KEY), scraper]
        for headers in others:
            answer = ask(platform, method, path, headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (403, "permission_error"), (method, path)
            assert f"needs the scope `{needed}`" in error["message"], (method, path)
        for headers in holders:
            assert ask(platform, method, path, headers).status_code not in (401, 403), (method, path)


def test_a_refusal_names_the_missing_scope_and_the_scopes_of_the_key(platform: Platform) -> None:
    platform.key("narrow")
    scopes = frozenset({Scope.ADAPTERS_READ, Scope.USAGE_READ})
    key = platform.services.keys.admin.create_key(platform.tenant_id("narrow"), scopes=scopes)[1].secret
    refused = post(platform, key, "/v1/completions", {"model": "base", "prompt": "x"})
    assert refused.status_code == 403
    assert refused.json()["error"] == {
        "message": "This route needs the scope `inference`, but your key has only `adapters:read`, `usage:read`. "
        "Ask the operator for a key that has it.",
        "type": "permission_error",
        "param": None,
        "code": "insufficient_permissions",
    }


def test_a_metrics_key_reads_the_metrics_and_nothing_else_of_an_operator(platform: Platform) -> None:
    platform.key("scraped")
    admin = platform.api(ADMIN_KEY)
    made = admin.post("/admin/keys", json={"name": "prometheus", "scopes": ["metrics:read"]})
    rotated = admin.post(f"/admin/keys/{made.json()['key_id']}/rotate")
    for refused in (["inference"], ["metrics:read", "usage:read"], []):
        answer = admin.post("/admin/keys", json={"name": "wide", "scopes": refused})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "scopes")
    answer = admin.post("/admin/tenants/scraped/keys", json={"scopes": ["metrics:read"]})
    assert answer.status_code == 400 and "POST /admin/keys" in answer.json()["error"]["message"]
    assert made.json()["scopes"] == rotated.json()["scopes"] == ["metrics:read"]
    scraper = platform.api(rotated.json()["key"])
    assert scraper.get("/metrics").status_code == 200
    refusal = scraper.get("/admin/tenants")
    assert refusal.status_code == 403
    assert "Use an operator's key with the scope `admin`." in refusal.json()["error"]["message"]
    assert scraper.get("/v1/me").json()["scopes"] == ["metrics:read"]


def test_a_server_with_a_route_that_names_no_scope_does_not_start() -> None:
    """Without this check, any key could call a new route whose author forgot the scope."""
    router = APIRouter()
    router.add_api_route("/healthz", lambda: None)
    check_routes(router.routes)
    router.add_api_route("/v1/forgotten", lambda: None)
    with pytest.raises(ValueError, match="route /v1/forgotten needs the scopes"):
        check_routes(router.routes)


def test_missing_malformed_unknown_expired_and_revoked_keys_get_the_same_answer(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid, key_store = platform.key("closed"), platform.services.keys.store
    expired = (
        KeyAdmin(key_store)
        .create_key(platform.tenant_id("closed"), expires_at=int(time.time()) + 3600)[1]
        .secret
    )
    monkeypatch.setattr(key_store, "wall_clock", lambda: time.time() + 7200)
    KeyAdmin(key_store).revoke_key(valid.split("_")[1])
    other = platform.key("closed")
    unknown = other[:-1] + ("1" if other.endswith("0") else "0")
    headers = [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic abc"},
        bearer("sk-x"),
        bearer(valid),
        bearer(expired),
        bearer(unknown),
    ]
    answers = [ask(platform, "GET", "/v1/models", sent) for sent in headers]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert valid not in answers[0].text


def test_a_key_is_shown_once_and_kept_as_a_hash(platform: Platform) -> None:
    admin = platform.api(ADMIN_KEY)
    admin.post("/admin/tenants", json={"name": "shown"})
    made = admin.post("/admin/tenants/shown/keys", json={"adapter": "mine"}).json()
    listed = admin.get("/admin/tenants/shown/keys").json()["data"]
    assert [(key["key_id"], key["adapter"], key["revoked"]) for key in listed] == [
        (made["key_id"], "mine", False)
    ]
    assert "key" not in listed[0]
    secret = made["key"].split("_")[2]
    assert not any(
        secret.encode() in path.read_bytes() for path in platform.directory.rglob("*") if path.is_file()
    )


def test_invalid_tenants_and_keys_are_refused(platform: Platform) -> None:
    admin = platform.api(ADMIN_KEY)
    assert admin.post("/admin/tenants", json={"name": "twice"}).status_code == 201
    again = admin.post("/admin/tenants", json={"name": "twice"})
    assert (again.status_code, again.headers["x-should-retry"]) == (409, "false")
    for name in ("", "UPPER", "-x", "a/b", "x" * 129, "é"):
        refused = admin.post("/admin/tenants", json={"name": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name"), name
    assert admin.post("/admin/tenants/nobody/keys").status_code == 404
    assert admin.get("/admin/tenants/nobody/keys").status_code == 404
    assert admin.post("/admin/tenants/twice/keys", json={"adapter": "No Name"}).status_code == 400
    assert admin.delete("/admin/keys/nothing0").status_code == 404


def test_importing_a_revoked_key_again_does_not_revive_it(platform: Platform) -> None:
    key_store, secret = platform.services.keys.store, make_key().secret
    adopting = platform.services.tenant_store.create_tenant("adopting").tenant_id
    for _ in range(2):
        KeyAdmin(key_store).import_key(adopting, None, secret)
    assert key_store.authenticate(secret) is not None
    KeyAdmin(key_store).revoke_key(secret.split("_")[1])
    KeyAdmin(key_store).import_key(adopting, None, secret)
    assert key_store.authenticate(secret) is None
