"""A server on a full disk answers requests, revokes keys, and refuses changes with a named reason. It can also
start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from slora_adapters.process.full_disk import DiskReserve
from slora_api.serve.background import DiskWatch
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.conftest import Kit
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import parse_metrics, serving
from tests.support.file_limit import largest_file

PROMPT = {"model": "base", "prompt": "hello"}
# The revocation journal is smaller than this limit. Every file that grows is larger.
LIMIT = 16_000


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as running:
        yield running


def status_of(platform: Platform, key: str) -> int:
    return post(platform, key, "/v1/completions", PROMPT).status_code


def is_read_only(admin: httpx.Client) -> bool:
    return parse_metrics(admin.get("/metrics").text)["slora_read_only"] == 1


def test_a_key_revoked_on_a_full_disk_is_refused_from_then_on(platform: Platform) -> None:
    """Born from a bug: the answer was a 503, and the key still worked."""
    kept, revoked = platform.key("kept"), platform.key("revoked")
    key_id = revoked.split("_")[1]
    with platform.client(ADMIN_KEY) as admin, largest_file(LIMIT):
        assert admin.post("/admin/tenants", json={"name": "new"}).status_code == 507
        answer = admin.delete(f"/admin/keys/{key_id}")
        assert (answer.status_code, answer.json()["revoked"]) == (200, True)
        assert [status_of(platform, key) for key in (kept, revoked)] == [200, 401]
        assert [key["revoked"] for key in admin.get("/admin/tenants/revoked/keys").json()["data"]] == [True]
        assert admin.delete("/admin/keys/nothing1").status_code == 404
    database = platform.services.keys.store.database
    query = text(f"SELECT revoked_at IS NULL FROM api_keys WHERE key_id = '{key_id}'")
    assert database.read(query) == [(1,)], "it waits in the journal"
    DiskWatch(platform.services.foundation.reserve, platform.services.keys.admin).check()
    assert database.read(query) == [(0,)] and not platform.services.keys.store.journal.pending()
    assert status_of(platform, revoked) == 401


def test_a_revocation_that_could_be_written_nowhere_holds_and_says_that_a_restart_would_lose_it(
    platform: Platform,
) -> None:
    revoked = platform.key("revoked")
    key_id = revoked.split("_")[1]
    with platform.client(ADMIN_KEY) as admin, largest_file(0):
        answer = admin.delete(f"/admin/keys/{key_id}")
        assert answer.status_code == 503
        assert f"key {key_id} is revoked in this process" in answer.json()["error"]["message"]
        assert status_of(platform, revoked) == 401
    assert platform.api(ADMIN_KEY).delete(f"/admin/keys/{key_id}").status_code == 200
    assert not platform.services.keys.store.journal.pending()


def test_the_reserve_makes_room_for_the_revocation_in_the_database(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked = platform.key("revoked")
    free, journal = DiskReserve.free, platform.services.keys.store.journal
    with largest_file(LIMIT) as lift:

        def free_and_record(reserve: DiskReserve) -> bool:
            lift()
            return free(reserve)

        monkeypatch.setattr(DiskReserve, "free", free_and_record)
        platform.services.keys.admin.revoke_key(revoked.split("_")[1])
        assert not journal.pending() and not (platform.directory / "reserve").exists()
    assert platform.services.foundation.reserve.is_full, "its room is for revocations alone"
    assert status_of(platform, revoked) == 401


def test_on_a_full_disk_changes_are_refused_by_name_until_there_is_room(platform: Platform) -> None:
    key = platform.key("acme")
    other = make_members(tensors=make_tensors(seed=3))
    assert platform.upload(key, "a").status_code == 201
    check = DiskWatch(platform.services.foundation.reserve, platform.services.keys.admin).check
    admin = platform.api(ADMIN_KEY)
    tenant = platform.api(key)
    assert not is_read_only(admin)
    with largest_file(LIMIT):
        refused = [
            admin.post("/admin/tenants", json={"name": "new"}),
            admin.post("/admin/tenants/acme/keys"),
            admin.patch("/admin/tenants/acme", json={"weight": 2}),
            admin.put("/admin/tenants/acme/adapters/a/pin"),
            tenant.put("/v1/adapters/a/aliases/prod", json={"versions": {"1": 100}}),
            platform.upload(key, "a", other),
        ]
        assert [answer.status_code for answer in refused] == [507] * len(refused)
        assert {answer.json()["error"]["code"] for answer in refused} == {"disk_full"}
        assert {answer.headers["x-should-retry"] for answer in refused} == {"false"}
        messages = [answer.json()["error"]["message"] for answer in refused]
        assert str(platform.directory) in messages[0], "the operator is told the path"
        assert "the data directory (--data-dir)" in messages[-1], "a tenant is told what to ask for"
        assert str(platform.directory) not in messages[-1]
        assert status_of(platform, key) == 200 and tenant.get("/v1/adapters/a").status_code == 200
        check()
        assert admin.get("/readyz").json()["read_only"] is True
        assert is_read_only(admin)
    check()
    assert admin.get("/readyz").json() == {"status": "ready"}
    assert platform.upload(key, "a", other).json()["version"] == 2


def test_adapters_can_be_deleted_from_a_disk_that_is_almost_full(platform: Platform) -> None:
    """A deletion frees space, but it needs some itself. The database's log often has that space."""
    key = platform.key("acme")
    assert platform.upload(key, "a").status_code == 201
    platform.services.foundation.reserve.report_full()
    assert platform.upload(key, "b").status_code == 507
    assert platform.api(key).delete("/v1/adapters/a").status_code == 200
    assert not list((platform.directory / "adapters" / "blobs").glob("*/*"))


def test_what_frees_room_or_stops_a_tenant_works_on_a_full_disk(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a bug: a tenant that had filled the disk could be neither suspended nor purged, and could delete
    nothing.
    """
    key = platform.key("acme")
    for name in ("a", "b"):
        assert (
            platform.upload(key, name, make_members(tensors=make_tensors(seed=len(name)))).status_code == 201
        )
    free, lifts = DiskReserve.free, []

    def free_and_record(reserve: DiskReserve) -> bool:
        lifts[-1]()  # The reserve leaves room for this change alone.
        return free(reserve)

    monkeypatch.setattr(DiskReserve, "free", free_and_record)
    admin = platform.api(ADMIN_KEY)
    tenant = platform.api(key)
    alias = {"versions": {"1": 100}}
    tenant.put("/v1/adapters/b/aliases/prod", json=alias).raise_for_status()
    form, files = {"purpose": "batch"}, {"file": ("a", b"{}\n")}
    ids = [tenant.post("/v1/files", data=form, files=files).json()["id"] for _ in range(2)]
    batch = {"input_file_id": ids[0], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = tenant.post("/v1/batches", json=batch).raise_for_status().json()["id"]
    for client, method, path, body in (
        (tenant, "POST", f"/v1/batches/{batch_id}/cancel", None),
        (tenant, "DELETE", f"/v1/files/{ids[1]}", None),
        (tenant, "DELETE", "/v1/adapters/b/aliases/prod", None),
        (tenant, "DELETE", "/v1/adapters/b", None),
        (admin, "DELETE", f"/admin/keys/{platform.key('other').split('_')[1]}", None),
        (admin, "POST", "/admin/tenants/acme/suspend", None),
        (admin, "POST", "/admin/tenants/acme/purge", {"confirm": "acme", "ledger": "keep"}),
    ):
        platform.services.foundation.reserve.watch()
        with largest_file(LIMIT) as lift:
            lifts.append(lift)
            answer = client.request(method, path, json=body)
        assert answer.status_code == 200, (method, path, answer.text)
    assert not list((platform.directory / "adapters" / "blobs").glob("*/*"))


# `slora` in a process that cannot grow any file. Its children can, because the loader's shared memory counts as a file.
ON_A_FULL_DISK = f"""
import asyncio, functools, resource
from slora_api.cli.main import main

limits = resource.getrlimit(resource.RLIMIT_FSIZE)
lift = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
asyncio.create_subprocess_exec = functools.partial(asyncio.create_subprocess_exec, preexec_fn=lift)
resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, limits[1]))
raise SystemExit(main())
"""


def test_a_server_starts_on_a_full_disk_after_a_kill_and_after_a_clean_stop(
    kit: Kit, tmp_path: Path, *, soak: bool
) -> None:
    """Born from a bug: the server did not start, and its error message blamed the adapter store."""
    data, command = tmp_path / "data", (sys.executable, "-P", "-c", ON_A_FULL_DISK)
    with serving(kit.base, data) as first:
        kept, revoked = first.make_key("kept"), first.make_key("revoked")
        first.kill_everything()
    body = {"model": "base", "prompt": "ab", "max_tokens": 2}
    for status_before in (200, 401) if soak else (200,):
        with serving(kit.base, data, command=command) as full:
            full.wait_until_ready()
            assert httpx.get(full.url + "/readyz").json()["read_only"] is True
            with full.client(revoked) as tenant:
                assert tenant.post("/v1/completions", json=body).status_code == status_before
            with full.client(ADMIN_KEY) as admin:
                assert admin.post("/admin/tenants", json={"name": "new"}).status_code == 507
                assert admin.delete(f"/admin/keys/{revoked.split('_')[1]}").status_code == 200
            with full.client(revoked) as tenant, full.client(kept) as other:
                assert tenant.post("/v1/completions", json=body).status_code == 401
                assert other.post("/v1/completions", json=body).status_code == 200
