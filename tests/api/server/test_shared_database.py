"""API processes that share a database: after one process makes a change, the other processes apply it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import delete, update

from slora.core.request import TenantShare
from slora_adapters.database import schema
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import StoreUnfit
from slora_adapters.version import AdapterVersion
from slora_api.adapters.operator_routes import OperatorServices
from slora_api.keys.key_record import PEPPER_BYTES
from tests.adapters.hand_made import make_config, make_members, make_tensors
from tests.api.conftest import Kit
from tests.api.platform import ADMIN_KEY, Platform, open_key_store, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import serving, wait_for
from tests.api.server.test_server import upload
from tests.postgresql_server import PostgresqlServer

COMPLETIONS = "/v1/completions"
BASE = {"model": "base", "prompt": "hi"}


@dataclass
class ServerPair:
    """Two servers, and the key of one tenant."""

    first: Platform
    second: Platform
    key: str

    def upload(self, name: str, seed: int = 0) -> AdapterVersion:
        members = make_members(make_config(r=2), make_tensors(2, seed))
        answer = self.first.upload(self.key, name, members)
        assert answer.status_code == 201, answer.text
        return AdapterVersion(self.first.tenant_id("acme"), answer.json()["digest"])

    def ask(self, model: str) -> Any:
        """The second server's response."""
        return post(self.second, self.key, COMPLETIONS, {"model": model, "prompt": "hi"})

    def wait_until_followed(self) -> None:
        """Returns when the second server has applied every change made so far."""
        registry = self.second.find(OperatorServices).registry
        with patch.object(registry, "changes", wraps=registry.changes) as changes:
            # The second call begins when all that the first one read has been applied.
            wait_for(lambda: changes.call_count >= 2 or None)

    def answers_as(self, model: str, label: str) -> Callable[[], bool | None]:
        return lambda: self.ask(model).headers.get("x-slora-adapter") == label or None


def two(first: Path, second: Path, **settings: Any) -> Iterator[ServerPair]:
    with ExitStack() as stack:
        platforms = [
            stack.enter_context(
                running_platform(folder, ScriptedEngine([deltas_of(b"ok")]), follows=True, **settings)
            )
            for folder in (first, second)
        ]
        yield ServerPair(*platforms, platforms[0].key("acme"))


def make_hosts(folder: Path) -> tuple[Path, Path]:
    """The data directories of two hosts, which have the same pepper."""
    hosts = folder / "first", folder / "second"
    for host in hosts:
        host.mkdir()
        (host / "pepper").write_bytes(b"p" * PEPPER_BYTES)
    return hosts


@pytest.fixture
def on_postgresql(tmp_path: Path, postgresql_server: PostgresqlServer) -> Iterator[ServerPair]:
    place = postgresql_server.make_database()
    yield from two(*make_hosts(tmp_path), database=place, store=str(tmp_path / "store"))


@pytest.fixture
def on_shared_postgresql(tmp_path: Path, shared_postgresql: PostgresqlServer) -> Iterator[ServerPair]:
    place = shared_postgresql.migrated_database()
    yield from two(*make_hosts(tmp_path), database=place, store=str(tmp_path / "store"))


@pytest.fixture(params=["sqlite", "postgresql"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerPair]:
    """Two servers on one host with one data directory, or on two hosts with separate data directories."""
    if request.param == "sqlite":
        yield from two(tmp_path, tmp_path)
    else:
        yield request.getfixturevalue("on_shared_postgresql")


def test_pushes_moves_and_deletions_at_one_server_apply_at_the_other(servers: ServerPair) -> None:
    for model in ("voice", "No Name", "voice@1"):
        unknown = servers.ask(model)
        assert (unknown.status_code, unknown.json()["error"]["message"]) == (
            404,
            f"The model `{model}` does not exist.",
        )
    old = servers.upload("voice")
    wait_for(servers.answers_as("voice", "voice@1"))
    new = servers.upload("voice", seed=1)
    wait_for(servers.answers_as("voice", "voice@2"))
    with servers.first.client(servers.key) as client:
        client.post("/v1/adapters/voice/aliases/latest/rollback").raise_for_status()
        wait_for(servers.answers_as("voice", "voice@1"))
        assert servers.second.engine.requests[-1].versions == (old,)
        client.delete("/v1/adapters/voice", params={"force": True}).raise_for_status()
    wait_for(lambda: servers.ask("voice").status_code == 404 or None)
    for platform in (servers.first, servers.second):
        wait_for(lambda engine=platform.engine: {old, new} <= set(engine.forgotten) or None)


def test_pins_made_at_one_server_apply_at_the_other(servers: ServerPair) -> None:
    def pinned(*versions: AdapterVersion) -> None:
        for platform in (servers.first, servers.second):
            engine = platform.engine
            wait_for(
                lambda engine=engine: [pin.version for pin in engine.pins[-1:][0]] == [*versions] or None
            )

    pinned()
    old = servers.upload("voice")
    with servers.first.client(ADMIN_KEY) as admin:
        admin.put("/admin/tenants/acme/adapters/voice/pin").raise_for_status()
        pinned(old)
        pinned(servers.upload("voice", seed=1))
        admin.delete("/admin/tenants/acme/adapters/voice/pin").raise_for_status()
        pinned()


def test_tenants_and_keys_made_at_one_server_apply_at_the_other(servers: ServerPair) -> None:
    first, second = servers.first, servers.second
    with first.client(ADMIN_KEY) as admin, second.client(ADMIN_KEY) as other:
        admin.post("/admin/tenants", json={"name": "beta", "weight": 2}).raise_for_status()
        made = admin.post("/admin/tenants/beta/keys").raise_for_status().json()
        assert post(second, made["key"], COMPLETIONS, BASE).status_code == 200
        assert second.engine.requests[-1].share == TenantShare(2)
        other.patch("/admin/tenants/beta", json={"weight": 3}).raise_for_status()
        assert post(first, made["key"], COMPLETIONS, BASE).status_code == 200

        def has_new_share() -> bool | None:
            post(first, made["key"], COMPLETIONS, BASE)
            return first.engine.requests[-1].share == TenantShare(3) or None

        wait_for(has_new_share)
        other.delete(f"/admin/keys/{made['key_id']}").raise_for_status()
        assert post(second, made["key"], COMPLETIONS, BASE).status_code == 401, "at once where it was revoked"
        wait_for(lambda: post(first, made["key"], COMPLETIONS, BASE).status_code == 401 or None)


def test_during_an_outage_cached_names_and_keys_are_answered_and_others_after_it(
    on_postgresql: ServerPair, postgresql_server: PostgresqlServer
) -> None:
    servers = on_postgresql
    unseen = servers.first.key("acme")
    for name in ("known", "unknown"):
        servers.upload(name)
    # A change that the server reads after its lookup would invalidate the cached name.
    servers.wait_until_followed()
    assert servers.ask("known").status_code == 200
    postgresql_server.kill()
    refused = [
        servers.ask("unknown"),
        post(servers.second, unseen, COMPLETIONS, BASE),
        servers.first.upload(servers.key, "late", make_members()),
    ]
    with servers.first.client(ADMIN_KEY) as admin:
        refused.append(admin.post("/admin/tenants", json={"name": "late"}))
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert "Retry-After" in answer.headers
    assert not any(str(postgresql_server.folder) in answer.text for answer in refused[:3])
    assert all("the database of this server is unavailable" in answer.text for answer in refused[:3])
    assert servers.ask("known").headers["x-slora-adapter"] == "known@1"
    postgresql_server.start()
    wait_for(servers.answers_as("unknown", "unknown@1"))
    assert post(servers.second, unseen, COMPLETIONS, BASE).status_code == 200
    with servers.first.client(ADMIN_KEY) as admin:
        # Each server notices by itself that the database answers again.
        wait_for(lambda: admin.get("/admin/tenants").is_success or None)
    servers.upload("known", seed=1)
    wait_for(servers.answers_as("known", "known@2"))
    with servers.first.client(servers.key) as client:
        names = [one["name"] for one in client.get("/v1/adapters").raise_for_status().json()["data"]]
    assert names == ["known", "unknown"], "what was refused is not half there"


def test_an_adapter_deleted_while_the_feed_was_lost_is_removed_from_the_engine(
    on_shared_postgresql: ServerPair,
) -> None:
    """The database was replaced by an older copy, so each server looks up every adapter that its engine holds."""
    servers = on_shared_postgresql
    gone, kept = servers.upload("gone"), servers.upload("kept", seed=1)
    for name in ("gone", "kept"):
        assert servers.ask(name).status_code == 200
    database = servers.first.services.foundation.database
    with database.transaction(CHANGES) as connection:
        connection.execute(update(schema.changes).values(nonce="another"))
        for table in (schema.adapter_names, schema.adapter_versions, schema.adapter_aliases):
            connection.execute(delete(table).where(table.c.name == "gone"))
    wait_for(lambda: gone in servers.second.engine.forgotten or None)
    assert servers.ask("gone").status_code == 404 and servers.ask("kept").status_code == 200
    assert kept not in servers.second.engine.forgotten


def test_a_host_with_another_pepper_is_refused(tmp_path: Path, shared_postgresql: PostgresqlServer) -> None:
    first, second = make_hosts(tmp_path)
    (second / "pepper").write_bytes(b"q" * PEPPER_BYTES)
    place = shared_postgresql.migrated_database()
    with closing(Database(place)) as database:
        open_key_store(database, first)
        with pytest.raises(StoreUnfit, match="copy the file `pepper` from the data directory of a server"):
            open_key_store(database, second)
        open_key_store(database, first)


@pytest.mark.soak
def test_two_servers_with_engines_of_their_own_serve_the_same_adapters(
    kit: Kit, tmp_path: Path, shared_postgresql: PostgresqlServer
) -> None:
    hosts = make_hosts(tmp_path)
    flags = ("--database", shared_postgresql.migrated_database(), "--store", str(tmp_path / "store"))
    with serving(kit.base, hosts[0], *flags) as first, serving(kit.base, hosts[1], *flags) as second:
        for server in (first, second):
            server.wait_until_ready()
        key = first.make_key("acme")
        assert upload(first, key, "voice", kit.wide).status_code == 201
        with first.client(key) as here, second.client(key) as there:
            body = {"model": "voice", "prompt": "hi", "max_tokens": 4, "temperature": 0}
            answer = there.post(COMPLETIONS, json=body)
            assert answer.headers["x-slora-adapter"] == "voice@1", answer.text
            assert answer.json()["choices"] == here.post(COMPLETIONS, json=body).json()["choices"]
            assert second.metric("slora_adapter_pages")
            here.delete("/v1/adapters/voice").raise_for_status()
            wait_for(lambda: there.post(COMPLETIONS, json=body).status_code == 404 or None)
            second.wait_for_metric("slora_adapter_pages", 0)
