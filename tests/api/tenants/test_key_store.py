"""API keys: what is cached, what is refused, and what each kind of key may do."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from sqlalchemy import Executable

from slora.core.request import TenantShare
from slora_adapters.database.change_feed import Changes, read_changes
from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_api.core.errors import ServerBusy
from slora_api.keys.authentication import AuthenticationMiddleware
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import (
    PEPPER_BYTES,
    TENANT_SCOPES,
    VALID_KEY,
    AllowList,
    Caller,
    KeyRecord,
    Pepper,
    Scope,
    key_checksum,
    make_key,
    open_admin_key,
)
from slora_api.keys.key_store import KeyCache, KeyStore, RevocationJournal
from slora_api.quotas.quota import NO_QUOTA
from slora_api.quotas.quota_store import QuotaStore
from slora_api.serve.app import make_app
from slora_api.tenants.tenant_store import ShareChanges, TenantStore
from tests.api.live_server import live_server
from tests.api.platform import ADMIN_KEY, Platform, bearer, open_key_store
from tests.postgresql_server import PostgresqlServer
from tests.support.clock import Clock


def make_record(key_id: str) -> KeyRecord:
    times = (1, None, None, None)
    return KeyRecord(key_id, "T1", "acme", "", TENANT_SCOPES, None, None, *times, None, TenantShare())


@pytest.fixture
def store(database_place: str, tmp_path: Path) -> Iterator[KeyStore]:
    with closing(Database(database_place)) as database:
        yield open_key_store(database, tmp_path)


@pytest.fixture
def acme(store: KeyStore) -> str:
    """The id of a tenant."""
    return TenantStore(store.database, store).create_tenant("acme").tenant_id


def set_time(store: KeyStore, now: float) -> None:
    store.wall_clock = lambda: now


def guard_of(platform: Platform) -> AuthenticationMiddleware:
    keys = platform.services.keys
    generator: Any = platform.services.generator  # in place of an application, as no request gets that far
    return AuthenticationMiddleware(generator, keys.store, keys.use, keys.running, None)


def test_a_key_is_read_from_the_database_once_until_it_changes(database_place: str, tmp_path: Path) -> None:
    with closing(Database(database_place)) as database, closing(Database(database_place)) as far:
        store, other = open_key_store(database, tmp_path), open_key_store(far, tmp_path)
        tenants = TenantStore(far, other)
        acme = tenants.create_tenant("acme").tenant_id
        cursor = read_changes(database, None).cursor
        made, key = KeyAdmin(store).create_key(acme, "voice")
        assert not store.is_lookup_local(key.secret)
        found = store.authenticate(key.secret)
        assert found == made and store.is_lookup_local(key.secret)
        body = f"slora_{key.key_id}_{'0' * 43}"
        assert store.authenticate(f"{body}_{key_checksum(body)}") is None, "only the id is right"
        tenants.change_share(acme, ShareChanges(weight=2))
        store.apply_changes(changes := read_changes(database, cursor))
        assert not store.is_lookup_local(key.secret)
        found = store.authenticate(key.secret)
        assert isinstance(found, KeyRecord) and found.share == TenantShare(2)
        KeyAdmin(other).revoke_key(key.key_id)
        store.apply_changes(read_changes(database, changes.cursor))
        assert store.authenticate(key.secret) is None and other.authenticate(key.secret) is None


def test_after_a_resync_every_key_is_read_again(store: KeyStore, acme: str) -> None:
    _, key = KeyAdmin(store).create_key(acme)
    assert store.authenticate(key.secret) is not None and store.is_lookup_local(key.secret)
    store.apply_changes(Changes("0/", resync=True))
    assert not store.is_lookup_local(key.secret) and store.authenticate(key.secret) is not None


def test_a_cached_key_is_valid_for_a_while_without_the_database(
    postgresql_server: PostgresqlServer, tmp_path: Path
) -> None:
    clock = Clock()
    with closing(Database(postgresql_server.make_database())) as database:
        pepper, journal = Pepper(b"p" * PEPPER_BYTES), RevocationJournal(tmp_path / "revocations")
        store = KeyStore(database, pepper, journal, 60.0, clock)
        acme = TenantStore(database, store).create_tenant("acme").tenant_id
        (_, key), (_, unseen) = KeyAdmin(store).create_key(acme), KeyAdmin(store).create_key(acme)
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
            KeyAdmin(store).revoke_key(key.key_id)
        assert store.authenticate("no key at all") is None
        journal.close()


def test_a_key_that_is_revoked_while_it_is_looked_up_is_not_cached() -> None:
    cache = KeyCache[KeyRecord](lambda record: record.tenant)
    key = make_record("k")

    def find() -> KeyRecord:
        cache.drop("k")
        return key

    assert cache.look_up("k", find) == key and cache.get("k") is None
    assert cache.look_up("k", lambda: key) == cache.get("k") == key
    cache.drop_tenant("beta")
    assert cache.get("k") == key
    cache.drop_tenant("T1")
    assert cache.get("k") is None


def test_the_least_recently_used_keys_are_evicted() -> None:
    cache = KeyCache[KeyRecord](lambda record: record.tenant, max_keys=2)
    for key_id in ("a", "b", "c"):
        cache.look_up(key_id, lambda key_id=key_id: make_record(key_id))
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


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"scopes": []}, "scopes", "is empty"),
        ({"scopes": ["inference", "adapters:delete"]}, "scopes", "'adapters:delete', which is not a scope"),
        ({"scopes": ["admin"]}, "scopes", "create an operator's key with POST /admin/keys"),
        ({"scopes": "inference"}, "scopes", "list"),
        ({"expires_at": 1_000_000_000}, "expires_at", "is 1000000000, which is in the past"),
        ({"expires_at": 2_000_000_000_000}, "expires_at", "the limit is 253402300799"),
        ({"expires_at": "2030-01-01"}, "expires_at", "integer"),
        ({"name": "x" * 129}, "name", "at most 128 printable characters"),
        ({"name": "two\nlines"}, "name", "at most 128 printable characters"),
        ({"scope": ["inference"]}, "scope", "not a parameter"),
    ],
)
def test_an_invalid_key_is_refused_by_field_and_not_created(
    admin: httpx.Client, body: dict[str, Any], param: str, reason: str
) -> None:
    admin.post("/admin/tenants", json={"name": "invalid"})
    refused = admin.post("/admin/tenants/invalid/keys", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
    assert admin.get("/admin/tenants/invalid/keys").json()["data"] == []


def test_a_key_has_the_name_the_scopes_and_the_expiry_that_it_was_made_with(admin: httpx.Client) -> None:
    admin.post("/admin/tenants", json={"name": "described"})
    body = {
        "name": "CI of team A",
        "scopes": ["usage:read", "inference", "inference"],
        "expires_at": 4_000_000_000,
    }
    made = admin.post("/admin/tenants/described/keys", json=body).json()
    (listed,) = admin.get("/admin/tenants/described/keys").json()["data"]
    assert listed.items() <= made.items()
    assert (listed["name"], listed["scopes"]) == ("CI of team A", ["inference", "usage:read"])
    assert (listed["expires_at"], listed["last_used_at"], listed["revoked"]) == (4_000_000_000, None, False)


def test_a_key_is_valid_until_it_expires_also_while_it_is_cached(store: KeyStore, acme: str) -> None:
    set_time(store, 1000.5)
    _, key = KeyAdmin(store).create_key(acme, expires_at=1060)
    _, operators = KeyAdmin(store).create_operator_key("ada", expires_at=1060)
    for now in (1000.5, 1059.9):
        set_time(store, now)
        assert store.authenticate(key.secret) and store.authenticate(operators.secret)
    assert store.is_lookup_local(key.secret)
    set_time(store, 1060.0)
    assert store.authenticate(key.secret) is None and store.authenticate(operators.secret) is None


def test_operators_have_several_named_keys_which_can_be_revoked(
    platform: Platform, admin: httpx.Client
) -> None:
    ada, bob = (admin.post("/admin/keys", json={"name": name}).json() for name in ("ada", "bob"))
    assert (ada["tenant"], ada["scopes"]) == (None, ["admin"])
    client = platform.api(ada["key"])
    listed = client.get("/admin/keys").json()["data"]
    assert {"ada", "bob"} <= {key["name"] for key in listed} and not any("key" in key for key in listed)
    assert client.delete(f"/admin/keys/{bob['key_id']}").status_code == 200
    assert platform.api(bob["key"]).get("/admin/keys").status_code == 401
    refused = admin.post("/admin/keys", json={"name": ""})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")


def test_a_rotated_key_and_its_successor_are_both_valid_during_the_overlap(
    store: KeyStore, acme: str
) -> None:
    set_time(store, 1000.0)
    models = AllowList(frozenset({"voice"}))
    quotas = QuotaStore(store.database, NO_QUOTA)
    old, first = KeyAdmin(store).create_key(acme, "voice", name="ci", scopes={Scope.INFERENCE}, models=models)
    assert store.authenticate(first.secret) == old
    quotas.change_key_quota(first.key_id, {"tokens_per_day": 9})
    new, second = KeyAdmin(store).rotate_key(first.key_id, 60)
    assert quotas.find_key_subject(second.key_id).quota.tokens_per_day == 9
    assert isinstance(new, KeyRecord) and new.key_id == second.key_id != first.key_id
    assert (new.tenant, new.name, new.scopes) == (acme, "ci", {Scope.INFERENCE})
    assert (new.adapter, new.models, new.expires_at) == ("voice", models, None)
    assert store.authenticate(second.secret) == new and store.authenticate(first.secret) is not None
    listed = {key.key_id: key for key in KeyAdmin(store).list_keys(acme)}
    assert (listed[first.key_id].expires_at, listed[first.key_id].replaced_by) == (1060, second.key_id)
    set_time(store, 1060.0)
    assert store.authenticate(first.secret) is None and store.authenticate(second.secret) is not None


def test_a_rotation_keeps_the_lifetime_of_a_key_and_never_prolongs_the_old_one(store: KeyStore) -> None:
    set_time(store, 1000.0)
    _, key = KeyAdmin(store).create_operator_key("ada", expires_at=1500)
    set_time(store, 1400.0)
    new, secret = KeyAdmin(store).rotate_key(key.key_id, 3600)
    assert (new.expires_at, new.name) == (1900, "ada")
    assert store.authenticate(secret.secret) == new
    expiries = {one.key_id: one.expires_at for one in KeyAdmin(store).list_operator_keys()}
    assert expiries == {key.key_id: 1500, secret.key_id: 1900}
    again, _ = KeyAdmin(store).rotate_key(secret.key_id, 0, expires_at=5000)
    assert again.expires_at == 5000 and store.authenticate(secret.secret) is None


def test_a_key_that_cannot_be_rotated_is_refused_with_the_reason(admin: httpx.Client) -> None:
    admin.post("/admin/tenants", json={"name": "rotating"})

    def rotate(key_id: str, **body: int) -> tuple[int, str]:
        answer = admin.post(f"/admin/keys/{key_id}/rotate", json=body)
        error = answer.json().get("error", {"message": answer.json().get("key_id")})
        return answer.status_code, error["message"]

    def new_key() -> str:
        key_id: str = admin.post("/admin/tenants/rotating/keys").json()["key_id"]
        return key_id

    key_id = new_key()
    for overlap in (-1, 30 * 86_400 + 1):
        status, message = rotate(key_id, overlap_seconds=overlap)
        assert status == 400 and f"`overlap_seconds` is {overlap}; it must be from 0 to 2592000" in message
    assert rotate(key_id, expires_at=1)[0] == 400
    status, successor = rotate(key_id)
    assert status == 201
    status, message = rotate(key_id)
    assert status == 409 and f"was rotated already: key `{successor}` replaces it" in message
    revoked = new_key()
    admin.delete(f"/admin/keys/{revoked}").raise_for_status()
    status, message = rotate(revoked)
    assert status == 409 and "is revoked" in message
    assert rotate("nothing0")[0] == 404
    status, message = rotate("bootstrap")
    assert status == 409 and "SLORA_ADMIN_KEY" in message
    assert len(admin.get("/admin/tenants/rotating/keys").json()["data"]) == 3


def test_the_bootstrap_key_cannot_be_revoked(admin: httpx.Client) -> None:
    refused = admin.delete("/admin/keys/bootstrap")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "key_conflict")
    assert "admin-key.hmac" in refused.json()["error"]["message"]


def test_without_a_bootstrap_key_the_last_valid_key_of_an_operator_is_kept(
    platform: Platform, tmp_path: Path
) -> None:
    store = platform.services.keys.store
    for key in KeyAdmin(store).list_operator_keys():
        KeyAdmin(store).revoke_key(key.key_id)
    assert not KeyAdmin(store).has_operator_key()
    (_, ada), (_, bob) = (KeyAdmin(store).create_operator_key(name) for name in ("ada", "bob"))
    KeyAdmin(store).create_operator_key("scraper", scopes={Scope.METRICS_READ})
    app = make_app(platform.services, None)
    with (
        live_server(app) as url,
        httpx.Client(base_url=url, headers=bearer(ada.secret), verify=False) as client,
    ):
        assert httpx.get(url + "/admin/keys", headers=bearer(ADMIN_KEY), verify=False).status_code == 401
        assert client.delete(f"/admin/keys/{bob.key_id}").status_code == 200
        refused = client.delete(f"/admin/keys/{ada.key_id}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "key_conflict")
        assert "is the last valid key of an operator" in refused.json()["error"]["message"]
        assert client.get("/admin/keys").status_code == 200


def test_no_bootstrap_key_is_generated_while_an_operator_has_a_key(tmp_path: Path) -> None:
    pepper = Pepper(b"p" * PEPPER_BYTES)
    assert open_admin_key("", tmp_path, pepper, is_needed=False) is None
    assert open_admin_key("given-by-the-operator", tmp_path, pepper, is_needed=False) is not None
    assert list(tmp_path.iterdir()) == []
    made = open_admin_key("", tmp_path, pepper)
    assert made is not None and made.shown_once is not None
    assert open_admin_key("", tmp_path, pepper, is_needed=False) is not None


def test_unknown_wrong_expired_and_revoked_keys_cost_the_same_work(
    database_place: str, tmp_path: Path
) -> None:
    """Each costs one comparison and no read of the database, so that the time does not tell which it was."""
    clock = Clock(1000.0)
    journal = RevocationJournal(tmp_path / "revocations")
    with closing(Database(database_place)) as database, closing(journal):
        pepper = Pepper(b"p" * PEPPER_BYTES)
        store = KeyStore(database, pepper, journal, clock=lambda: 0.0, wall_clock=clock)
        acme = TenantStore(database, store).create_tenant("acme").tenant_id
        _, known = KeyAdmin(store).create_key(acme)
        _, expired = KeyAdmin(store).create_key(acme, expires_at=1010)
        _, revoked = KeyAdmin(store).create_key(acme)
        body = f"slora_{known.key_id}_{'0' * 43}"
        KeyAdmin(store).revoke_key(revoked.key_id)
        secrets = {
            "unknown": make_key().secret,
            "wrong": f"{body}_{key_checksum(body)}",
            "expired": expired.secret,
            "revoked": revoked.secret,
        }
        for secret in secrets.values():
            store.authenticate(secret)  # the first time, each is looked up
        clock.now = 1010.0
        with (
            patch.object(database, "read", wraps=database.read) as read,
            patch.object(Pepper, "matches", autospec=True, side_effect=Pepper.matches) as matches,
        ):
            for number, secret in enumerate(secrets.values(), start=1):
                assert store.is_lookup_local(secret) and store.authenticate(secret) is None
                assert (matches.call_count, read.call_count) == (number, 0)


def test_a_repeated_unknown_key_is_looked_up_once_a_second(tmp_path: Path) -> None:
    clock, lookups = Clock(), []
    cache = KeyCache[KeyRecord](lambda record: record.tenant, clock=clock)
    for clock.now in (0.0, 0.1, 0.9, 1.1):
        if not cache.is_absent("k"):
            cache.look_up("k", lambda: lookups.append(clock.now))  # type: ignore[func-returns-value]
    assert lookups == [0.0, 1.1]
    for number in range(20_000):
        cache.look_up(str(number), lambda: None)
    assert sum(cache.is_absent(str(number)) for number in range(20_000)) == 10_000


def test_a_key_that_was_sent_before_it_was_created_is_accepted_at_once(store: KeyStore, acme: str) -> None:
    secret = make_key().secret
    assert store.authenticate(secret) is None
    KeyAdmin(store).import_key(acme, None, secret)
    assert store.authenticate(secret) is not None


def test_a_flood_of_unknown_keys_does_not_keep_a_key_from_being_looked_up(
    platform: Platform,
) -> None:
    """The flood comes from one address, and the honest client has another one."""
    database, honest = platform.services.keys.store.database, platform.key("honest")
    order: list[str] = []
    read = database.read

    def slow_read(statement: Executable, parameters: Any = None) -> Any:
        if statement is VALID_KEY:
            time.sleep(0.002)
            order.append(parameters["key_id"])
        return read(statement, parameters)

    async def run() -> tuple[int, Caller | None]:
        guard = guard_of(platform)
        flood = [
            asyncio.create_task(guard.identify(f"Bearer {make_key().secret}", "10.0.0.1")) for _ in range(400)
        ]
        await asyncio.sleep(0)
        found = await guard.identify(f"Bearer {honest}", "10.0.0.2")
        answers = await asyncio.gather(*flood, return_exceptions=True)
        return sum(isinstance(answer, ServerBusy) for answer in answers), found

    with patch.object(database, "read", slow_read):
        num_refused, found = asyncio.run(run())
    assert isinstance(found, KeyRecord) and found.tenant_name == "honest"
    assert num_refused > 200
    assert order.index(found.key_id) < 16, "it did not wait behind the flood"


def test_requests_with_the_same_key_share_one_lookup_of_it(platform: Platform) -> None:
    """Born from a soak of a thousand streams: a server that had just started refused some of them."""
    key_store, secret = platform.services.keys.store, platform.key("crowd")
    read, num_reads = key_store.database.read, 0

    def slow_read(statement: Executable, parameters: Any = None) -> Any:
        nonlocal num_reads
        if statement is VALID_KEY:
            time.sleep(0.01)
            num_reads += 1
        return read(statement, parameters)

    async def run() -> list[Caller | None]:
        guard = guard_of(platform)
        first, *others = [
            asyncio.create_task(guard.identify(f"Bearer {secret}", "10.0.0.1")) for _ in range(400)
        ]
        await asyncio.sleep(0)
        # The client of the first request leaves during the lookup.
        first.cancel()
        return await asyncio.gather(*others)

    key_store.drop_key(secret.split("_")[1])
    with patch.object(key_store.database, "read", slow_read):
        callers = asyncio.run(run())
    assert {caller.tenant_name for caller in callers if isinstance(caller, KeyRecord)} == {"crowd"}
    assert len(callers) == 399 and all(callers)
    # The request that left had begun a lookup, and one other request began another.
    assert num_reads <= 2


def test_requests_that_waited_for_a_lookup_are_not_answered_with_an_outdated_one(platform: Platform) -> None:
    key_store, secret = platform.services.keys.store, platform.key("revoked")
    key_id, read = secret.split("_")[1], key_store.database.read
    is_reading, is_revoked = threading.Event(), threading.Event()

    def read_before_the_revocation(statement: Executable, parameters: Any = None) -> Any:
        found = read(statement, parameters)
        if statement is VALID_KEY:
            is_reading.set()
            is_revoked.wait(60)
        return found

    async def run() -> Caller | None:
        guard = guard_of(platform)
        early = asyncio.create_task(guard.identify(f"Bearer {secret}", "10.0.0.1"))
        await asyncio.to_thread(is_reading.wait, 60)
        await asyncio.to_thread(KeyAdmin(key_store).revoke_key, key_id)
        late = asyncio.create_task(guard.identify(f"Bearer {secret}", "10.0.0.1"))
        await asyncio.sleep(0)
        is_revoked.set()
        await early
        return await late

    key_store.drop_key(key_id)
    with patch.object(key_store.database, "read", read_before_the_revocation):
        assert asyncio.run(run()) is None


def test_no_log_and_no_repr_has_a_secret(
    platform: Platform, admin: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    admin.post("/admin/tenants", json={"name": "quiet"})
    made = admin.post("/admin/tenants/quiet/keys").json()
    rotated = admin.post(f"/admin/keys/{made['key_id']}/rotate").json()
    operators = admin.post("/admin/keys", json={"name": "quiet"}).json()
    secrets = [made["key"], rotated["key"], operators["key"], make_key().secret]
    texts = []
    for secret in secrets:
        client = platform.api(secret)
        for path in ("/v1/models", f"/v1/models/{secret}", f"/v1/adapters/{secret}", "/admin/keys"):
            texts.append(client.get(path, headers={"x-request-id": "r"}).text)
    key_store = platform.services.keys.store
    KeyAdmin(key_store).revoke_key(made["key_id"])
    admin_key = open_admin_key(ADMIN_KEY, platform.directory, key_store.pepper)
    texts += [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    texts += [
        *(repr(key_store.authenticate(secret)) for secret in secrets),
        repr(key_store),
        repr(admin_key),
        repr(KeyAdmin(key_store).list_keys(platform.tenant_id("quiet"))),
    ]
    for hidden in (ADMIN_KEY, *(secret.split("_")[2] for secret in secrets)):
        assert not any(hidden in text for text in texts)
    digest = key_store.pepper.digest(rotated["key"])
    assert not any(repr(digest)[2:-1] in text for text in texts)
