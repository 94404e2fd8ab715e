"""The contract of a store, tested on every store."""

import random
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.store.object_blob import RANGE_BYTES
from slora_adapters.store.object_store import ObjectStore
from slora_adapters.store.redis_store import CHUNK_BYTES, open_redis_store
from slora_adapters.store.store import Store
from slora_adapters.store.store_url import open_store
from slora_adapters.store.tiered_store import TieredStore
from tests.adapters.blobs import read_members
from tests.redis_server import DURABLE
from tests.support import shared_files
from tests.support.forked_program import ForkedProgram

assert shared_files  # importing the module registers shared://
DIGEST, OTHER = "ab" * 32, "cd" * 32
BIG = secrets.token_bytes(CHUNK_BYTES + RANGE_BYTES + 17)  # three chunks, two ranges


@dataclass(frozen=True)
class StoreUnderTest:
    """The location of a store.

    open: opens the store. A second call opens it again, as another process would.
    lose: makes it unavailable.
    urls: the URLs with which another process can call `open_store`; empty if it can't.
    mixes: a blob may have members from several puts.
    """

    open: Callable[[], Store]
    lose: Callable[[], None]
    urls: tuple[str, ...] = ()
    mixes: bool = False


class RacelessMemory(MemoryFileSystem):
    """fsspec's in-memory filesystem, with separate memory for each instance.

    fsspec's listing raises KeyError if a file is deleted during it. Here the listing is repeated.
    """

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        while True:
            try:
                return super().ls(path, detail, **kwargs)
            except KeyError:
                continue


def _at(url: str, lose: Callable[[], None], *, mixes: bool = False) -> StoreUnderTest:
    return StoreUnderTest(lambda: open_store(url), lose, (url,), mixes)


def _file(tmp_path: Path, make_redis) -> StoreUnderTest:
    return _at(f"file://{tmp_path}/store", lambda: shutil.rmtree(tmp_path / "store"), mixes=True)


def _redis(tmp_path: Path, make_redis) -> StoreUnderTest:
    server = make_redis(*DURABLE)
    return _at(server.url, server.kill)


def _redis_tcp(tmp_path: Path, make_redis) -> StoreUnderTest:
    server = make_redis(*DURABLE)
    return _at(server.tcp_url, server.kill)


def _warm_redis(tmp_path: Path, make_redis) -> StoreUnderTest:
    server = make_redis()
    return StoreUnderTest(lambda: open_redis_store(server.url, durable=False), server.kill)


def _objects(tmp_path: Path, make_redis) -> StoreUnderTest:
    return _at(f"shared://{tmp_path}/objects", lambda: shutil.rmtree(tmp_path / "objects"))


def _memory_objects(tmp_path: Path, make_redis) -> StoreUnderTest:
    filesystem = RacelessMemory()

    def open_again() -> Store:
        store = ObjectStore(filesystem, "/a bucket/with a folder", scheme="memory")
        store.prepare()
        return store

    return StoreUnderTest(open_again, filesystem.store.clear)


def _asynchronous_objects(tmp_path: Path, make_redis) -> StoreUnderTest:
    """Works like most object filesystems: coroutines on one event loop that all threads share."""
    filesystem = AsyncFileSystemWrapper(LocalFileSystem())
    root = tmp_path / "objects"

    def open_again() -> Store:
        store = ObjectStore(filesystem, str(root), scheme="shared")
        store.prepare()
        return store

    return StoreUnderTest(open_again, lambda: shutil.rmtree(root))


def _tiered(durable: StoreUnderTest, warm: str) -> StoreUnderTest:
    return StoreUnderTest(
        lambda: open_store(durable.urls[0], warm), durable.lose, (*durable.urls, warm), mixes=durable.mixes
    )


def _tiered_file(tmp_path: Path, make_redis) -> StoreUnderTest:
    return _tiered(_file(tmp_path, make_redis), make_redis().url)


def _tiered_without_its_warm_tier(tmp_path: Path, make_redis) -> StoreUnderTest:
    server = make_redis()
    server.kill()
    return _tiered(_file(tmp_path, make_redis), server.url)


def _tiered_objects(tmp_path: Path, make_redis) -> StoreUnderTest:
    return _tiered(_objects(tmp_path, make_redis), make_redis().url)


KINDS = [
    _file,
    _redis,
    _warm_redis,
    _objects,
    _asynchronous_objects,
    _tiered_file,
    _tiered_without_its_warm_tier,
]
# The quick run has each part of these in another kind.
SOAK_KINDS = [_redis_tcp, _memory_objects, _tiered_objects]


@pytest.fixture(
    params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.soak) for kind in SOAK_KINDS)],
    ids=lambda kind: kind.__name__.strip("_"),
)
def place(request: pytest.FixtureRequest, tmp_path: Path, make_redis: Callable) -> StoreUnderTest:
    return request.param(tmp_path, make_redis)


@pytest.fixture
def store(place: StoreUnderTest) -> Iterator[Store]:
    store = place.open()
    yield store
    store.close()


@pytest.fixture
def second(place: StoreUnderTest, store: Store) -> Iterator[Store]:
    """The same store, opened as another process would open it."""
    second = place.open()
    yield second
    second.close()


def _content(store: Store, digest: str = DIGEST) -> dict[str, bytes]:
    return read_members(store, digest)


def _drain(store: Store) -> None:
    if isinstance(store, TieredStore):
        store.drain()


def _assert_absent(store: Store, digest: str = DIGEST) -> None:
    assert not store.exists(digest) and digest not in list(store.digests())
    with pytest.raises(AdapterNotFound, match=digest[:12]):
        store.open(digest)


def test_a_blob_is_read_back_byte_for_byte(store: Store, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(BIG)
    (tmp_path / "nothing").write_bytes(b"")
    store.put(
        DIGEST, {"a.json": b"{}", "big": tmp_path / "big", "empty": b"", "nothing": tmp_path / "nothing"}
    )
    expected = {"a.json": b"{}", "big": BIG, "empty": b"", "nothing": b""}
    assert _content(store) == expected
    assert _content(store) == expected, "from a warm tier too"
    assert store.exists(DIGEST) and not store.exists(OTHER)
    assert list(store.digests()) == [DIGEST]


def test_every_client_of_a_store_sees_all_claims(place: StoreUnderTest, store: Store, second: Store) -> None:
    assert store.claims() == frozenset()
    for claimant, name in ((store, "ab12"), (second, "cd34"), (store, "ab12")):
        claimant.claim(name)
    store.put(DIGEST, {"a": b"1"})
    store.delete(DIGEST)
    assert store.claims() == second.claims() == {"ab12", "cd34"} and list(store.digests()) == []
    place.lose()
    with pytest.raises(StoreUnavailable):
        second.claims()


def test_a_blob_that_was_never_put_and_a_deleted_one_are_not_found(store: Store) -> None:
    _assert_absent(store)
    store.delete(DIGEST)
    assert list(store.digests()) == []
    store.put(DIGEST, {"a": BIG})
    store.put(OTHER, {"a": b"2"})
    store.delete(DIGEST)
    _drain(store)  # a copy in progress can be opened until it is complete
    _assert_absent(store)
    assert _content(store, OTHER) == {"a": b"2"}


@pytest.mark.covering(2)
@pytest.mark.parametrize("read_before", [0, pytest.param(1000, marks=pytest.mark.soak), CHUNK_BYTES + 5])
@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
def test_a_blob_deleted_during_a_read_is_read_unchanged_or_not_found(
    store: Store, read_before: int, replaced: bool
) -> None:
    store.put(DIGEST, {"a": BIG})
    with closing(store.open(DIGEST)) as blob:
        content = memoryview(bytearray(len(BIG)))
        blob.read_into("a", 0, content[:read_before])
        if replaced:
            store.put(DIGEST, {"a": BIG[::-1]})
            _drain(store)
        else:
            store.delete(DIGEST)
        try:
            for at in range(read_before, len(BIG), 1 << 20):
                blob.read_into("a", at, content[at : at + (1 << 20)])
            assert content == BIG
        except AdapterNotFound:
            pass
    if replaced:
        assert _content(store) == {"a": BIG[::-1]}
    else:
        _assert_absent(store)


def test_pieces_of_any_size_and_in_any_order_are_the_same_bytes(store: Store) -> None:
    """Reads forward, backward, across chunk boundaries and from member to member, then closes the blob in the
    middle."""
    members = {"a": BIG[:700], "none": b"", "b": BIG}
    store.put(DIGEST, members)
    for piece_bytes in (4097, 1 << 20, CHUNK_BYTES - 1, CHUNK_BYTES, len(BIG)):
        assert read_members(store, DIGEST, piece_bytes) == members, piece_bytes
    draw = random.Random(5)
    for _ in range(3):
        with closing(store.open(DIGEST)) as blob:
            assert blob.members == {"a": 700, "none": 0, "b": len(BIG)}
            at, name = 0, "b"
            for _ in range(25):
                if draw.random() < 0.4:
                    name = draw.choice("abb")
                    edge = draw.choice([0, CHUNK_BYTES - 9, RANGE_BYTES - 9, draw.randrange(len(BIG))])
                    at = min(edge, len(members[name]))
                count = min(draw.choice([0, 1, 18, 5000, 3 << 20]), len(members[name]) - at)
                buffer = memoryview(bytearray(count))
                blob.read_into(name, at, buffer)
                assert buffer == members[name][at : at + count], (name, at, count)
                at += count
    assert _content(store) == members


def test_putting_a_digest_again_replaces_what_is_there(store: Store) -> None:
    store.put(DIGEST, {"a": b"old", "b": BIG})
    store.put(DIGEST, {"a": b"new", "b": BIG[::-1]})
    _drain(store)
    assert _content(store) == {"a": b"new", "b": BIG[::-1]}
    store.delete(DIGEST)
    assert not store.exists(DIGEST)


def test_a_change_by_one_process_is_visible_to_another_at_once(store: Store, second: Store) -> None:
    for step in range(3):
        _assert_absent(second)
        store.put(DIGEST, {"a": bytes([step])})
        assert second.exists(DIGEST) and list(second.digests()) == [DIGEST]
        _drain(store)
        assert _content(second) == {"a": bytes([step])}
        store.delete(DIGEST)


def test_an_invalid_digest_and_an_invalid_member_name_are_refused(store: Store) -> None:
    for digest in ("", "AB" * 32, "ab" * 31, "../" + "a" * 61, "ab" * 32 + "\n", "{x}"):
        for call in (store.open, store.delete, store.exists, lambda bad: store.put(bad, {"a": b""})):
            with pytest.raises(ValueError, match="is not a digest"):
                call(digest)
    for name in ("", "..", "a/b", ".hidden", "a\0b", "x" * 129, "a\n"):
        with pytest.raises(ValueError, match="is not a valid member name"):
            store.put(DIGEST, {"ok": b"", name: b""})
    assert not store.exists(DIGEST)
    longest = "x" * 128
    store.put(DIGEST, {longest: b"1"})
    assert _content(store) == {longest: b"1"}


def test_readers_beside_writers_and_deleters_see_a_whole_blob_or_none(
    place: StoreUnderTest, store: Store
) -> None:
    versions = [{"a": bytes([n]) * 9, "b": bytes([n]) * (CHUNK_BYTES + n)} for n in range(3)]

    def write(version: dict[str, bytes]) -> None:
        for _ in range(4):
            store.put(DIGEST, version)

    def read() -> None:
        for _ in range(12):
            try:
                found = _content(store)
            except AdapterNotFound:
                continue
            _assert_one_of(versions, found, place)

    def delete() -> None:
        for _ in range(6):
            store.delete(DIGEST)

    with ThreadPoolExecutor(6) as threads:
        jobs = [threads.submit(write, version) for version in versions]
        jobs += [threads.submit(call) for call in (read, read, delete)]
        for job in jobs:
            job.result()
    store.put(DIGEST, versions[0])
    _drain(store)
    assert _content(store) == versions[0]


def _assert_one_of(versions: list[dict[str, bytes]], found: dict[str, bytes], place: StoreUnderTest) -> None:
    if place.mixes:  # members are replaced one by one; blobs of one digest are interchangeable
        assert found.keys() == versions[0].keys()
        assert all(any(found[name] == version[name] for version in versions) for name in found)
    else:
        assert found in versions


def test_of_concurrent_puts_exactly_one_is_kept_whole(
    place: StoreUnderTest, store: Store, second: Store
) -> None:
    versions = [{"a": bytes([n]) * 9, "b": bytes([n]) * (9 + n)} for n in range(4)]
    for _ in range(5):
        together = Barrier(len(versions))

        def put(number: int, together: Barrier = together) -> None:
            together.wait()
            (store if number % 2 else second).put(DIGEST, versions[number])

        with ThreadPoolExecutor(len(versions)) as threads:
            list(threads.map(put, range(len(versions))))
        _drain(store)
        _drain(second)
        _assert_one_of(versions, _content(store), place)
        assert list(second.digests()) == [DIGEST]
    store.delete(DIGEST)
    _assert_absent(second)


def test_a_listing_beside_writers_shows_every_lasting_blob_and_no_other_digest(store: Store) -> None:
    staying = [f"{n:02x}" * 32 for n in range(5)]
    passing = [f"{n:02x}" * 32 for n in range(0xF0, 0xF5)]
    for digest in staying:
        store.put(digest, {"a": b"1"})

    def come_and_go() -> None:
        for digest in passing * 3:
            store.put(digest, {"a": b"1"})
            store.delete(digest)

    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(come_and_go)
        while not job.done():
            found = list(store.digests())
            assert len(found) == len(set(found))
            assert set(staying) <= set(found) <= {*staying, *passing}
        job.result()
    assert sorted(store.digests()) == staying


# A process that dies when its second member is read.
DIES = """
import os, signal, sys
from collections.abc import Mapping
from pathlib import Path
from slora_adapters.store.store_url import open_store
from tests.support import shared_files
class Members(Mapping):
    done = False
    def __iter__(self):
        return iter(("a", "b"))
    def __len__(self):
        return 2
    def __getitem__(self, name):
        if name == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        return Path(sys.argv[1])
open_store(*sys.argv[2:]).put("ab" * 32, Members())
"""


SHARED = pytest.mark.parametrize(
    "kind", [_file, _redis, _objects, _tiered_objects], ids=lambda kind: kind.__name__.strip("_")
)


@SHARED
@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_a_writer_killed_between_members_changes_nothing(
    kind: Callable, existing: bool, tmp_path: Path, make_redis: Callable
) -> None:
    place = kind(tmp_path, make_redis)
    store = place.open()
    if existing:
        store.put(DIGEST, {"a": b"old", "b": b"old"})
    (tmp_path / "a").write_bytes(BIG)
    status, output = ForkedProgram(DIES, tmp_path / "a", *place.urls).finish()
    assert status == -signal.SIGKILL, output
    if existing:
        assert _content(store) == {"a": b"old", "b": b"old"}
    else:
        _assert_absent(store)
    store.put(DIGEST, {"a": b"new", "b": b"new"})
    _drain(store)
    assert _content(store) == {"a": b"new", "b": b"new"}
    store.delete(DIGEST)
    _assert_absent(store)
    store.close()


# A process that puts its version, reads the stored blob, and sometimes deletes it. Any complete version is correct. A
# mixture of versions is correct only where `mixes` is True.
COMPETES = """
import sys
from slora_adapters.errors import AdapterNotFound
from slora_adapters.store.store_url import open_store
from tests.adapters.blobs import read_members
from tests.support import shared_files
number, mixes, urls = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3:]
versions = [{"a": bytes([n]) * 9, "b": bytes([n]) * (9 + n)} for n in range(3)]
store = open_store(*urls)
for turn in range(12):
    store.put("ab" * 32, versions[number])
    try:
        found = read_members(store, "ab" * 32)
    except AdapterNotFound:
        found = versions[number]
    assert found.keys() == {"a", "b"}
    assert found in versions or mixes and all(found[m] in [v[m] for v in versions] for m in found), found
    if turn % 4 == number:
        store.delete("ab" * 32)
store.close()
"""


@SHARED
def test_concurrent_processes_see_whole_blobs_and_leave_no_files(
    kind: Callable, tmp_path: Path, make_redis: Callable
) -> None:
    place = kind(tmp_path, make_redis)
    store = place.open()
    programs = [ForkedProgram(COMPETES, number, place.mixes, *place.urls) for number in range(3)]
    for program in programs:
        status, output = program.finish()
        assert status == 0, output
    store.delete(DIGEST)
    _assert_absent(store)
    assert not [path for path in tmp_path.rglob("blobs/**/*") if path.is_file()]
    store.close()


def test_a_removed_store_is_unavailable_and_not_empty(place: StoreUnderTest, store: Store) -> None:
    store.put(DIGEST, {"a": b"1"})
    store.check()
    place.lose()
    for call in (
        store.check,
        lambda: store.put(OTHER, {"a": b""}),
        lambda: store.open(OTHER),
        lambda: store.exists(OTHER),
        lambda: store.delete(OTHER),
        lambda: store.exists(DIGEST),
        lambda: list(store.digests()),
    ):
        with pytest.raises(StoreUnavailable):
            call()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://bucket", "'nowhere' is not supported.* redis://host/db .*s3://"),
        ("file://elsewhere/x", "file:///path"),
        ("local://elsewhere/x", "local:///path"),
        ("memory://x", "other processes do not see"),
        ("hf://org/repo", "slora adapter push hf://ORG/REPO"),
        ("http://host/x", "cannot be written"),
        ("simplecache::shared:///x", "chain"),
        ("shared://", "needs a bucket and folder"),
    ],
)
def test_invalid_store_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url)


def test_both_names_of_local_files_mean_the_same_store(tmp_path: Path) -> None:
    open_store(f"local://{tmp_path}/a b").put(DIGEST, {"a": b"1"})
    for name in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a%20b"):
        assert open_store(name).exists(DIGEST)


@pytest.mark.parametrize("url", ["redis://:pa55/word@host/0", "redis://host:pa55word/0"])
def test_an_invalid_url_of_a_redis_is_refused_without_a_part_of_it(url: str) -> None:
    """Born from a bug: the message quoted the beginning of a password with an unescaped slash."""
    with pytest.raises(ValueError, match="write / as %2F") as caught:
        open_store(url)
    assert "pa55" not in str(caught.value)


def test_a_warm_tier_that_is_not_redis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be the URL of a Redis"):
        open_store(str(tmp_path), str(tmp_path))


def test_a_store_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for url in (str(tmp_path / "file"), f"shared://{tmp_path}/file"):
        with pytest.raises(StoreUnavailable, match=r"cannot be used|is unavailable"):
            open_store(url)
