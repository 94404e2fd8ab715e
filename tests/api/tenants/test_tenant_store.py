"""Shares of tenants: an operator's change applies to the next request."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora.tenant_share import TenantShare
from slora_adapters.database.change_feed import Changes, read_changes
from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_api.errors import BadRequest, NotFound
from slora_api.tenants.api_key import PEPPER_BYTES, Pepper, _checksum, make_key
from slora_api.tenants.key_cache import KeyCache
from slora_api.tenants.revocation_journal import RevocationJournal
from slora_api.tenants.tenant_store import KeyRecord, ShareChanges, TenantStore, _StoredKey
from tests.api.platform import ADMIN_KEY, Platform, open_tenant_store, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.postgresql_server import PostgresqlServer

PROMPT = {"model": "base", "prompt": "hello"}
DEFAULT = {"weight": 1.0, "min_pool_share": 0.0, "max_pool_share": 1.0, "priority": 0}


@pytest.fixture
def tenant_store(database_place: str, tmp_path: Path) -> Iterator[TenantStore]:
    with closing(Database(database_place)) as database:
        yield open_tenant_store(database, tmp_path)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("data"), ScriptedEngine([deltas_of(b"ok")])) as running:
        yield running


@pytest.fixture(scope="module")
def admin(platform: Platform) -> Iterator[httpx.Client]:
    with platform.client(ADMIN_KEY) as client:
        yield client


def share_of(tenant: dict[str, Any]) -> dict[str, Any]:
    return {name: tenant[name] for name in DEFAULT}


def test_a_tenant_has_the_default_share_until_it_is_given_another(admin: httpx.Client) -> None:
    made = admin.post("/admin/tenants", json={"name": "plain"})
    assert (made.status_code, share_of(made.json())) == (201, DEFAULT)
    changed = admin.patch("/admin/tenants/plain", json={"weight": 2, "min_pool_share": 0.1})
    assert (changed.status_code, share_of(changed.json())) == (
        200,
        DEFAULT | {"weight": 2.0, "min_pool_share": 0.1},
    )
    # Fields that are not named keep their values.
    again = admin.patch("/admin/tenants/plain", json={"max_pool_share": 0.5, "priority": -5, "weight": None})
    expected = {"weight": 2.0, "min_pool_share": 0.1, "max_pool_share": 0.5, "priority": -5}
    assert share_of(again.json()) == expected
    assert admin.get("/admin/tenants/plain").json() == again.json()
    assert again.json() in admin.get("/admin/tenants").json()["data"]


def test_a_tenant_can_be_made_with_a_share(admin: httpx.Client) -> None:
    made = admin.post("/admin/tenants", json={"name": "made", "weight": 3, "max_pool_share": 0.25})
    assert share_of(made.json()) == DEFAULT | {"weight": 3.0, "max_pool_share": 0.25}


def test_a_new_share_holds_for_the_very_next_request_of_the_process_that_makes_it(
    platform: Platform, admin: httpx.Client
) -> None:
    key = platform.key("changing")
    post(platform, key, "/v1/completions", PROMPT)
    admin.patch("/admin/tenants/changing", json={"weight": 4, "min_pool_share": 0.1, "priority": 2})
    post(platform, key, "/v1/completions", PROMPT)
    assert [request.share for request in platform.engine.requests[-2:]] == [
        TenantShare(),
        TenantShare(4, 0.1, 1, 2),
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": -1}, "weight"),
        ({"weight": 1e9}, "weight"),
        ({"weight": "2"}, "weight"),
        ({"min_pool_share": -0.1}, "min_pool_share"),
        ({"max_pool_share": 1.1}, "max_pool_share"),
        ({"min_pool_share": 0.5, "max_pool_share": 0.4}, "max_pool_share"),
        ({"priority": 1001}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"wieght": 2}, "wieght"),
    ],
)
def test_an_invalid_share_is_refused_by_field(
    admin: httpx.Client, changes: dict[str, Any], param: str
) -> None:
    admin.post("/admin/tenants", json={"name": "refused"})
    for answer in (
        admin.patch("/admin/tenants/refused", json=changes),
        admin.post("/admin/tenants", json={"name": "never-made", **changes}),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert share_of(admin.get("/admin/tenants/refused").json()) == DEFAULT
    assert admin.get("/admin/tenants/never-made").status_code == 404


@pytest.mark.parametrize("weight", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_non_numeric_weight_is_refused(admin: httpx.Client, weight: bytes) -> None:
    admin.post("/admin/tenants", json={"name": "refused"})
    answer = admin.patch(
        "/admin/tenants/refused",
        content=b'{"weight": %s}' % weight,
        headers={"Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weight")


def test_changing_the_share_of_an_unknown_tenant_is_refused(
    admin: httpx.Client, tenant_store: TenantStore
) -> None:
    assert admin.patch("/admin/tenants/nobody", json={"weight": 2}).status_code == 404
    with pytest.raises(NotFound):
        tenant_store.find_tenant("nobody")


def test_floors_of_all_tenants_fit_the_pool_together(tenant_store: TenantStore) -> None:
    for name, floor in (("a", 0.7), ("b", 0.2), ("c", 0.1)):
        tenant_store.create_tenant(name, ShareChanges(min_pool_share=floor))
    tenant_store.create_tenant("d")
    with pytest.raises(
        BadRequest, match=r"is 0.25, but the shares of other tenants leave only 0 of the pool"
    ):
        tenant_store.change_share("d", ShareChanges(min_pool_share=0.25))
    with pytest.raises(BadRequest, match=r"leave only 0\.2 of the pool"):
        tenant_store.change_share("b", ShareChanges(min_pool_share=0.3))
    with pytest.raises(BadRequest):
        tenant_store.create_tenant("e", ShareChanges(min_pool_share=0.01))
    assert [(tenant.name, tenant.share.min_share) for tenant in tenant_store.list_tenants()] == [
        ("a", 0.7),
        ("b", 0.2),
        ("c", 0.1),
        ("d", 0.0),
    ]
    tenant_store.change_share("a", ShareChanges(min_pool_share=0.4))
    assert tenant_store.change_share("d", ShareChanges(min_pool_share=0.25)).share.min_share == 0.25


def test_a_floor_above_the_current_ceiling_is_refused(tenant_store: TenantStore) -> None:
    tenant_store.create_tenant("t", ShareChanges(max_pool_share=0.3))
    with pytest.raises(BadRequest, match=r"0\.5, which is more than `max_pool_share` \(0\.3\)") as caught:
        tenant_store.change_share("t", ShareChanges(min_pool_share=0.5))
    assert caught.value.param == "min_pool_share"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_read_from_the_database_once_until_it_changes(database_place: str, tmp_path: Path) -> None:
    with closing(Database(database_place)) as database, closing(Database(database_place)) as far:
        store, other = open_tenant_store(database, tmp_path), open_tenant_store(far, tmp_path)
        store.create_tenant("acme")
        cursor = read_changes(database, None).cursor
        made, key = store.create_key("acme", "voice")
        assert not store.is_lookup_local(key.secret)
        found = store.authenticate(key.secret)
        assert found == made and store.is_lookup_local(key.secret)
        body = f"slora_{key.key_id}_{'0' * 43}"
        assert store.authenticate(f"{body}_{_checksum(body)}") is None, "only the id is right"
        other.change_share("acme", ShareChanges(weight=2))
        store.apply_changes(changes := read_changes(database, cursor))
        assert not store.is_lookup_local(key.secret)
        found = store.authenticate(key.secret)
        assert found is not None and found.share == TenantShare(2)
        other.revoke_key(key.key_id)
        store.apply_changes(read_changes(database, changes.cursor))
        assert store.authenticate(key.secret) is None and other.authenticate(key.secret) is None


def test_after_a_resync_every_key_is_read_again(database_place: str, tmp_path: Path) -> None:
    with closing(Database(database_place)) as database:
        store = open_tenant_store(database, tmp_path)
        store.create_tenant("acme")
        _, key = store.create_key("acme")
        assert store.authenticate(key.secret) is not None and store.is_lookup_local(key.secret)
        store.apply_changes(Changes("0/", resync=True))
        assert not store.is_lookup_local(key.secret) and store.authenticate(key.secret) is not None


def test_a_cached_key_is_valid_for_a_while_without_the_database(
    postgresql_server: PostgresqlServer, tmp_path: Path
) -> None:
    clock = Clock()
    with closing(Database(postgresql_server.make_database())) as database:
        pepper, journal = Pepper(b"p" * PEPPER_BYTES), RevocationJournal(tmp_path / "revocations")
        store = TenantStore(database, pepper, journal, 60.0, clock)
        store.create_tenant("acme")
        (_, key), (_, unseen) = store.create_key("acme"), store.create_key("acme")
        clock.now = 10.0
        store.apply_changes(read_changes(database, None))
        assert store.authenticate(key.secret) is not None
        postgresql_server.kill()
        clock.now = 70.0
        assert store.authenticate(key.secret) is not None
        for secret in (unseen.secret, make_key().secret):
            with pytest.raises(StoreUnavailable):
                store.authenticate(secret)
        clock.now = 70.1
        with pytest.raises(StoreUnavailable):
            store.authenticate(key.secret)
        with pytest.raises(StoreUnavailable):
            store.revoke_key(key.key_id)
        assert store.authenticate("no key at all") is None
        journal.close()


def test_a_key_that_is_revoked_while_it_is_looked_up_is_not_cached() -> None:
    cache = KeyCache[_StoredKey]()
    key = _StoredKey(KeyRecord("k", "acme", None, 1, None, TenantShare()), b"")

    def find() -> _StoredKey:
        cache.drop("k")
        return key

    assert cache.look_up("k", find) == key and cache.get("k") is None
    assert cache.look_up("k", lambda: key) == cache.get("k") == key
    cache.drop_tenant("beta")
    assert cache.get("k") == key
    cache.drop_tenant("acme")
    assert cache.get("k") is None


def test_the_least_recently_used_keys_are_evicted() -> None:
    cache = KeyCache[_StoredKey](max_keys=2)
    for key_id in ("a", "b", "c"):
        record = KeyRecord(key_id, "acme", None, 1, None, TenantShare())
        cache.look_up(key_id, lambda record=record: _StoredKey(record, b""))
        cache.get("a")
    assert [key_id for key_id in "abc" if cache.get(key_id)] == ["a", "c"]


@pytest.mark.parametrize("adapter", ["default", "default@prod", "default@3", "base@prod", "base@1"])
def test_a_key_for_an_adapter_that_can_never_exist_is_refused(admin: httpx.Client, adapter: str) -> None:
    """Born from a bug: the key was created, and then each of its requests was a 404."""
    admin.post("/admin/tenants", json={"name": "keyed"})
    refused = admin.post("/admin/tenants/keyed/keys", json={"adapter": adapter})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "adapter")
    assert adapter in error["message"] and "omit `adapter`" in error["message"]
    assert admin.get("/admin/tenants/keyed/keys").json()["data"] == []


def test_a_key_may_name_the_base_model_or_a_future_adapter(admin: httpx.Client) -> None:
    admin.post("/admin/tenants", json={"name": "named"})
    for adapter in (None, "base", "later", "later@prod", "defaults"):
        assert admin.post("/admin/tenants/named/keys", json={"adapter": adapter}).status_code == 201
