"""One contract, every store."""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.redis_store import CHUNK_BYTES, open_redis_store
from slora_adapters.store import Store
from slora_adapters.store_url import open_store
from tests.redis_server import DURABLE

DIGEST, OTHER = "ab" * 32, "cd" * 32
BIG = secrets.token_bytes(CHUNK_BYTES * 2 + 17)


def _file(tmp_path: Path, make_redis) -> Store:
    return open_store(str(tmp_path / "store"))


def _redis(tmp_path: Path, make_redis) -> Store:
    return open_store(make_redis(*DURABLE).url)


def _redis_tcp(tmp_path: Path, make_redis) -> Store:
    return open_store(make_redis(*DURABLE).tcp_url)


def _warm_redis(tmp_path: Path, make_redis) -> Store:
    return open_redis_store(make_redis().url, durable=False)


def _tiered(tmp_path: Path, make_redis) -> Store:
    return open_store(f"file://{tmp_path / 'store'}", make_redis().url)


def _tiered_without_its_warm_tier(tmp_path: Path, make_redis) -> Store:
    server = make_redis()
    server.kill()
    return open_store(str(tmp_path / "store"), server.url)


KINDS = [_file, _redis, _redis_tcp, _warm_redis, _tiered, _tiered_without_its_warm_tier]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.strip("_"))
def store(request: pytest.FixtureRequest, tmp_path: Path, make_redis: Callable) -> Iterator[Store]:
    store = request.param(tmp_path, make_redis)
    yield store
    store.close()


def _content(store: Store, digest: str = DIGEST) -> dict[str, bytes]:
    return {name: bytes(view) for name, view in store.fetch(digest).items()}


def test_what_was_put_is_fetched_byte_for_byte(store: Store, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(BIG)
    (tmp_path / "nothing").write_bytes(b"")
    store.put(
        DIGEST, {"a.json": b"{}", "big": tmp_path / "big", "empty": b"", "nothing": tmp_path / "nothing"}
    )
    expected = {"a.json": b"{}", "big": BIG, "empty": b"", "nothing": b""}
    assert _content(store) == expected
    assert _content(store) == expected, "from a warm tier too"
    assert all(view.readonly for view in store.fetch(DIGEST).values())
    assert store.exists(DIGEST) and not store.exists(OTHER)
    assert list(store.digests()) == [DIGEST]


def test_a_blob_that_was_never_put_is_not_found(store: Store) -> None:
    with pytest.raises(AdapterNotFound, match=DIGEST[:12]):
        store.fetch(DIGEST)
    store.delete(DIGEST)
    assert list(store.digests()) == []


def test_a_deleted_blob_is_gone_but_views_of_it_stay_valid(store: Store) -> None:
    store.put(DIGEST, {"a": BIG})
    store.put(OTHER, {"a": b"2"})
    view = store.fetch(DIGEST)["a"]
    store.delete(DIGEST)
    assert not store.exists(DIGEST)
    with pytest.raises(AdapterNotFound):
        store.fetch(DIGEST)
    assert bytes(view) == BIG
    assert _content(store, OTHER) == {"a": b"2"}


def test_putting_a_digest_again_replaces_what_is_there(store: Store) -> None:
    store.put(DIGEST, {"a": b"old", "b": BIG})
    view = store.fetch(DIGEST)["b"]
    store.put(DIGEST, {"a": b"new", "b": BIG[::-1]})
    if hasattr(store, "drain"):
        store.drain()
    assert _content(store) == {"a": b"new", "b": BIG[::-1]}
    assert bytes(view) == BIG
    store.delete(DIGEST)
    assert not store.exists(DIGEST)


def test_what_is_not_a_digest_is_refused(store: Store) -> None:
    for digest in ("", "AB" * 32, "ab" * 31, "../" + "a" * 61, "ab" * 32 + "\n", "{x}"):
        for call in (store.fetch, store.delete, store.exists, lambda bad: store.put(bad, {"a": b""})):
            with pytest.raises(ValueError, match="is not a digest"):
                call(digest)


def test_what_is_not_a_plain_member_name_is_refused(store: Store) -> None:
    for name in ("", "..", "a/b", ".hidden", "a\0b", "x" * 129, "a\n"):
        with pytest.raises(ValueError, match="cannot be a member"):
            store.put(DIGEST, {"ok": b"", name: b""})
    assert not store.exists(DIGEST)


def test_readers_beside_writers_and_deleters_see_a_whole_blob_or_none(store: Store) -> None:
    versions = [{"a": bytes([n]) * 9, "b": bytes([n]) * (CHUNK_BYTES + n)} for n in range(3)]
    whole = [set(version.items()) for version in versions]
    # In files, members are replaced one by one: blobs of one digest are interchangeable, so each may come from any.
    allowed = {item for version in whole for item in version}

    def write(version: dict[str, bytes]) -> None:
        for _ in range(4):
            store.put(DIGEST, version)

    def read() -> None:
        for _ in range(12):
            try:
                found = _content(store)
            except AdapterNotFound:
                continue
            assert found.keys() == {"a", "b"} and set(found.items()) <= allowed

    def delete() -> None:
        for _ in range(6):
            store.delete(DIGEST)

    with ThreadPoolExecutor(6) as threads:
        jobs = [threads.submit(write, version) for version in versions]
        jobs += [threads.submit(call) for call in (read, read, delete)]
        for job in jobs:
            job.result()
    store.put(DIGEST, versions[0])
    if hasattr(store, "drain"):
        store.drain()
    assert _content(store) == versions[0]


def test_a_working_store_says_so(store: Store) -> None:
    store.check()


@pytest.mark.parametrize("url", ["http://host/x", "s3://bucket", "file://elsewhere/x"])
def test_unknown_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        open_store(url)


def test_a_warm_tier_that_is_not_redis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a Redis"):
        open_store(str(tmp_path), str(tmp_path))


def test_a_store_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        open_store(str(tmp_path / "file"))
