import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from slora_adapters.catalog import Catalog
from slora_adapters.errors import AdapterNotFound, BadAdapterName, StoreUnavailable
from slora_adapters.file_store import FileStore
from slora_adapters.inspection import inspect
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft_directory import parse_adapter
from slora_adapters.registry import Publication, Registry
from tests.adapters.blobs import read_members
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors, write_directory
from tests.adapters.registry_places import OpenStorage


@pytest.fixture
def catalog(tmp_path: Path, open_storage: OpenStorage) -> Catalog:
    return Catalog(Registry(open_storage()), FileStore(tmp_path / "store"))


def _publish(catalog: Catalog, folder: Path, tenant: str = "t1", name: str = "a", **what) -> Publication:
    write_directory(folder, make_members(**what))
    return catalog.publish(tenant, name, inspect(folder, folder, SHAPE, AdapterLimits()))


def test_a_published_adapter_can_be_fetched_and_has_its_digest(catalog: Catalog, tmp_path: Path) -> None:
    config = make_config(alpha_pattern={"q_proj": 5, "layers.0.*": 7}, base_model_name_or_path="/home/secret")
    change = _publish(catalog, tmp_path / "up", config=config, chat_template_dot_jinja="{{ m }}")
    digest = change.record.version.digest
    members = read_members(catalog.store, digest)
    adapter = parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits())
    assert adapter.digest == digest
    assert adapter.config.alpha_patterns == (("q_proj", 5.0), ("layers.0.*", 7.0)), (
        "order decides, and is kept"
    )
    assert change.record.details.extras.chat_template == "{{ m }}"
    whole = b"".join(members.values())
    assert b"secret" not in whole and b"{{ m }}" not in whole, "a blob may be shared with other tenants"


def test_two_tenants_share_the_bytes_and_the_last_one_takes_them_away(
    catalog: Catalog, tmp_path: Path
) -> None:
    first = _publish(catalog, tmp_path / "1", "t1")
    second = _publish(catalog, tmp_path / "2", "t2", chat_template_dot_jinja="other")
    assert first.record.version.digest == second.record.version.digest
    assert len(list(catalog.store.digests())) == 1
    catalog.withdraw("t1", "a")
    assert len(list(catalog.store.digests())) == 1
    catalog.withdraw("t2", "a")
    assert list(catalog.store.digests()) == []
    with pytest.raises(AdapterNotFound):
        catalog.withdraw("t2", "a")


class RecordedStore(FileStore):
    """Keeps what it is asked, and how many bytes it is given."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: list[tuple[str, int]] = []

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        sizes = (len(raw) if isinstance(raw, bytes) else raw.stat().st_size for raw in members.values())
        self.calls.append(("put", sum(sizes)))
        super().put(digest, members)

    def fetch(self, digest: str) -> dict[str, memoryview]:
        self.calls.append(("fetch", 0))
        return super().fetch(digest)

    def exists(self, digest: str) -> bool:
        self.calls.append(("exists", 0))
        return super().exists(digest)


def test_weights_that_somebody_else_has_cost_the_work_of_new_ones(
    tmp_path: Path, open_storage: OpenStorage
) -> None:
    """Else how long an upload takes would tell whether another tenant has them."""
    store = RecordedStore(tmp_path / "store")
    catalog, tried = Catalog(Registry(open_storage()), store), []
    write_directory(tmp_path / "up", make_members())
    work = []
    for tenant in ("t1", "t2"):
        adapter = inspect(tmp_path / "up", tmp_path / "up", SHAPE, AdapterLimits())
        before, inode = list(store.calls), _inodes(store)
        assert catalog.publish(tenant, "a", adapter, tried.append).is_new
        work.append((store.calls[len(before) :], len(tried), len(_inodes(store) - inode)))
    (calls, _, num_files), again = work
    assert [name for name, _ in calls] == ["put"] and calls[0][1] > 0 and num_files == 2
    assert again == (calls, 2, num_files), "each file was written anew"


def _inodes(store: FileStore) -> set[int]:
    return {path.stat().st_ino for path in store.root.rglob("*") if path.is_file()}


def test_a_blob_goes_with_the_last_version_that_has_it(catalog: Catalog, tmp_path: Path) -> None:
    old = _publish(catalog, tmp_path / "1").record.version.digest
    new = _publish(catalog, tmp_path / "2", tensors=make_tensors(seed=1)).record.version.digest
    assert sorted(catalog.store.digests()) == sorted([old, new])
    catalog.withdraw("t1", "a@1")
    assert list(catalog.store.digests()) == [new]
    _publish(catalog, tmp_path / "1")
    catalog.withdraw("t1", "a")
    assert list(catalog.store.digests()) == []


def test_a_bad_name_stores_nothing(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(BadAdapterName):
        _publish(catalog, tmp_path / "1", name="No Good")
    assert list(catalog.store.digests()) == []


def test_sweep_drops_what_a_crash_left_and_nothing_else(catalog: Catalog, tmp_path: Path) -> None:
    kept = _publish(catalog, tmp_path / "1").record.version.digest
    catalog.store.put("e" * 64, {"a": b"left by a crash"})
    with catalog.registry.reservation("f" * 64):
        catalog.store.put("f" * 64, {"a": b"being uploaded"})
        assert catalog.sweep() == 1
        assert sorted(catalog.store.digests()) == sorted([kept, "f" * 64])


def test_a_store_that_is_down_does_not_undo_a_deletion(
    catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _publish(catalog, tmp_path / "1")
    (tmp_path / "store" / "blobs").rename(tmp_path / "store" / "gone")
    (tmp_path / "store" / "blobs").write_text("not a folder")
    catalog.withdraw("t1", "a")
    assert catalog.registry.list("t1") == [] and "stays until the next sweep" in caplog.text
    caplog.clear()
    with pytest.raises(StoreUnavailable):
        _publish(catalog, tmp_path / "2", tensors=make_tensors(seed=1))
    assert catalog.registry.list("t1") == []
    assert not caplog.records, "it was asked to delete what it could not put, with the database locked"


def test_an_upload_beside_deletions_of_the_same_weights_never_loses_its_blob(
    catalog: Catalog, tmp_path: Path
) -> None:
    """The race that a plain reference count loses: counted zero, uploaded again, deleted."""

    def churn(tenant: str) -> None:
        for _ in range(15):
            change = _publish(catalog, tmp_path / tenant, tenant)
            if not catalog.store.exists(change.record.version.digest):
                lost.append(tenant)
            catalog.withdraw(tenant, "a")

    lost: list[str] = []
    threads = [threading.Thread(target=churn, args=(f"t{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert list(catalog.store.digests()) == []
