"""A renamed tenant keeps all that it has under its id, and its old name means nothing any more."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora_adapters.database.database import Database
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.core.errors import NotFound
from slora_api.keys.key_admin import KeyAdmin
from slora_api.tenants.tenant_store import ShareChanges, TenantStore
from slora_api.usage.usage_ledger import UsageLedger
from tests.adapters.hand_made import make_members
from tests.api.platform import FIELDS, Platform, bearer, open_key_store, post
from tests.api.tenants.test_tenant_purge import record_of, rows_with


def rename(admin: httpx.Client, name: str, new_name: str) -> None:
    admin.patch(f"/admin/tenants/{name}", json={"name": new_name}).raise_for_status()


def read_usage(admin: httpx.Client, tenant: str) -> list[tuple[str, str]]:
    """The name and the id of the tenant in each result of the report."""
    span = {"start_time": "1789000000", "end_time": "1791000000", "group_by": "tenant", "limit": 31}
    found = admin.get("/admin/usage", params={**span, "tenant": tenant}).raise_for_status().json()
    return [(one["tenant"], one["tenant_id"]) for bucket in found["data"] for one in bucket["results"]]


def test_keys_adapters_and_pins_stay_with_the_tenant(platform: Platform, admin: httpx.Client) -> None:
    key = platform.key("old", "voice")
    tenant = platform.tenant_id("old")
    digest = platform.upload(key, "voice").json()["digest"]
    admin.patch("/admin/tenants/old", json={"weight": 3}).raise_for_status()
    admin.put("/admin/tenants/old/adapters/voice/pin").raise_for_status()
    ask = {"model": "default", "prompt": "hello"}
    assert post(platform, key, "/v1/completions", ask).status_code == 200
    forgotten = list(platform.engine.forgotten)
    renamed = admin.patch("/admin/tenants/old", json={"name": "new"}).raise_for_status().json()
    assert (renamed["id"], renamed["name"], renamed["weight"]) == (tenant, "new", 3)
    assert post(platform, key, "/v1/completions", ask).status_code == 200
    # The engine sees no difference, so the pages and the prefix cache of the tenant stay.
    before, after = platform.engine.requests[-2:]
    assert (before.tenant, before.versions) == (after.tenant, after.versions)
    assert after.versions == (AdapterVersion(tenant, digest),) and after.share.weight == 3
    assert platform.engine.forgotten == forgotten
    assert admin.get("/admin/tenants/old").status_code == 404
    assert admin.get(f"/admin/tenants/{tenant}").json()["name"] == "new"
    (pin,) = admin.get("/admin/pins").json()["data"]
    assert (pin["tenant"], pin["tenant_id"], pin["id"]) == ("new", tenant, f"{tenant}/voice@latest")
    again = platform.key("old")
    client = platform.api(again)
    assert client.get("/v1/adapters").json()["data"] == []
    assert client.get("/v1/me").json()["tenant_id"] != tenant


class PausedBody:
    """A body that waits before its last part until `finish` is called. `has_begun` is set when the server reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._finished = threading.Event()
        self.has_begun = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        half = len(self._body) // 2
        yield self._body[:half]
        self.has_begun.set()
        assert self._finished.wait(300)
        yield self._body[half:]

    def finish(self) -> None:
        self._finished.set()


def send_across(
    platform: Platform, key: str, path: str, form: dict[str, Any], meanwhile: Callable[[], None]
) -> httpx.Response:
    """Sends a form, calls `meanwhile` when half of it has arrived, and then sends the rest."""
    request = httpx.Request("POST", f"{platform.url}{path}", headers=bearer(key), **form)
    body = PausedBody(request.read())
    answers: list[httpx.Response] = []
    headers = {**bearer(key), "content-type": request.headers["content-type"]}

    def send() -> None:
        with httpx.Client(timeout=300, verify=False) as client:
            answers.append(client.post(f"{platform.url}{path}", content=iter(body), headers=headers))

    sender = threading.Thread(target=send)
    sender.start()
    assert body.has_begun.wait(300)
    meanwhile()
    body.finish()
    sender.join()
    return answers[0]


@pytest.mark.parametrize("kind", ["adapter", "file"])
def test_an_upload_belongs_to_the_tenant_whose_key_began_it(
    platform: Platform, admin: httpx.Client, kind: str
) -> None:
    """Born from a bug: the upload of a tenant that was renamed meanwhile went to the tenant that took its name."""
    key = platform.key(f"{kind}-old")
    others: list[str] = []

    def give_the_name_away() -> None:
        rename(admin, f"{kind}-old", f"{kind}-new")
        others.append(platform.key(f"{kind}-old"))

    if kind == "adapter":
        files = {FIELDS[name]: content for name, content in make_members().items()}
        path, form = "/v1/adapters", {"data": {"name": "voice"}, "files": files}
        listing = "/v1/adapters"
    else:
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "base"}}
        path, form = "/v1/files", {"data": {"purpose": "batch"}, "files": {"file": json.dumps(line).encode()}}
        listing = "/v1/files"
    answer = send_across(platform, key, path, form, give_the_name_away)
    assert answer.status_code in (200, 201), answer.text
    counts = []
    for secret in (key, others[0]):
        counts.append(len(platform.api(secret).get(listing).raise_for_status().json()["data"]))
    assert counts == [1, 0]


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


def test_a_rename_changes_one_row_on_both_databases(database_place: str, tmp_path: Path) -> None:
    with closing(Database(database_place)) as database:
        keys = open_key_store(database, tmp_path)
        store, registry = TenantStore(database, keys), Registry(database)
        tenant = store.create_tenant("old", ShareChanges(weight=2)).tenant_id
        _, key = KeyAdmin(keys).create_key(tenant)
        assert keys.authenticate(key.secret) is not None
        registry.put("voice", AdapterVersion(tenant, "1" * 64), AdapterDetails(2, ("q_proj",), 1))
        cursor = registry.changes().cursor
        assert store.rename(tenant, "new").share.weight == 2
        assert (rows_with(database, "old"), rows_with(database, "new")) == (set(), {"tenants"})
        found = keys.authenticate(key.secret)
        assert found is not None and (found.tenant, found.tenant_name) == (tenant, "new")
        assert registry.get(tenant, "voice").version == AdapterVersion(tenant, "1" * 64)
        (change,) = registry.changes(cursor).changes
        assert change.tenant == tenant and not change.orphaned and not change.moved_pin
        with pytest.raises(NotFound):
            store.find_named("old")
        other = store.create_tenant("old").tenant_id
        assert store.find_names([tenant, other]) == {tenant: "new", other: "old"}


def test_usage_and_entries_of_the_audit_log_are_found_by_the_new_name_and_by_the_id(
    platform: Platform, admin: httpx.Client
) -> None:
    key_id = platform.key("before").split("_")[1]
    tenant = platform.tenant_id("before")
    rename(admin, "before", "after")
    platform.key("before")
    with closing(Database(platform.directory / "slora.db")) as database:
        UsageLedger(database).add([record_of(tenant, "late", key_id)])
    for name, count in (("after", 1), (tenant, 1), ("before", 0)):
        assert read_usage(admin, name) == [("after", tenant)] * count
        entries = admin.get("/admin/audit", params={"tenant": name}).raise_for_status().json()["data"]
        assert ("tenant.rename" in {entry["action"] for entry in entries}) == bool(count)
        assert {entry["tenant_id"] == tenant for entry in entries} == {bool(count)}


def test_reports_name_a_purged_tenant_apart_from_the_next_one_with_its_name(
    platform: Platform, admin: httpx.Client
) -> None:
    platform.key("gone")
    tenant = platform.tenant_id("gone")
    with closing(Database(platform.directory / "slora.db")) as database:
        UsageLedger(database).add([record_of(tenant, "of-gone", "key")])
    body = {"confirm": "gone", "ledger": "keep"}
    admin.post("/admin/tenants/gone/purge", json=body).raise_for_status()
    assert read_usage(admin, "gone") == [("gone", tenant)]
    platform.key("gone")
    assert read_usage(admin, "gone") == [] and read_usage(admin, tenant) == [("gone", tenant)]
    assert admin.get("/admin/usage", params={"tenant": "never"}).status_code == 404
