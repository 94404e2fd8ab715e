"""A suspended tenant is refused everywhere, and is served as before when it is resumed."""

from contextlib import closing
from pathlib import Path

import httpx
import pytest

from slora_adapters.database.change_feed import read_changes
from slora_adapters.database.database import Database
from slora_api.core.errors import NotFound, TenantSuspended
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import KeyRecord, TenantStatus
from slora_api.tenants.tenant_store import TenantStore
from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, open_key_store, post
from tests.api.served import wait_for

PROMPT = {"model": "base", "prompt": "hello"}


def test_a_suspended_tenant_is_refused_from_the_next_request_until_it_is_resumed(
    platform: Platform, admin: httpx.Client
) -> None:
    key, other = platform.key("paused"), platform.key("bystander")
    assert post(platform, key, "/v1/completions", PROMPT).status_code == 200
    assert admin.post("/admin/tenants/paused/suspend").json()["status"] == "suspended"
    refused = [post(platform, key, "/v1/completions", PROMPT), platform.upload(key, "voice")]
    client = platform.api(key)
    refused += [client.get("/v1/models"), client.delete("/v1/adapters/voice")]
    for answer in refused:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (
            403,
            "permission_error",
            "tenant_suspended",
        )
        assert "`paused` is suspended" in error["message"] and answer.headers["x-should-retry"] == "false"
    assert post(platform, other, "/v1/completions", PROMPT).status_code == 200
    assert admin.post("/admin/tenants/paused/suspend").json()["status"] == "suspended"
    assert admin.get("/admin/tenants/paused").json()["status"] == "suspended"
    assert admin.post("/admin/tenants/paused/resume").json()["status"] == "active"
    assert post(platform, key, "/v1/completions", PROMPT).status_code == 200


def test_an_unknown_tenant_can_be_neither_suspended_nor_resumed(admin: httpx.Client) -> None:
    for action in ("suspend", "resume"):
        assert admin.post(f"/admin/tenants/nobody/{action}").status_code == 404


def test_an_upload_that_ends_after_the_suspension_creates_no_version(platform: Platform) -> None:
    key, tenant_store = platform.key("uploader"), platform.services.tenant_store

    def suspend(request: object) -> list[object]:
        tenant_store.suspend(platform.tenant_id("uploader"))
        return trial(request)  # type: ignore[arg-type]

    trial = platform.engine.canary
    platform.engine.canary = suspend  # type: ignore[assignment]
    try:
        answer = platform.upload(key, "late", make_members())
    finally:
        platform.engine.canary = trial
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_suspended")
    tenant_store.resume(platform.tenant_id("uploader"))
    assert platform.api(key).get("/v1/adapters").json()["data"] == []


def test_the_pins_of_a_suspended_tenant_are_released(platform: Platform, admin: httpx.Client) -> None:
    key = platform.key("pinner")
    pinner = platform.tenant_id("pinner")
    assert platform.upload(key, "voice").status_code == 201

    def pinned_tenants() -> set[str]:
        return {pin.version.tenant for pin in platform.engine.pins[-1]} if platform.engine.pins else set()

    admin.put("/admin/tenants/pinner/adapters/voice/pin").raise_for_status()
    wait_for(lambda: pinner in pinned_tenants() or None)
    admin.post("/admin/tenants/pinner/suspend").raise_for_status()
    wait_for(lambda: pinner not in pinned_tenants() or None)
    admin.post("/admin/tenants/pinner/resume").raise_for_status()
    wait_for(lambda: pinner in pinned_tenants() or None)


def test_a_suspension_reaches_other_processes_through_the_feed(database_place: str, tmp_path: Path) -> None:
    with closing(Database(database_place)) as database, closing(Database(database_place)) as far:
        keys, other = open_key_store(database, tmp_path), TenantStore(far, open_key_store(far, tmp_path))
        tenant = other.create_tenant("acme")
        tenant.check_active()
        acme = tenant.tenant_id
        cursor = read_changes(database, None).cursor
        _, key = KeyAdmin(keys).create_key(acme)

        def status() -> TenantStatus:
            found = keys.authenticate(key.secret)
            assert isinstance(found, KeyRecord)
            return found.status

        assert status() is TenantStatus.ACTIVE
        with pytest.raises(TenantSuspended):
            other.suspend(acme).check_active()
        keys.apply_changes(changes := read_changes(database, cursor))
        assert status() is TenantStatus.SUSPENDED
        other.resume(acme)
        keys.apply_changes(read_changes(database, changes.cursor))
        assert status() is TenantStatus.ACTIVE
        with pytest.raises(NotFound):
            other.suspend("nobody")
