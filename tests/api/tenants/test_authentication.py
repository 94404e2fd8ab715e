from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from slora_api.server.app import make_router
from slora_api.tenants.api_key import make_key
from slora_api.tenants.authentication import PUBLIC_PATHS
from tests.api.platform import ADMIN_KEY, Platform, bearer, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("data"), ScriptedEngine([deltas_of(b"ok")])) as running:
        yield running


def walk(routes: Iterable[object]) -> Iterator[APIRoute]:
    """Yields every route. Newer FastAPI versions keep an included router whole, older ones copy its routes."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from walk(route.original_router.routes)  # type: ignore[attr-defined]


def walk_routes(platform: Platform) -> list[APIRoute]:
    return list(walk(make_router(platform.services).routes))


def routes(platform: Platform) -> list[tuple[str, str]]:
    """Method and path of every route, with a value for each path parameter."""
    found = walk_routes(platform)
    assert len(found) >= 15
    return [
        (method, route.path.replace("{", "").replace(":path}", "").replace("}", ""))
        for route in found
        for method in route.methods
    ]


def ask(platform: Platform, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    return httpx.request(method, platform.url + path, headers=headers)


def test_every_route_but_the_public_ones_is_closed_without_a_key(platform: Platform) -> None:
    for method, path in routes(platform):
        answer = ask(platform, method, path, {})
        assert (answer.status_code != 401) == (path in PUBLIC_PATHS), (method, path)


def test_the_public_paths_are_those_of_health_checks_and_the_document_of_the_api() -> None:
    assert set(PUBLIC_PATHS) == {"/healthz", "/readyz", "/openapi.json"}


def test_a_route_that_does_not_exist_is_closed_too(platform: Platform) -> None:
    for path in (
        "/",
        "/docs",
        "/v1/nothing",
        "/healthz/",
        "//healthz",
        "/readyz/../metrics",
    ):
        assert ask(platform, "GET", path, {}).status_code == 401, path


def test_every_route_is_either_for_tenants_or_for_the_operator(platform: Platform) -> None:
    tenant = bearer(platform.key("walker"))
    operator = bearer(ADMIN_KEY)
    for method, path in routes(platform):
        statuses = {ask(platform, method, path, headers).status_code for headers in (tenant, operator)}
        assert (403 in statuses) != (path in PUBLIC_PATHS), (method, path)
        assert 401 not in statuses, (method, path)


def test_operator_routes_are_closed_to_tenants(platform: Platform) -> None:
    tenant = bearer(platform.key("walker"))
    for method, path in routes(platform):
        if path.startswith("/admin") or path == "/metrics":
            answer = ask(platform, method, path, tenant)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error"), (
                method,
                path,
            )


def test_missing_malformed_unknown_and_revoked_keys_get_the_same_answer(platform: Platform) -> None:
    valid = platform.key("closed")
    platform.services.tenant_store.revoke_key(valid.split("_")[1])
    unknown = platform.key("closed")[:-1] + "0"
    headers = [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic abc"},
        bearer("sk-x"),
        bearer(valid),
        bearer(unknown),
    ]
    answers = [ask(platform, "GET", "/v1/models", sent) for sent in headers]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert valid not in answers[0].text


def test_a_revoked_key_is_refused_in_the_very_next_request(platform: Platform) -> None:
    with platform.client(ADMIN_KEY) as admin:
        admin.post("/admin/tenants", json={"name": "brief"})
        made = admin.post("/admin/tenants/brief/keys").json()
        assert (
            post(platform, made["key"], "/v1/completions", {"model": "base", "prompt": "x"}).status_code
            == 200
        )
        assert admin.delete(f"/admin/keys/{made['key_id']}").json()["revoked"] is True
    assert post(platform, made["key"], "/v1/completions", {"model": "base", "prompt": "x"}).status_code == 401


def test_a_key_is_shown_once_and_kept_as_a_hash(platform: Platform) -> None:
    with platform.client(ADMIN_KEY) as admin:
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
    with platform.client(ADMIN_KEY) as admin:
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
    tenant_store, secret = platform.services.tenant_store, make_key().secret
    tenant_store.create_tenant("adopting")
    assert tenant_store.import_key("adopting", None, secret) == tenant_store.import_key(
        "adopting", None, secret
    )
    assert tenant_store.authenticate(secret) is not None
    tenant_store.revoke_key(secret.split("_")[1])
    tenant_store.import_key("adopting", None, secret)
    assert tenant_store.authenticate(secret) is None


def test_keys_survive_a_restart(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as first:
        key = first.key("stays")
    with (
        running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as second,
        second.client(key) as client,
    ):
        assert client.get("/v1/models").status_code == 200
