"""API processes that share a registry: after one process makes a change, the other processes apply it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slora.errors import AdapterFetchFailed
from slora_adapters.registry.redis_storage import open_redis_storage
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from tests.adapters.hand_made import make_config, make_members, make_tensors
from tests.api.conftest import Kit
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import serving, wait_for
from tests.api.server.test_server import upload
from tests.redis_server import RedisServer

COMPLETIONS = "/v1/completions"


@dataclass
class ServerPair:
    """Two servers, and the key of one tenant for each server."""

    first: Platform
    second: Platform
    keys: tuple[str, str]

    def upload(self, name: str, seed: int = 0) -> AdapterVersion:
        members = make_members(make_config(r=2), make_tensors(2, seed))
        answer = self.first.upload(self.keys[0], name, members)
        assert answer.status_code == 201, answer.text
        return AdapterVersion("acme", answer.json()["digest"].removeprefix("sha256:"))

    def ask(self, model: str) -> Any:
        """The second server's response."""
        return post(self.second, self.keys[1], COMPLETIONS, {"model": model, "prompt": "hi"})

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
        yield ServerPair(*platforms, (platforms[0].key("acme"), platforms[1].key("acme")))


@pytest.fixture
def on_redis(tmp_path: Path, redis_server: RedisServer) -> Iterator[ServerPair]:
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    yield from two(*folders, registry=redis_server.url, store=str(tmp_path / "store"))


@pytest.fixture(params=["sqlite", "redis"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerPair]:
    """Two servers on one host with one data directory, or on two hosts with separate data directories."""
    if request.param == "redis":
        yield request.getfixturevalue("on_redis")
    else:
        yield from two(tmp_path, tmp_path)


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
    with servers.first.client(servers.keys[0]) as client:
        client.post("/v1/adapters/voice/aliases/latest/rollback").raise_for_status()
        wait_for(servers.answers_as("voice", "voice@1"))
        assert servers.second.engine.requests[-1].adapter == old
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


def test_during_a_redis_outage_cached_names_are_answered_and_others_after_it(
    on_redis: ServerPair, redis_server: RedisServer
) -> None:
    servers = on_redis
    for name in ("known", "unknown"):
        servers.upload(name)
    assert servers.ask("known").status_code == 200
    redis_server.kill()
    refused = servers.ask("unknown")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert "Retry-After" in refused.headers
    assert servers.ask("known").headers["x-slora-adapter"] == "known@1"
    upload = servers.first.upload(servers.keys[0], "late", make_members())
    assert (upload.status_code, upload.json()["error"]["code"]) == (503, "store_unavailable")
    later = servers.ask("unknown")  # now the servers know that Redis is unavailable
    assert not any("127.0.0.1" in answer.text for answer in (refused, upload, later))
    redis_server.start()
    wait_for(servers.answers_as("unknown", "unknown@1"))
    servers.upload("known", seed=1)
    wait_for(servers.answers_as("known", "known@2"))
    with servers.first.client(servers.keys[0]) as client:
        names = [one["name"] for one in client.get("/v1/adapters").raise_for_status().json()["data"]]
    assert names == ["known", "unknown"], "what was refused is not half there"


def test_an_adapter_deleted_while_the_feed_was_lost_is_removed_from_the_engine(
    on_redis: ServerPair, redis_server: RedisServer
) -> None:
    """Redis has lost its change history, so each server looks up every adapter that its engine holds."""
    servers = on_redis
    gone, kept = servers.upload("gone"), servers.upload("kept", seed=1)
    for name in ("gone", "kept"):
        assert servers.ask(name).status_code == 200
    with redis_server.client() as client:
        client.delete("slora:registry:changes")
        for kind in ("name", "versions", "numbers"):
            client.delete(f"slora:registry:{kind}:acme/gone")
        client.hdel("slora:registry:weights:acme", gone.digest)
    wait_for(lambda: gone in servers.second.engine.forgotten or None)
    assert servers.ask("gone").status_code == 404 and servers.ask("kept").status_code == 200
    assert kept not in servers.second.engine.forgotten


def test_a_request_whose_adapter_was_replaced_at_another_server_gets_the_new_one(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Holds even if the request's lookup ran before this process read the change."""
    engine = ScriptedEngine([deltas_of(b"ok")])
    settings = {"registry": redis_server.url, "store": str(tmp_path / "store")}
    with running_platform(tmp_path, engine, **settings) as platform, ExitStack() as stack:
        key = platform.key("acme")
        assert platform.upload(key, "voice", make_members()).status_code == 201
        body = {"model": "voice", "prompt": "hi"}
        assert post(platform, key, COMPLETIONS, body).headers["x-slora-adapter"] == "voice@1"
        other = Registry(stack.enter_context(closing(open_redis_storage(redis_server.url))))
        old = other.get("acme", "voice")
        other.put("voice", AdapterVersion("acme", "f" * 64), old.details)
        other.delete("acme", "voice@1")
        engine.answers = [deltas_of(b"ok"), [AdapterFetchFailed("gone", "not_found")], deltas_of(b"ok")]
        answer = post(platform, key, COMPLETIONS, body)
        assert answer.headers["x-slora-adapter"] == "voice@2", answer.text


def test_two_servers_with_engines_of_their_own_serve_the_same_adapters(
    kit: Kit, tmp_path: Path, redis_server: RedisServer
) -> None:
    flags = ("--registry", redis_server.url, "--store", str(tmp_path / "store"))
    with (
        serving(kit.base, tmp_path / "first", *flags) as first,
        serving(kit.base, tmp_path / "second", *flags) as second,
    ):
        for server in (first, second):
            server.wait_until_ready()
        first_key, second_key = first.make_key("acme"), second.make_key("acme")
        assert upload(first, first_key, "voice", kit.wide).status_code == 201
        with first.client(first_key) as here, second.client(second_key) as there:
            body = {"model": "voice", "prompt": "hi", "max_tokens": 4, "temperature": 0}
            answer = there.post(COMPLETIONS, json=body)
            assert answer.headers["x-slora-adapter"] == "voice@1", answer.text
            assert answer.json()["choices"] == here.post(COMPLETIONS, json=body).json()["choices"]
            with second.client(ADMIN_KEY) as admin:
                assert "slora_adapter_pages 0.0" not in admin.get("/metrics").text
                here.delete("/v1/adapters/voice").raise_for_status()
                wait_for(lambda: there.post(COMPLETIONS, json=body).status_code == 404 or None)
                wait_for(lambda: "slora_adapter_pages 0.0" in admin.get("/metrics").text or None)
