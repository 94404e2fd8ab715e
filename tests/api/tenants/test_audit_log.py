"""Every change has one entry, written in its transaction, with who made it, from where and when."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event

from slora_adapters.database.audit_log import (
    Actor,
    ActorKind,
    AuditFilter,
    AuditLog,
    acting_as,
    command_actor,
)
from slora_adapters.database.database import Database
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.keys.key_admin import KeyAdmin
from slora_api.tenants.tenant_store import ShareChanges, TenantStore
from tests.adapters.hand_made import make_members
from tests.api.platform import ADMIN_KEY, Platform, open_key_store, open_tenant_store, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.tenants.test_authentication import walk_routes

ALL = AuditFilter()
# Routes that change nothing in the database.
_NO_CHANGES = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/classify", "/classify", "/v1/score", "/v1/rerank", "/rerank",
    "/tokenize", "/detokenize",
    "/v1/adapters/{reference}/prewarm",
}  # fmt: skip


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    root = tmp_path_factory.mktemp("data")
    for name, raw in make_members().items():
        (root / "lora" / "local").mkdir(parents=True, exist_ok=True)
        (root / "lora" / "local" / name).write_bytes(raw)
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(root, engine, lora_root=str(root / "lora")) as running:
        yield running


def entries(platform: Platform, **wanted: Any) -> list[dict[str, Any]]:
    answer = platform.api(ADMIN_KEY).get("/admin/audit", params=wanted).raise_for_status().json()
    found: list[dict[str, Any]] = answer["data"]
    return found


# Method, route and body of each change, in an order in which all succeed -> the actions that are recorded.
_CHANGES: list[tuple[str, str, str, Any, list[str]]] = [
    ("operator", "POST", "/admin/tenants", {"name": "acme"}, ["tenant.create"]),
    ("operator", "PATCH", "/admin/tenants/{tenant}", {"weight": 2}, ["tenant.change"]),
    ("operator", "POST", "/admin/tenants/{tenant}/suspend", None, ["tenant.suspend"]),
    ("operator", "POST", "/admin/tenants/{tenant}/resume", None, ["tenant.resume"]),
    ("operator", "POST", "/admin/tenants/{tenant}/keys", None, ["key.create"]),
    ("operator", "POST", "/admin/keys", {"name": "ada"}, ["key.create"]),
    ("tenant", "POST", "/v1/adapters", "voice", ["adapter.push"]),
    ("operator", "POST", "/admin/tenants/{tenant}/adapters", "voice", []),  # the same adapter again
    ("operator", "POST", "/admin/tenants/{tenant}/adapters", "other", ["adapter.push"]),
    ("tenant", "PUT", "/v1/adapters/{name}/aliases/{alias}", {"versions": {"1": 100}}, ["alias.move"]),
    ("tenant", "PUT", "/v1/adapters/{name}/aliases/{alias}", {"versions": {"1": 100}}, []),
    (
        "tenant",
        "PUT",
        "/v1/adapters/{name}/aliases/{alias}",
        {"versions": {"1": 100}, "follows_pushes": True},
        ["alias.move"],
    ),
    ("tenant", "POST", "/v1/adapters/{name}/aliases/{alias}/rollback", None, ["alias.rollback"]),
    ("operator", "PUT", "/admin/tenants/{tenant}/adapters/{name}/pin", None, ["adapter.pin"]),
    ("operator", "DELETE", "/admin/tenants/{tenant}/adapters/{name}/pin", None, ["adapter.unpin"]),
    ("tenant", "DELETE", "/v1/adapters/{name}/aliases/{alias}", None, ["alias.delete"]),
    ("tenant", "DELETE", "/v1/adapters/{reference}", None, ["adapter.delete"]),
    ("tenant", "POST", "/v1/files", "lines", ["file.create"]),
    ("tenant", "POST", "/v1/batches", None, ["batch.create"]),
    ("tenant", "POST", "/v1/batches/{batch_id}/cancel", None, ["batch.cancel"]),
    ("tenant", "POST", "/v1/batches/{batch_id}/cancel", None, []),  # it is being cancelled already
    ("tenant", "POST", "/v1/files", "lines", ["file.create"]),
    ("tenant", "DELETE", "/v1/files/{file_id}", None, ["file.delete"]),
    (
        "operator",
        "POST",
        "/v1/load_lora_adapter",
        {"lora_name": "local", "lora_path": "local", "tenant": "acme"},
        ["adapter.push"],
    ),
    (
        "operator",
        "POST",
        "/v1/unload_lora_adapter",
        {"lora_name": "local", "tenant": "acme"},
        ["adapter.delete"],
    ),
    ("operator", "PUT", "/admin/prices", {"input": 0.5, "output": 2}, ["prices.change"]),
    ("operator", "PATCH", "/admin/tenants/{tenant}/quota", {"tokens_per_day": 9}, ["quota.change"]),
    ("operator", "PATCH", "/admin/keys/{key_id}/quota", {"tokens_per_day": 9}, ["quota.change"]),
    ("operator", "POST", "/admin/keys/{key_id}/rotate", None, ["key.rotate"]),
    ("operator", "DELETE", "/admin/keys/{key_id}", None, ["key.revoke"]),
    (
        "operator",
        "POST",
        "/admin/tenants/{tenant}/purge",
        {"confirm": "acme", "ledger": "keep"},
        ["tenant.purged", "tenant.purge"],
    ),
    ("operator", "POST", "/admin/engines/{name}/restart", {"allow_outage": True}, ["engine.restart"]),
]


def test_every_route_that_changes_something_records_it_once(platform: Platform) -> None:
    routes = {
        (method, route.path)
        for route in walk_routes(platform)
        for method in route.methods
        if method != "GET" and route.path not in _NO_CHANGES
    }
    assert routes == {(method, path) for _, method, path, _, _ in _CHANGES}
    secret = last_id = ""
    for caller, method, path, body, actions in _CHANGES:
        last = max((entry["id"] for entry in entries(platform)), default=0)
        place = path.format(
            tenant="acme",
            name="engine" if path.startswith("/admin/engines") else "voice",
            alias="prod",
            reference="voice",
            key_id=(secret + "__").split("_")[1],
            file_id=last_id,
            batch_id=last_id,
        )
        started = time.time()
        if method == "POST" and path.endswith("/adapters"):
            answer = platform.upload(ADMIN_KEY if caller == "operator" else secret, body, path=place)
        elif path == "/v1/files":
            answer = platform.api(secret).post(path, data={"purpose": "batch"}, files={"file": body.encode()})
        else:
            if path == "/v1/batches":
                body = {"input_file_id": last_id, "endpoint": "/v1/completions", "completion_window": "24h"}
            answer = platform.api(ADMIN_KEY if caller == "operator" else secret).request(
                method, place, json=body
            )
        assert answer.is_success, (method, path, answer.text)
        if path.startswith(("/v1/files", "/v1/batches")):
            last_id = answer.json()["id"]
        new = [entry for entry in entries(platform) if entry["id"] > last]
        assert [entry["action"] for entry in new] == actions, (method, path)
        if path.endswith("{tenant}/keys"):
            secret = answer.json()["key"]
        for entry in new:
            name = "bootstrap" if caller == "operator" else secret.split("_")[1]
            assert (entry["actor_kind"], entry["actor"]) == (caller, name)
            owner = (
                ""
                if path in ("/admin/keys", "/admin/prices") or path.startswith("/admin/engines")
                else "acme"
            )
            assert (entry["address"], entry["tenant"]) == ("127.0.0.1", owner)
            assert entry["request_id"] == answer.headers["x-request-id"]
            assert started - 1 <= entry["created"] <= time.time() + 1
            assert (secret or ADMIN_KEY).split("_")[-2:][0] not in repr(entry)
    platform.engine.lost.clear()


def test_entries_say_what_changed(platform: Platform) -> None:
    key = platform.key("detailed", "voice@prod")
    admin = platform.api(ADMIN_KEY)
    admin.patch("/admin/tenants/detailed", json={"weight": 3, "max_pool_share": 0.5})
    digest = platform.upload(key, "voice").json()["digest"]
    admin.delete(f"/admin/keys/{key.split('_')[1]}")
    revoked, pushed, changed, _, created = entries(platform, tenant="detailed")
    assert (revoked["action"], revoked["target"]) == ("key.revoke", key.split("_")[1])
    assert (pushed["target"], pushed["details"]["added"]) == ("voice", {"1": digest})
    latest = {"targets": {"1": 100}, "follows_pushes": True, "pinned": False}
    assert pushed["details"]["aliases"] == {"latest": latest}
    assert changed["details"] == {"weight": [1.0, 3.0], "max_pool_share": [1.0, 0.5]}
    assert created["action"] == "tenant.create"


def test_entries_are_filtered_and_paged_newest_first(platform: Platform) -> None:
    for name in ("page-a", "page-b", "page-c"):
        platform.key(name)
    assert {entry["action"] for entry in entries(platform, action="key")} == {
        "key.create",
        "key.rotate",
        "key.revoke",
    }
    assert {entry["action"] for entry in entries(platform, action="tenant.create")} == {"tenant.create"}
    assert entries(platform, action="ten") == []
    assert entries(platform, actor="bootstrap", tenant="page-a") == [], "the test itself made the key"
    admin = platform.api(ADMIN_KEY)
    params: dict[str, Any] = {"limit": 2, "action": "tenant.create"}
    first = admin.get("/admin/audit", params=params).json()
    second = admin.get("/admin/audit", params={**params, "after": first["last_id"]}).json()
    assert [entry["tenant"] for entry in first["data"]] == ["page-c", "page-b"] and first["has_more"]
    newest, made_at = second["data"][0], first["data"][1]["created"]
    assert newest["tenant"] == "page-a"
    ids = {entry["id"] for entry in entries(platform, since=made_at, limit=1000)}
    assert first["data"][1]["id"] in ids and newest["id"] not in ids
    assert newest["id"] in {entry["id"] for entry in entries(platform, until=made_at, limit=1000)}


@pytest.mark.parametrize(
    ("params", "param"), [({"since": "x"}, "since"), ({"until": "nan"}, "until"), ({"after": 0}, "after")]
)
def test_an_invalid_filter_is_refused_by_field(
    platform: Platform, params: dict[str, Any], param: str
) -> None:
    answer = platform.api(ADMIN_KEY).get("/admin/audit", params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_client_cannot_choose_the_address_that_is_recorded(platform: Platform) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "X-Forwarded-For": "203.0.113.9"}
    httpx.post(platform.url + "/admin/tenants", json={"name": "spoofed"}, headers=headers)
    (entry,) = entries(platform, tenant="spoofed")
    assert entry["address"] == "127.0.0.1"


def test_a_change_that_is_refused_leaves_no_entry(platform: Platform) -> None:
    last = entries(platform, limit=1)
    admin = platform.api(ADMIN_KEY)
    assert admin.post("/admin/tenants", json={"name": "greedy", "min_pool_share": 1}).status_code == 201
    assert admin.post("/admin/tenants", json={"name": "late", "min_pool_share": 1}).status_code == 400
    assert admin.post("/admin/tenants", json={"name": "greedy"}).status_code == 409
    admin.patch("/admin/tenants/greedy", json={"min_pool_share": 0})
    post(platform, platform.key("greedy"), "/v1/completions", {"model": "base", "prompt": "x"})
    new = entries(platform, since=last[0]["created"])
    assert not [entry for entry in new if entry["tenant"] == "late"]


# -- on both databases -------------------------------------------------------------------------------------------------


def test_a_change_without_an_actor_is_the_servers(database: Database, tmp_path: Path) -> None:
    store = open_tenant_store(database, tmp_path)
    a = store.create_tenant("a").tenant_id
    operator = Actor(ActorKind.OPERATOR, "bootstrap", "10.0.0.1", "req_1")
    with acting_as(operator):
        store.change_share(a, ShareChanges(weight=2))
    changed, created = AuditLog(database).read(ALL, 10)
    assert (changed.actor, created.actor) == (operator, Actor(ActorKind.SERVER))


def test_an_entry_that_cannot_be_written_undoes_its_change(database: Database, tmp_path: Path) -> None:
    keys, registry = open_key_store(database, tmp_path), Registry(database)
    store = TenantStore(database, keys)
    a = store.create_tenant("a").tenant_id
    _, key = KeyAdmin(keys).create_key(a)

    def refuse(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "INSERT INTO audit_log" in statement:
            raise KeyError("no room")

    event.listen(Engine, "before_cursor_execute", refuse)
    details = AdapterDetails(8, ("q_proj",), 1)
    for change in (
        lambda: store.create_tenant("b"),
        lambda: store.suspend(a),
        lambda: KeyAdmin(keys).create_key(a),
        lambda: store.change_share(a, ShareChanges(weight=2)),
        lambda: registry.put("voice", AdapterVersion(a, "1" * 64), details),
    ):
        with pytest.raises(KeyError):
            change()
    event.remove(Engine, "before_cursor_execute", refuse)
    (tenant,) = store.list_tenants()
    assert (tenant.name, tenant.share.weight, tenant.status) == ("a", 1.0, "active")
    assert len(KeyAdmin(keys).list_keys(a)) == 1 and registry.list(a) == []
    assert [entry.action for entry in AuditLog(database).read(ALL, 10)] == ["key.create", "tenant.create"]
    assert keys.authenticate(key.secret) is not None


def test_no_cache_keeps_the_answer_with_a_new_key(platform: Platform) -> None:
    admin = platform.api(ADMIN_KEY)
    admin.post("/admin/tenants", json={"name": "uncached"})
    made = [admin.post("/admin/tenants/uncached/keys"), admin.post("/admin/keys", json={"name": "uncached"})]
    made += [admin.post(f"/admin/keys/{one.json()['key_id']}/rotate") for one in made]
    assert all(one.status_code == 201 and one.headers["cache-control"] == "no-store" for one in made)


def test_a_command_of_a_user_whom_the_machine_does_not_know_names_the_user_id(
    set_variables: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(LOGNAME=None, USER=None, LNAME=None, USERNAME=None)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    assert command_actor().name == "uid 54321"
