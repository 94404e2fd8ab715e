"""A purge deletes everything that a tenant has, nothing of others, and may be interrupted anywhere."""

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageRecord
from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.store.file_store import FileStore
from slora_adapters.version import AdapterVersion
from slora_api.keys.key_admin import KeyAdmin
from slora_api.operations.tenant_purge import TenantPurges
from slora_api.tenants.tenant_store import KEPT_TABLES, OWN_TABLES, TenantStore
from slora_api.usage.usage_ledger import UsageLedger
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.conftest import Kit
from tests.api.platform import ADMIN_KEY, Platform, open_key_store, post
from tests.api.served import Served, wait_for
from tests.api.server.test_server import upload as push
from tests.support.forked_program import ForkedProgram

PROMPT = {"model": "base", "prompt": "hello"}


def purge(admin: httpx.Client, tenant: str, **body: Any) -> httpx.Response:
    return admin.post(f"/admin/tenants/{tenant}/purge", json={"confirm": tenant, "ledger": "keep", **body})


def digests(platform: Platform) -> set[str]:
    return {path.name for path in (platform.directory / "adapters" / "blobs").glob("*/*")}


def upload(platform: Platform, key: str, name: str, seed: int) -> str:
    answer = platform.upload(key, name, make_members(tensors=make_tensors(seed=seed))).raise_for_status()
    return str(answer.json()["digest"])


def record_of(tenant: str, request_id: str, key_id: str = "key") -> UsageRecord:
    return UsageRecord(request_id, tenant, key_id, None, 1_790_000_000.0, RequestUsage(1, 0, 1, 0, 0.0))


def rows_with(database: Database, tenant: str) -> set[str]:
    """The names of the tables with a row of the tenant."""
    return {
        table.name
        for table in schema.metadata.sorted_tables
        if any(tenant in map(str, row) for row in database.read(select(table)))
    }


def test_a_purge_deletes_what_only_this_tenant_has(platform: Platform, admin: httpx.Client) -> None:
    key, other = platform.key("leaver", "voice@prod"), platform.key("stayer")
    own = upload(platform, key, "voice", 1)
    shared = upload(platform, key, "shared", 2)
    assert upload(platform, other, "mine", 2) == shared
    platform.api(key).put("/v1/adapters/voice/aliases/prod", json={"versions": {"1": 100}}).raise_for_status()
    admin.put("/admin/tenants/leaver/adapters/voice/pin").raise_for_status()
    assert digests(platform) >= {own, shared}
    leaver = platform.tenant_id("leaver")
    found = purge(admin, "leaver").raise_for_status().json()
    assert found.pop("blob_bytes") > 0 and found.pop("tenant_id") == leaver
    assert found == {
        **{"object": "tenant.purge", "tenant": "leaver", "keys": 1, "adapters": 2, "versions": 2, "blobs": 1},
        **{"blobs_kept": 1, "requests": 1, "pool_pages": 3, "pool_bytes": 3 * 1024, "usage_records": None},
    }
    assert own not in digests(platform) and shared in digests(platform)
    assert post(platform, key, "/v1/completions", PROMPT).status_code == 401
    assert admin.get("/admin/tenants/leaver").status_code == 404
    assert post(platform, other, "/v1/completions", {**PROMPT, "model": "mine"}).status_code == 200
    database = platform.services.keys.store.database
    assert rows_with(database, leaver) == {"audit_log", "changes", "former_tenants"}
    # Once by the purge itself, and once by the feed, as on other hosts.
    wait_for(lambda: platform.engine.purged.count(leaver) >= 2 or None)
    assert purge(admin, "leaver").status_code == 404
    again = platform.key("leaver")
    assert platform.api(again).get("/v1/adapters").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [({"confirm": "other"}, "confirm"), ({"confirm": None}, "confirm"), ({"ledger": "drop"}, "ledger")],
)
def test_a_purge_without_confirmation_changes_nothing(
    platform: Platform, admin: httpx.Client, body: dict[str, Any], param: str
) -> None:
    key = platform.key("careful")
    answer = purge(admin, "careful", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert post(platform, key, "/v1/completions", PROMPT).status_code == 200


def test_usage_is_kept_or_erased_as_asked(platform: Platform, admin: httpx.Client) -> None:
    database = platform.services.keys.store.database
    ledger = UsageLedger(database)
    for name, choice, left in (("payer", "keep", 2), ("ghost", "erase", 0)):
        platform.key(name)
        tenant = platform.tenant_id(name)
        ledger.add([record_of(tenant, f"{name}{number}") for number in range(2)])
        found = purge(admin, name, ledger=choice).raise_for_status().json()
        assert found["usage_records"] == (None if choice == "keep" else 2)
        c = schema.usage_records.c
        assert len(database.read(select(c.request_id).where(c.tenant == tenant))) == left
        assert ("usage_buckets" in rows_with(database, tenant)) == bool(left)


@pytest.mark.parametrize(
    "step",
    [
        "_adapters.purge_blobs",
        "_ledger.erase",
        "_tenant_store.finish_purge",
        "_adapters.registry.blobs.collect",
    ],
)
def test_a_purge_that_is_interrupted_is_completed_by_repeating_it(
    platform: Platform, admin: httpx.Client, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = step.rpartition(".")[2].replace("_", "-")
    key = platform.key(tenant)
    blobs = {upload(platform, key, f"a{number}", 100 + number) for number in range(2)}
    *path, name = step.split(".")
    owner: Any = platform.find(TenantPurges)
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), []

    def fail(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if name == "collect" and len(calls) == 1:  # the first blob is deleted, the second is not
            return real(*arguments, **named)
        raise StoreUnavailable("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        assert purge(admin, tenant, ledger="erase").status_code == 503
    assert admin.get(f"/admin/tenants/{tenant}").json()["status"] == "purging"
    refused = post(platform, key, "/v1/completions", PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")
    for action in ("suspend", "resume"):
        answer = admin.post(f"/admin/tenants/{tenant}/{action}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "purge_begun")
    tenant_id = platform.tenant_id(tenant)
    found = purge(admin, tenant, ledger="erase").raise_for_status().json()
    assert (found["keys"], found["versions"], found["blobs"]) == (1, 2, 2)
    assert not blobs & digests(platform)
    left = rows_with(platform.services.keys.store.database, tenant_id)
    assert left == {"audit_log", "changes", "former_tenants"}


def test_every_table_of_tenants_is_purged_or_outlives_them() -> None:
    """A table of keys or tenants without the column `tenant` would keep its rows."""
    shared = {"platform", "adapter_reservations", "erased_keys", "former_tenants"}
    purged = {table.name for table in OWN_TABLES}
    kept = {table.name for table in KEPT_TABLES}
    assert purged | kept | shared | {"tenants"} == set(schema.metadata.tables)
    assert not purged & kept


def test_a_purge_deletes_the_same_rows_on_both_databases(database_place: str, tmp_path: Path) -> None:
    with closing(Database(database_place)) as database:
        keys, ledger = open_key_store(database, tmp_path), UsageLedger(database)
        store = TenantStore(database, keys)
        leaver, stayer = (store.create_tenant(name).tenant_id for name in ("leaver", "stayer"))
        for tenant in (leaver, stayer):
            KeyAdmin(keys).create_key(tenant)
            ledger.add([record_of(tenant, f"{tenant}{number}") for number in range(3)])
        store.begin_purge(leaver)
        assert ledger.erase(leaver) == 3 and ledger.erase(leaver) == 0
        assert store.finish_purge(leaver, {})["api_keys"] == 1
        assert rows_with(database, leaver) == {"audit_log", "changes", "former_tenants"}
        assert rows_with(database, stayer) >= {"tenants", "api_keys", "usage_records", "usage_buckets"}


def test_a_server_answers_nothing_of_a_purged_tenant_and_all_of_others(server: Served, kit: Kit) -> None:
    key, other = server.make_key("purged-tenant"), server.make_key("purge-witness")
    asked = {"model": "voice", "prompt": "hello hello hello hello", "max_tokens": 8, "temperature": 0}

    def complete(secret: str) -> httpx.Response:
        with server.client(secret) as client:
            return client.post("/v1/completions", json=asked)

    for secret in (key, other):
        push(server, secret, "voice", kit.wide).raise_for_status()
    before = complete(other).raise_for_status().json()["choices"]
    assert complete(key).raise_for_status().json()["choices"] == before
    with server.client(ADMIN_KEY) as admin:
        found = purge(admin, "purged-tenant").raise_for_status().json()
    # On a busy machine, the feed may tell the engine before the purge does. Its count is then 0.
    assert (found["pool_pages"] > 0) == (found["pool_bytes"] > 0) and found["blobs_kept"] == 1
    assert complete(key).status_code == 401
    assert complete(other).raise_for_status().json()["choices"] == before
    again = server.make_key("purged-tenant")
    assert complete(again).status_code == 404
    push(server, again, "voice", kit.wide).raise_for_status()
    assert complete(again).raise_for_status().json()["choices"] == before


def test_erased_usage_does_not_come_back_with_what_journals_still_have(
    database_place: str, tmp_path: Path
) -> None:
    with closing(Database(database_place)) as database:
        keys, ledger = open_key_store(database, tmp_path), UsageLedger(database)
        store = TenantStore(database, keys)
        erased, kept = (store.create_tenant(name).tenant_id for name in ("erased", "kept"))
        (_, gone), (_, other) = KeyAdmin(keys).create_key(erased), KeyAdmin(keys).create_key(kept)
        store.begin_purge(erased)
        ledger.erase(erased)
        store.finish_purge(erased, {})
        late = [record_of(erased, "r1", gone.key_id), record_of(kept, "r2", other.key_id)]
        assert ledger.add(late) == 1 and ledger.add(late[:1]) == 0
        assert rows_with(database, erased) == {"audit_log", "changes", "former_tenants"}
        again = store.create_tenant("erased").tenant_id
        _, key = KeyAdmin(keys).create_key(again)
        assert ledger.add([record_of(again, "r3", key.key_id)]) == 1, "a new tenant of that name"


# Purges in a child that is killed after each number of SQL statements, until a child survives.
KILLED_PURGES = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from slora_adapters.database.database import Database
from slora_adapters.registry.registry import StoredAdapters
from slora_adapters.registry.registry import Registry
from slora_adapters.store.file_store import FileStore
from slora_api.keys.key_record import Pepper
from slora_api.keys.key_store import KeyStore
from slora_api.keys.key_store import RevocationJournal
from slora_api.tenants.tenant_store import KEPT_TABLES, OWN_TABLES, TenantStore
from slora_api.usage.usage_ledger import UsageLedger

place, directory, leaver = sys.argv[1], Path(sys.argv[2]), sys.argv[4]

def purge():
    database = Database(place)
    keys = KeyStore(database, Pepper.from_file(directory / "pepper"), RevocationJournal(directory / "revocations"))
    store, ledger = TenantStore(database, keys), UsageLedger(database)
    catalog = StoredAdapters(Registry(database), FileStore(directory / "store"))
    left = [step]

    @event.listens_for(Engine, "after_cursor_execute")
    def count(*_):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    store.begin_purge(leaver)
    catalog.purge_blobs(leaver)
    ledger.erase(leaver)
    store.finish_purge(leaver, {})
    os._exit(0)

step, status = 1, None
while status != 0:
    if not (child := os.fork()):
        purge()
    status = os.waitpid(child, 0)[1]
    if status not in (0, signal.SIGKILL):
        sys.exit(f"step {step}: {status}")
    step += int(sys.argv[3])
print(step)
"""


def test_a_purge_that_is_killed_at_any_step_is_completed_by_repeating_it(
    database_place: str, tmp_path: Path, soak: bool
) -> None:
    store = FileStore(tmp_path / "store")
    with closing(Database(database_place)) as database:
        keys, registry = open_key_store(database, tmp_path), Registry(database)
        tenants, ledger = TenantStore(database, keys), UsageLedger(database)
        leaver, stayer = (tenants.create_tenant(name).tenant_id for name in ("leaver", "stayer"))
        for tenant, blobs in ((leaver, "123"), (stayer, "3")):
            KeyAdmin(keys).create_key(tenant)
            ledger.add([record_of(tenant, tenant)])
            for blob in blobs:
                store.put(blob * 64, {"weights": b"w"})
                registry.put(f"a{blob}", AdapterVersion(tenant, blob * 64), AdapterDetails(2, ("q_proj",), 1))
        stride = 1 if soak else 11
        status, output = ForkedProgram(KILLED_PURGES, database_place, tmp_path, stride, leaver).finish()
        assert status == 0, output
        assert int(output) > 10, "most steps were tried"
        assert rows_with(database, leaver) == {"audit_log", "changes", "former_tenants"}
        assert rows_with(database, stayer) >= {"tenants", "api_keys", "adapter_versions", "usage_records"}
        assert set(store.digests()) == {"3" * 64}
