import stat
from pathlib import Path

import pytest

from slora_adapters.errors import AdapterNotFound, DiskFull, StoreUnavailable
from slora_adapters.store.file_store import FileStore, locked_folder
from tests.adapters.blobs import dies_at, read_members
from tests.support.file_limit import largest_file

DIGEST, OTHER = "ab" * 32, "cd" * 32


def test_a_new_root_is_readable_by_its_owner_only_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    FileStore(tmp_path / "new" / "store")
    (tmp_path / "shared").mkdir(mode=0o750)
    FileStore(tmp_path / "shared")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new/store", "shared")]
    assert modes == [0o700, 0o750]


OLD = {"a": b"old" * 5, "b": b"y" * 100_000}
NEW = {"a": b"new" * 5, "b": b"x" * 100_000}


def _content(store: FileStore, digest: str) -> dict[str, bytes] | None:
    try:
        return read_members(store, digest)
    except AdapterNotFound:
        return None


@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_a_put_killed_at_any_point_leaves_a_whole_blob_or_none(tmp_path: Path, existing: bool) -> None:
    deaths = 0
    for after in range(200):
        root = tmp_path / str(after)
        store = FileStore(root)
        store.put(OTHER, OLD)
        if existing:
            store.put(DIGEST, OLD)
        survived = not dies_at(after, str(root), "put", NEW)
        store = FileStore(root)
        found = _content(store, DIGEST)
        if survived:
            assert found == NEW
        elif existing:  # members of one digest are interchangeable, so a mixture is whole
            assert found is not None and all(found[name] in (OLD[name], NEW[name]) for name in OLD)
        else:
            assert found in (None, NEW)
        assert _content(store, OTHER) == OLD
        assert list((root / "tmp").iterdir()) == [], "what the dead left is swept"
        if survived:
            break
        deaths += 1
    assert survived and deaths >= 10


def test_a_delete_killed_at_any_point_leaves_a_whole_blob_or_none(tmp_path: Path) -> None:
    for after in range(100):
        root = tmp_path / str(after)
        FileStore(root).put(DIGEST, OLD)
        survived = not dies_at(after, str(root), "delete", NEW)
        store = FileStore(root)
        assert _content(store, DIGEST) in ((None,) if survived else (None, OLD))
        assert list((root / "tmp").iterdir()) == []
        if survived:
            break
    assert survived and after >= 3


def test_a_sweep_leaves_the_folders_of_living_writers_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with locked_folder(tmp_path / "tmp") as folder:
        FileStore(tmp_path)
        assert folder.exists()
    assert not folder.exists()
    (tmp_path / "tmp" / "orphan").mkdir()
    (tmp_path / "tmp" / "orphan" / "a").write_bytes(b"x")
    FileStore(tmp_path)
    assert not (tmp_path / "tmp" / "orphan").exists()
    store.check()


def test_a_source_file_that_is_missing_stores_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    with pytest.raises(StoreUnavailable):
        store.put(DIGEST, {"a": b"1", "b": tmp_path / "nowhere"})
    assert not store.exists(DIGEST)
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_a_store_without_room_says_so_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    store, source = FileStore(tmp_path / "store"), tmp_path / "source"
    source.write_bytes(bytes(1 << 20))
    for content in (bytes(1 << 20), source):
        with largest_file(1 << 19), pytest.raises(DiskFull, match="store is full"):
            store.put(DIGEST, {"a": b"small", "b": content})
        assert not store.exists(DIGEST) and list((tmp_path / "store" / "tmp").iterdir()) == []
        store.put(OTHER, {"a": b"small"})


def test_the_store_outlives_the_file_that_was_put(tmp_path: Path) -> None:
    store, source = FileStore(tmp_path / "store"), tmp_path / "source"
    source.write_bytes(b"content")
    store.put(DIGEST, {"a": source})
    source.write_bytes(b"changed")
    assert _content(store, DIGEST) == {"a": b"content"}
