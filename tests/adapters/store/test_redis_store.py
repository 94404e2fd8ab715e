import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis.commands.core import Script

from slora_adapters.errors import AdapterNotFound, StoreUnavailable, StoreUnfit
from slora_adapters.store.redis_store import CHUNK_BYTES, UPLOAD_EXPIRY_S, WARM_EXPIRY_S, open_redis_store
from slora_adapters.store.store_url import open_store
from slora_adapters.store.tiered_store import TieredStore
from tests.adapters.blobs import read_member, read_members
from tests.redis_server import DURABLE, RedisServer
from tests.support.forked_program import ForkedProgram

DIGEST = "ab" * 32
OTHER_DIGEST = "cd" * 32
BIG = os.urandom(CHUNK_BYTES * 2 + 5)


def test_a_blob_survives_the_death_of_redis(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url)
    store.put(DIGEST, {"a": b"small", "b": BIG})
    redis_server.kill()
    redis_server.start()
    assert read_members(store, DIGEST) == {"a": b"small", "b": BIG}
    store.close()


def test_a_blob_put_while_the_disk_is_busy_survives_the_death_of_redis(redis_server: RedisServer) -> None:
    """While an fsync is in progress, Redis replies before it writes. The reply alone does not prove durability."""
    store = open_store(redis_server.url)
    with redis_server.client() as client, redis_server.stalled_fsync():
        store.put(OTHER_DIGEST, {"a": b"the first write asks for an fsync"})
        while not client.info("persistence")["aof_pending_bio_fsync"]:
            time.sleep(0.01)
        client.set("unwritten", "x")
        assert client.info("persistence")["aof_buffer_length"] > 0
        store.put(DIGEST, {"a": b"small"})
        redis_server.kill()
    redis_server.start()
    assert read_members(store, DIGEST)["a"] == b"small"
    store.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "'appendonly yes' .it is no."),
        (
            ("--appendonly", "yes", "--maxmemory-policy", "allkeys-lru"),
            "'maxmemory-policy noeviction' .it is allkeys-lru.",
        ),
        (("--appendonly", "yes", "--appendfsync", "no"), "'appendfsync everysec' or 'always'"),
    ],
)
def test_a_redis_without_durable_settings_is_refused_as_the_only_store(
    make_redis: Callable[..., RedisServer], options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StoreUnfit, match=message):
        open_store(make_redis(*options).url)


def test_a_durable_redis_that_does_not_answer_is_unavailable(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url)
    redis_server.kill()
    for call in (store.check, lambda: store.open(DIGEST), lambda: store.put(DIGEST, {"a": b""})):
        with pytest.raises(StoreUnavailable):
            call()
    with pytest.raises(StoreUnavailable):
        open_store(redis_server.url)
    store.close()


def test_a_warm_copy_expires_and_each_use_renews_it(make_redis: Callable[..., RedisServer]) -> None:
    server = make_redis()
    store = open_redis_store(server.url, durable=False)
    store.put(DIGEST, {"b": BIG})
    with server.client() as client:
        for key in client.keys("*"):
            assert WARM_EXPIRY_S - 60 < client.ttl(key) <= WARM_EXPIRY_S
            client.expire(key, 100)
        store.open(DIGEST).close()
        assert all(client.ttl(key) > 1000 for key in client.keys("*"))
        client.delete(next(key for key in client.keys("*") if b":c:" in key))
    with closing(store.open(DIGEST)) as blob, pytest.raises(AdapterNotFound):
        read_member(blob, "b")
    store.close()


def test_a_durable_blob_never_expires_and_a_replaced_one_leaves_no_chunks(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url)
    store.put(DIGEST, {"b": BIG})
    store.put(DIGEST, {"b": BIG[::-1]})
    with redis_server.client() as client:
        assert len(client.keys("*")) == 1 + 3
        assert {client.ttl(key) for key in client.keys("*")} == {-1}
        store.delete(DIGEST)
        assert client.keys("*") == []
    store.close()


def test_a_late_deletion_removes_only_the_copy_that_it_was_meant_for(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that a dead server has sent may reach Redis after another server uploaded the same adapter again."""
    with closing(open_redis_store(redis_server.url, durable=True)) as store:
        store.put(DIGEST, {"a": b"old"})
        run = Script.__call__

        def come_late(script: Script, **call: Any) -> None:
            monkeypatch.undo()
            store.put(DIGEST, {"a": b"new"})
            run(script, **call)

        monkeypatch.setattr(Script, "__call__", come_late)
        store.delete(DIGEST)
        assert read_members(store, DIGEST) == {"a": b"new"}
        store.delete(DIGEST)
        assert not store.exists(DIGEST)
        with redis_server.client() as client:
            assert client.keys("slora:{*") == []


def test_a_warm_tier_never_damages_a_durable_blob_in_the_same_redis(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Another host may use the same Redis as its warm tier. It copies, replaces, distrusts and deletes the same
    adapter."""
    durable = open_store(redis_server.url)
    durable.put(DIGEST, {"a": b"durable"})
    with closing(open_store(str(tmp_path), redis_server.url)) as other, redis_server.client() as client:
        assert isinstance(other, TieredStore)
        mine = set(client.keys("*"))

        def expect_mine_whole() -> None:
            assert read_members(durable, DIGEST) == {"a": b"durable"}
            assert {client.ttl(key) for key in mine} == {-1}

        for change in (
            lambda: other.put(DIGEST, {"a": b"another's"}),
            lambda: other.report_corrupt(DIGEST),
            lambda: read_members(other, DIGEST),
            lambda: other.delete(DIGEST),
        ):
            change()
            other.drain()
            expect_mine_whole()
        other.put(DIGEST, {"a": b"another's"})
        other.drain()
        assert len(client.keys("*")) > len(mine), "it did keep a copy of its own"
        assert list(durable.digests()) == list(other.warm.digests()) == [DIGEST]
        durable.delete(DIGEST)
        assert read_members(other, DIGEST) == {"a": b"another's"}
    durable.close()


def test_the_durable_store_is_not_used_as_its_own_warm_tier(redis_server: RedisServer) -> None:
    with closing(open_store(redis_server.url, redis_server.url)) as store, redis_server.client() as client:
        assert store.tiers == ("redis",)
        store.put(DIGEST, {"a": b"once"})
        assert len(client.keys("*")) == 2


# A process that dies between the last chunk and the commit.
DIES = """
import os, signal, sys
from redis.commands.core import Script
from slora_adapters.store.redis_store import open_redis_store
store = open_redis_store(sys.argv[1], durable=True)
Script.__call__ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
store.put("ab" * 32, {"b": bytes(int(sys.argv[2]))})
"""


def test_an_interrupted_upload_is_never_visible_and_expires(redis_server: RedisServer) -> None:
    status, output = ForkedProgram(DIES, redis_server.url, len(BIG)).finish()
    assert status == -signal.SIGKILL, output
    store = open_store(redis_server.url)
    assert not store.exists(DIGEST) and list(store.digests()) == []
    with redis_server.client() as client:
        keys = client.keys("*")
        assert len(keys) == 3 and all(0 < client.ttl(key) <= UPLOAD_EXPIRY_S for key in keys)
    store.close()


def test_a_full_redis_refuses_an_upload_and_keeps_what_it_has(make_redis: Callable[..., RedisServer]) -> None:
    server = make_redis(*DURABLE, "--maxmemory", "14mb")
    store = open_store(server.url)
    store.put(DIGEST, {"a": b"small"})
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        store.put(OTHER_DIGEST, {"b": BIG + BIG})
    assert read_members(store, DIGEST)["a"] == b"small"
    store.close()
