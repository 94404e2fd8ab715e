import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from slora_adapters.errors import AdapterNotFound, StoreUnavailable, StoreUnfit
from slora_adapters.store import object_store
from slora_adapters.store.object_blob import RANGE_BYTES
from slora_adapters.store.object_store import LEFTOVER_AGE_S, UPLOAD_LIMIT_S, ObjectStore
from slora_adapters.store.store_url import open_store
from tests.adapters.blobs import dies_at, read_members
from tests.support.clock import Clock
from tests.support.shared_files import SharedFiles

DIGEST, OTHER = "ab" * 32, "cd" * 32
OLD = {"a": b"old" * 5, "b": b"y" * 1000}
NEW = {"a": b"new" * 5, "b": b"x" * 1000}


NOW_S = 1.8e9


class FaultyFileSystem(SharedFiles):
    """before: called with the name and path of each operation; it may raise. is_hidden: hides paths from listings."""

    cachable = False
    before: Callable[[str, str], None] = staticmethod(lambda _operation, _path: None)
    is_hidden: Callable[[str], bool] = staticmethod(lambda _path: False)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self.before("write", path)
        super().pipe_file(path, value, **kwargs)

    def cat_file(self, path: str, **kwargs: Any) -> bytes:
        self.before("read", path)
        return super().cat_file(path, **kwargs)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[Any]:
        self.before("list", path)
        found = super().ls(path, detail=True, **kwargs)
        return [entry if detail else entry["name"] for entry in found if not self.is_hidden(entry["name"])]

    def rm_file(self, path: str) -> None:
        self.before("remove", path)
        super().rm_file(path)


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW_S)


@pytest.fixture
def filesystem() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def store(tmp_path: Path, filesystem: FaultyFileSystem, clock: Clock) -> Iterator[ObjectStore]:
    store = ObjectStore(filesystem, str(tmp_path / "objects"), scheme="shared", clock=clock)
    store.prepare()
    yield store
    store.close()


def _objects(root: Path) -> list[str]:
    """All objects of the store, except the marker that identifies a store."""
    paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    return sorted(str(path) for path in paths if path.name != "slora-store")


def _content(store: ObjectStore, digest: str = DIGEST) -> dict[str, bytes] | None:
    try:
        found = read_members(store, digest)
    except AdapterNotFound:
        found = None
    assert store.exists(digest) == (found is not None) == (digest in list(store.digests()))
    return found


def test_replaced_and_deleted_blobs_leave_no_objects(store: ObjectStore, tmp_path: Path) -> None:
    for members in (OLD, NEW, OLD):
        store.put(DIGEST, members)
    assert len(_objects(tmp_path / "objects")) == 3, "two members, and that they are all"
    store.delete(DIGEST)
    assert _objects(tmp_path / "objects") == []


@pytest.mark.parametrize("call", ["new", "replacing", "delete"])
def test_a_process_killed_at_any_point_leaves_a_whole_blob_or_none_and_its_rest_is_removed(
    tmp_path: Path, call: str
) -> None:
    clock = Clock(NOW_S)
    for after in range(100):
        root = tmp_path / str(after)
        store = ObjectStore(SharedFiles(), str(root), scheme="shared", clock=clock)
        store.prepare()
        if call != "new":
            store.put(DIGEST, OLD)
        survived = not dies_at(after, f"shared://{root}", "delete" if call == "delete" else "put", NEW)
        found = _content(store)
        store.close()
        if survived:
            assert found == (None if call == "delete" else NEW)
        else:
            assert found in {"new": (None, NEW), "replacing": (OLD, NEW), "delete": (OLD, None)}[call]
        clock.now += LEFTOVER_AGE_S * 400  # later than the dead process's own clock, too
        again = ObjectStore(SharedFiles(), str(root), scheme="shared", clock=clock)
        again.prepare()
        assert len(_objects(root)) == (0 if found is None else 3), "what the dead left is removed"
        assert _content(again) == found
        again.close()
        if survived:
            break
    assert survived and after >= 5


def test_the_next_upload_removes_old_objects_of_a_dead_writer(
    store: ObjectStore, filesystem: FaultyFileSystem, clock: Clock, tmp_path: Path
) -> None:
    def die(operation: str, path: str) -> None:
        if operation == "remove" or "/done." in path:
            raise ConnectionError("gone")

    filesystem.before = die
    with pytest.raises(StoreUnavailable, match=r"shared:// store .*: ConnectionError: gone"):
        store.put(DIGEST, OLD)
    filesystem.before = FaultyFileSystem.before
    left = _objects(tmp_path / "objects")
    assert len(left) == 3 and _content(store) is None
    clock.now += LEFTOVER_AGE_S - 2
    store.put(OTHER, NEW)
    assert set(left) <= set(_objects(tmp_path / "objects")), "its writer may still live"
    clock.now += 4
    store.put(OTHER, NEW)
    assert len(_objects(tmp_path / "objects")) == 3 and _content(store, OTHER) == NEW


def test_a_failed_upload_leaves_only_a_temporary_marker(
    store: ObjectStore, filesystem: FaultyFileSystem, clock: Clock, tmp_path: Path
) -> None:
    store.put(DIGEST, OLD)
    before = _objects(tmp_path / "objects")
    refused, written = Event(), Event()
    for failures, fails in enumerate((".a", "done."), 1):

        def refuse(operation: str, path: str, fails: str = fails) -> None:
            name = Path(path).name
            if operation == "write" and (name.endswith(fails) or name.startswith(fails)):
                refused.set()
                raise OSError("no room")
            if operation == "write" and name.endswith(".b") and fails == ".a":
                refused.wait(300)
                time.sleep(0.05)  # still in progress when the other upload has failed
                written.set()

        filesystem.before = refuse
        with pytest.raises(StoreUnavailable, match="no room"):
            store.put(DIGEST, NEW)
        assert written.is_set(), "all writes have ended before anything is removed"
        filesystem.before = FaultyFileSystem.before
        left = set(_objects(tmp_path / "objects")).difference(before)
        assert len(left) == failures and all(path.startswith("begun/") for path in left)
        assert _content(store) == OLD
    with pytest.raises(StoreUnavailable, match="nowhere"):
        store.put(DIGEST, {"a": tmp_path / "nowhere"})
    clock.now += LEFTOVER_AGE_S + 2
    store.put(OTHER, OLD)
    store.delete(OTHER)
    assert _objects(tmp_path / "objects") == before


def test_a_writer_aborts_before_its_upload_counts_as_abandoned(
    store: ObjectStore, filesystem: FaultyFileSystem, clock: Clock, tmp_path: Path
) -> None:
    def sleep(operation: str, path: str) -> None:
        if operation == "write" and path.endswith(".b"):
            clock.now += UPLOAD_LIMIT_S + 2

    filesystem.before = sleep
    with pytest.raises(StoreUnavailable, match=f"more than {UPLOAD_LIMIT_S} s"):
        store.put(DIGEST, OLD)
    assert not any(path.startswith("blobs/") for path in _objects(tmp_path / "objects"))


def test_an_upload_with_a_missing_member_is_not_a_blob(store: ObjectStore, tmp_path: Path) -> None:
    """Such an upload results from a writer that paused for a day before it wrote the final marker."""
    store.put(DIGEST, OLD)
    member = next((tmp_path / "objects").rglob("*.b"))
    member.write_bytes(b"short")
    assert _content(store) is None
    member.unlink()
    assert _content(store) is None
    store.put(DIGEST, NEW)
    assert _content(store) == NEW


def test_an_incomplete_listing_is_repeated(store: ObjectStore, filesystem: FaultyFileSystem) -> None:
    """A listing of files that runs during other uploads may show the marker without its members."""
    store.put(DIGEST, OLD)
    misses = iter([True, True])
    filesystem.is_hidden = lambda path: path.endswith(".b") and next(misses, False)
    assert store.exists(DIGEST)
    assert next(misses, None) is None


def test_a_put_that_no_listing_shows_fails(
    store: ObjectStore, filesystem: FaultyFileSystem, tmp_path: Path
) -> None:
    store.put(DIGEST, OLD)
    before = set(_objects(tmp_path / "objects"))
    filesystem.is_hidden = lambda path: "/done.2." in path
    with pytest.raises(StoreUnfit, match="does not list an object that was just written"):
        store.put(DIGEST, NEW)
    assert _content(store) == OLD and before <= set(_objects(tmp_path / "objects"))


def test_a_deletion_removes_the_objects_that_a_crashed_replacement_left(
    store: ObjectStore, filesystem: FaultyFileSystem, tmp_path: Path
) -> None:
    store.put(DIGEST, OLD)

    def die(operation: str, _path: str) -> None:
        if operation == "remove":
            raise ConnectionError("gone")

    filesystem.before = die
    with pytest.raises(StoreUnavailable, match="gone"):
        store.put(DIGEST, NEW)
    filesystem.before = FaultyFileSystem.before
    assert len(list((tmp_path / "objects").rglob("done.*"))) == 2
    store.delete(DIGEST)
    assert _content(store) is None
    assert not any(path.startswith("blobs/") for path in _objects(tmp_path / "objects"))


def test_a_reader_whose_blob_is_replaced_meanwhile_gets_the_new_one(
    store: ObjectStore, filesystem: FaultyFileSystem
) -> None:
    store.put(DIGEST, OLD)

    def replace(operation: str, path: str) -> None:
        if operation == "read" and path.endswith(".b"):
            filesystem.before = FaultyFileSystem.before
            store.put(DIGEST, NEW)

    filesystem.before = replace
    assert _content(store) == NEW


ONE, TWO = {"a": b"one", "b": b"1"}, {"a": b"two", "b": b"22"}


@pytest.mark.parametrize(
    ("first", "second", "outcomes"),
    [
        (lambda store: store.put(DIGEST, ONE), lambda store: store.put(DIGEST, TWO), (ONE, TWO)),
        (lambda store: store.put(DIGEST, ONE), lambda store: store.delete(DIGEST), (ONE, None)),
        (lambda store: store.delete(DIGEST), lambda store: store.put(DIGEST, TWO), (TWO, None)),
        (lambda store: store.delete(DIGEST), lambda store: store.delete(DIGEST), (None,)),
        (lambda store: read_members(store, DIGEST), lambda store: store.put(DIGEST, TWO), (TWO,)),
    ],
    ids=["put-put", "put-delete", "delete-put", "delete-delete", "read-put"],
)
@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_two_interleaved_operations_leave_one_whole_blob_or_none(
    tmp_path: Path,
    first: Callable[[ObjectStore], object],
    second: Callable[[ObjectStore], object],
    outcomes: tuple[dict[str, bytes] | None, ...],
    existing: bool,
) -> None:
    """Runs all of the second operation between two steps of the first. Repeats this for every step of the first."""
    for after in range(100):
        root = tmp_path / str(after)
        filesystem = FaultyFileSystem()
        store, other = (
            ObjectStore(one, str(root), scheme="shared", clock=Clock(NOW_S))
            for one in (filesystem, FaultyFileSystem())
        )
        store.prepare()
        if existing:
            store.put(DIGEST, OLD)
        left = after

        def interrupt(
            _operation: str, _path: str, filesystem: FaultyFileSystem = filesystem, other=other
        ) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                filesystem.before = FaultyFileSystem.before
                second(other)

        filesystem.before = interrupt
        with suppress(AdapterNotFound):
            first(store)
        filesystem.before = FaultyFileSystem.before
        if left < 0:
            found = _content(store)
            assert found in outcomes
            assert len(_objects(root)) == (0 if found is None else 3)
        store.close()
        other.close()
        if left >= 0:
            break
    assert left >= 0 and after >= 2


def test_a_put_overtaken_by_a_later_one_keeps_the_later_blob(
    store: ObjectStore, filesystem: FaultyFileSystem, tmp_path: Path
) -> None:
    """Two complete puts run during the first put. The first one must not replace them, nor delete the last one."""

    def overtake(operation: str, path: str) -> None:
        if operation == "write" and path.endswith(".b"):
            filesystem.before = FaultyFileSystem.before
            store.put(DIGEST, OLD)
            store.put(DIGEST, NEW)

    filesystem.before = overtake
    store.put(DIGEST, {"a": b"overtaken", "b": b"overtaken"})
    assert _content(store) == NEW
    assert len(_objects(tmp_path / "objects")) == 3


def test_a_large_member_is_read_in_ranges_side_by_side(
    store: ObjectStore, filesystem: FaultyFileSystem
) -> None:
    content = os.urandom(RANGE_BYTES * 2 + 1)
    store.put(DIGEST, {"a": content})
    together = Barrier(3, timeout=300)  # the barrier breaks if one range waits for another

    def meet(operation: str, path: str) -> None:
        if operation == "read" and path.endswith(".a"):
            together.wait()

    filesystem.before = meet
    assert read_members(store, DIGEST)["a"] == content


def test_a_short_read_is_an_error(store: ObjectStore, filesystem: FaultyFileSystem) -> None:
    store.put(DIGEST, OLD)

    def shrink(operation: str, path: str) -> None:
        if operation == "read" and path.endswith(".b"):
            Path(path).write_bytes(b"y")

    filesystem.before = shrink
    with pytest.raises(StoreUnavailable, match=r"returned 1 bytes for bytes 0 to 1000 of '.*b'"):
        read_members(store, DIGEST)


def test_a_sweep_does_a_few_at_a_time(store: ObjectStore, clock: Clock, tmp_path: Path) -> None:
    notes = tmp_path / "objects" / "begun"
    for number in range(object_store._MAX_SWEPT + 3):
        (notes / f"{int(clock.now):08x}{number:032x}.{DIGEST}").write_bytes(b"")
    clock.now += LEFTOVER_AGE_S + 2
    store.put(OTHER, OLD)
    assert len(list(notes.iterdir())) == 3


def test_foreign_objects_in_the_folders_are_ignored(store: ObjectStore, tmp_path: Path) -> None:
    store.put(DIGEST, OLD)
    for path in (
        f"blobs/ab/{DIGEST}/README",
        f"blobs/ab/{DIGEST}/done.1",
        "blobs/ab/x/y",
        "blobs/z",
        "begun/z",
    ):
        (tmp_path / "objects" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "objects" / path).write_bytes(b"")
    assert _content(store) == OLD
    store.delete(DIGEST)
    assert _content(store) is None


def test_no_secret_is_in_an_error_nor_in_its_traceback(tmp_path: Path) -> None:
    filesystem = FaultyFileSystem(secret="s3cr3t+", client_kwargs={"aws_session_token": "t0ken"})
    store = ObjectStore(filesystem, str(tmp_path), scheme="shared", secrets=("passw0rd",))

    def refuse(_operation: str, _path: str) -> None:
        raise OSError(
            "passw0rd, s3cr3t+ and t0ken: https://me:other1@host/x?sig=other2 'sftp://you:other3@h'"
        )

    filesystem.before = refuse
    with pytest.raises(StoreUnavailable) as caught:
        store.exists(DIGEST)
    shown = "".join(traceback.format_exception(caught.value))
    assert "***, *** and ***: https://***@host/x?*** 'sftp://***@h'" in shown
    assert not any(secret in shown for secret in ("passw0rd", "s3cr3t", "t0ken", "other"))
    store.close()


def test_a_url_may_carry_credentials_and_gets_its_own_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GuardedFileSystem(FaultyFileSystem):
        protocol = ("guarded",)
        cachable = True

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path.removeprefix("guarded://me:pass%20word@host")

        @staticmethod
        def before(_operation: str, _path: str) -> None:
            raise PermissionError("pass%20word and pass word are wrong")

    fsspec.register_implementation("guarded", GuardedFileSystem, clobber=True)
    others = fsspec.filesystem("guarded")
    with pytest.raises(
        StoreUnfit, match=r"guarded:// store cannot be written: PermissionError: \*\*\* and \*\*\* are wrong"
    ):
        open_store(f"guarded://me:pass%20word@host{tmp_path}")
    assert others.dircache.use_listings_cache


def test_a_filesystem_that_caches_listings_is_refused(tmp_path: Path) -> None:
    store = ObjectStore(
        AsyncFileSystemWrapper(SharedFiles(skip_instance_cache=True)), str(tmp_path), scheme="far"
    )
    with pytest.raises(StoreUnfit, match="does not list an object that was just written"):
        store.prepare()
    store.close()


class MissingBucket(FaultyFileSystem):
    """An object store without folders, in which the bucket does not exist."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def before(self, operation: str, path: str) -> None:
        raise FileNotFoundError(f"bucket {path.split('/')[0]!r} does not exist")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("nobody asked for a bucket")


def test_a_missing_bucket_is_refused_and_not_created() -> None:
    store = ObjectStore(MissingBucket(), "nobodys/folder", scheme="s3")
    with pytest.raises(StoreUnfit, match=r"the s3:// store cannot be written: .*'nobodys' does not exist"):
        store.prepare()
    store.close()


def test_a_scheme_without_its_package_names_the_package() -> None:
    fsspec.register_implementation(
        "faraway", "no_such_package.Files", clobber=True, errtxt="Install no-such-package"
    )
    with pytest.raises(ValueError, match=r"faraway:// .* slora.objects.: Install no-such-package"):
        open_store("faraway://bucket")
