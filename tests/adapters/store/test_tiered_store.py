from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slora_adapters.store.file_store import FileStore
from slora_adapters.store.redis_store import open_redis_store
from slora_adapters.store.store import Blob
from slora_adapters.store.store_url import open_store
from slora_adapters.store.tiered_store import REST_AFTER_FAILURE_S, TieredStore
from tests.adapters.blobs import read_members
from tests.redis_server import RedisServer
from tests.support.clock import Clock

DIGEST = "ab" * 32
CONTENT = {"a": b"x" * 1000}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def warm_server(make_redis: Callable[..., RedisServer]) -> RedisServer:
    return make_redis()


@pytest.fixture
def tiers(tmp_path: Path, warm_server: RedisServer, clock: Clock) -> Iterator[TieredStore]:
    warm = open_redis_store(warm_server.url, durable=False)
    tiers = TieredStore(FileStore(tmp_path), warm, clock)
    yield tiers
    tiers.close()


def _content(store) -> dict[str, bytes]:
    return read_members(store, DIGEST)


def test_a_new_blob_is_read_from_the_warm_tier(tiers: TieredStore) -> None:
    tiers.put(DIGEST, CONTENT)
    tiers.drain()
    tiers.durable.delete(DIGEST)
    assert _content(tiers) == CONTENT


def test_a_read_from_the_durable_store_fills_the_warm_tier(tiers: TieredStore) -> None:
    tiers.durable.put(DIGEST, CONTENT)
    assert not tiers.warm.exists(DIGEST)
    assert _content(tiers) == CONTENT
    tiers.drain()
    assert _content(tiers.warm) == CONTENT


def test_a_warm_tier_that_dies_breaks_nothing_and_is_used_again(
    tiers: TieredStore, warm_server: RedisServer, clock: Clock
) -> None:
    tiers.put(DIGEST, CONTENT)
    tiers.drain()
    warm_server.kill()
    assert _content(tiers) == CONTENT
    tiers.put("cd" * 32, CONTENT)
    tiers.delete("cd" * 32)
    tiers.check()
    warm_server.start()
    assert _content(tiers) == CONTENT
    tiers.drain()
    assert not tiers.warm.exists(DIGEST), "it is still left alone"
    clock.now += REST_AFTER_FAILURE_S
    assert _content(tiers) == CONTENT
    tiers.drain()
    assert tiers.warm.exists(DIGEST)


def test_a_dead_warm_tier_is_tried_once_and_then_skipped(
    tiers: TieredStore, warm_server: RedisServer
) -> None:
    tiers.durable.put(DIGEST, CONTENT)
    warm_server.kill()
    asked: list[str] = []
    open_warm = tiers.warm.open
    tiers.warm.open = lambda digest: (asked.append(digest), open_warm(digest))[1]
    for _ in range(5):
        assert _content(tiers) == CONTENT
    assert asked == [DIGEST]


def test_a_warm_copy_reported_as_corrupt_is_dropped_and_the_durable_blob_is_read(tiers: TieredStore) -> None:
    tiers.durable.put(DIGEST, CONTENT)
    tiers.warm.put(DIGEST, {"a": b"wrong"})
    assert _content(tiers) == {"a": b"wrong"}, "stores do not verify"
    assert tiers.report_corrupt(DIGEST)
    assert _content(tiers) == CONTENT
    tiers.drain()
    tiers.warm.delete(DIGEST)
    assert not tiers.report_corrupt(DIGEST), "the durable copy itself is wrong: no use in asking again"


def test_invalid_data_in_the_warm_tier_does_not_break_reads(
    tiers: TieredStore, warm_server: RedisServer
) -> None:
    tiers.durable.put(DIGEST, CONTENT)
    with warm_server.client() as client:
        for members in (b"", b"[", b"7", b'[["a"]]', b'[["a", "x"]]', b'[["a", -5]]', b'[["a", 5]]'):
            client.hset(
                f"slora:warm:{{{DIGEST}}}:m", mapping={"members": members, "upload": b"\xff", "chunks": 1}
            )
            assert _content(tiers) == CONTENT
            tiers.drain()
            client.flushall()
        client.set(f"slora:warm:{{{DIGEST}}}:m", "not even a hash")
        assert _content(tiers) == CONTENT


def test_a_blob_deleted_while_it_is_copied_does_not_come_back(tiers: TieredStore) -> None:
    copy = tiers.warm.copy

    def copy_late(digest: str, blob: Blob) -> None:
        tiers.durable.delete(digest)  # another process deletes it during our read
        tiers.warm.delete(digest)
        copy(digest, blob)

    tiers.warm.copy = copy_late
    tiers.put(DIGEST, CONTENT)
    tiers.drain()
    assert not tiers.warm.exists(DIGEST)


def test_a_warm_tier_that_does_not_answer_at_start_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(str(tmp_path), "redis://127.0.0.1:9/0").close()
    assert "the warm tier is unavailable" in caplog.text
