"""A renamed tenant keeps all that it has, and its old name means nothing any more."""

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora_adapters.database.database import Database
from slora_adapters.registry.registry import AdapterDetails, Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.version import AdapterVersion
from slora_api.errors import NotFound
from slora_api.tenants.tenant_store import ShareChanges, TenantStore
from slora_api.tenants.usage_ledger import UsageLedger
from tests.api.platform import Platform, open_key_store, post
from tests.api.served import wait_for
from tests.api.tenants.test_tenant_purge import record_of, rows_with


def test_keys_adapters_and_pins_go_with_the_tenant(platform: Platform, admin: httpx.Client) -> None:
    key = platform.key("old", "voice")
    digest = platform.upload(key, "voice").json()["digest"].removeprefix("sha256:")
    admin.patch("/admin/tenants/old", json={"weight": 3}).raise_for_status()
    admin.put("/admin/tenants/old/adapters/voice/pin").raise_for_status()
    ask = {"model": "default", "prompt": "hello"}
    assert post(platform, key, "/v1/completions", ask).status_code == 200
    renamed = admin.patch("/admin/tenants/old", json={"name": "new"}).raise_for_status().json()
    assert (renamed["name"], renamed["weight"]) == ("new", 3)
    assert post(platform, key, "/v1/completions", ask).status_code == 200
    request = platform.engine.requests[-1]
    assert (request.tenant, request.share.weight) == ("new", 3)
    assert request.versions == (AdapterVersion("new", digest),)
    assert admin.get("/admin/tenants/old").status_code == 404
    # The engine drops the old name and pins the new one, as on other hosts.
    wait_for(lambda: AdapterVersion("old", digest) in platform.engine.forgotten or None)
    wait_for(lambda: [pin.version.tenant for pin in platform.engine.pins[-1]] == ["new"] or None)
    again = platform.key("old")
    with platform.client(again) as client:
        assert client.get("/v1/adapters").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "taken"}, 409, None),
        ({"name": "mover"}, 409, None),
        ({"name": "No Name"}, 400, "name"),
        ({"name": "fine", "weight": 2}, 400, "name"),
    ],
)
def test_a_name_that_cannot_be_taken_changes_nothing(
    platform: Platform, admin: httpx.Client, body: dict[str, Any], status: int, param: str | None
) -> None:
    platform.key("taken")
    platform.key("mover")
    answer = admin.patch("/admin/tenants/mover", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert admin.get("/admin/tenants/mover").json()["weight"] == 1
    assert admin.patch("/admin/tenants/nobody", json={"name": "free"}).status_code == 404


def test_a_rename_moves_every_row_on_both_databases(database_place: str, tmp_path: Path) -> None:
    with closing(Database(database_place)) as database:
        keys, ledger = open_key_store(database, tmp_path), UsageLedger(database)
        store, registry = TenantStore(database, keys), Registry(RegistryStorage(database))
        store.create_tenant("old", ShareChanges(weight=2))
        _, key = keys.create_key("old")
        assert keys.authenticate(key.secret) is not None
        registry.put("voice", AdapterVersion("old", "1" * 64), AdapterDetails(2, ("q_proj",), 1))
        ledger.add([record_of("old", "r1")])
        cursor = registry.changes().cursor
        assert store.rename("old", "new").share.weight == 2
        assert rows_with(database, "old") == {"audit_log", "changes"}
        assert {"tenants", "api_keys", "adapter_versions", "usage_records"} <= rows_with(database, "new")
        assert (found := keys.authenticate(key.secret)) is not None and found.tenant == "new"
        assert registry.get("new", "voice").version == AdapterVersion("new", "1" * 64)
        (old, _) = registry.changes(cursor).changes
        assert old.orphaned == (AdapterVersion("old", "1" * 64),) and old.moved_pin
        with pytest.raises(NotFound):
            store.rename("old", "newer")


def test_usage_that_was_recorded_under_the_old_name_counts_for_the_new_one(
    platform: Platform, admin: httpx.Client
) -> None:
    key_id = platform.key("before").split("_")[1]
    record = record_of("before", "late", key_id)
    admin.patch("/admin/tenants/before", json={"name": "after"}).raise_for_status()
    with closing(Database(platform.directory / "slora.db")) as database:
        UsageLedger(database).add([record])
        assert UsageLedger(database).used_tokens("after", key_id, 0) > 0
        assert UsageLedger(database).used_tokens("before", None, 0) == 0
