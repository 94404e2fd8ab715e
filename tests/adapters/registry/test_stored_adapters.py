import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from slora_adapters.database.database import Database
from slora_adapters.errors import AdapterNotFound, BadAdapterName, StoreUnavailable
from slora_adapters.inspection.inspection_process import inspect
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import parse_adapter
from slora_adapters.registry.record import Publication
from slora_adapters.registry.registry import Registry, StoredAdapters
from slora_adapters.store.file_store import FileStore
from tests.adapters.blobs import read_members
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors, write_directory
from tests.adapters.registry_places import OpenDatabase, reserved


@pytest.fixture
def catalog(tmp_path: Path, open_database: OpenDatabase) -> StoredAdapters:
    return StoredAdapters(Registry(open_database()), FileStore(tmp_path / "store"))


def _publish(
    catalog: StoredAdapters, folder: Path, tenant: str = "t1", name: str = "a", **what
) -> Publication:
    write_directory(folder, make_members(**what))
    adapter = inspect(folder, folder, SHAPE, AdapterLimits())
    return catalog.commit(tenant, name, adapter, catalog.store_blob(adapter))


def test_a_published_adapter_can_be_fetched_and_has_its_digest(
    catalog: StoredAdapters, tmp_path: Path
) -> None:
    config = make_config(alpha_pattern={"q_proj": 5, "layers.0.*": 7}, base_model_name_or_path="/home/secret")
    change = _publish(catalog, tmp_path / "up", config=config, chat_template_dot_jinja="{{ m }}")
    digest = change.record.version.digest
    members = read_members(catalog.store, digest)
    adapter = parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits())
    assert adapter.digest == digest
    resolved = {rf"^model\.layers\.{layer}\.self_attn\.q_proj": 5.0 for layer in (0, 1)}
    resolved[r"^model\.layers\.0\.mlp\.down_proj"] = 7.0
    assert dict(adapter.config.alpha_patterns) == resolved, (
        "of two patterns that match, the first one decides"
    )
    _, extras = catalog.registry.serve("t1", "a")
    assert extras.chat_template == "{{ m }}"
    assert change.record.details.blob_bytes == sum(map(len, members.values())), "headers and config included"
    whole = b"".join(members.values())
    assert b"secret" not in whole and b"{{ m }}" not in whole, "a blob may be shared with other tenants"


def test_two_tenants_share_a_blob_and_the_last_deletion_removes_it(
    catalog: StoredAdapters, tmp_path: Path
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
    """Records all calls and the number of bytes in each upload."""

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


def test_weights_that_another_tenant_has_cost_the_same_work_as_new_ones(
    tmp_path: Path, open_database: OpenDatabase
) -> None:
    """Otherwise the duration of an upload would reveal whether another tenant has the same weights."""
    store = RecordedStore(tmp_path / "store")
    catalog = StoredAdapters(Registry(open_database()), store)
    write_directory(tmp_path / "up", make_members())
    work = []
    for tenant in ("t1", "t2"):
        adapter = inspect(tmp_path / "up", tmp_path / "up", SHAPE, AdapterLimits())
        before, inode = list(store.calls), _inodes(store)
        assert catalog.commit(tenant, "a", adapter, catalog.store_blob(adapter)).is_new
        work.append((store.calls[len(before) :], len(_inodes(store) - inode)))
    (calls, num_files), again = work
    assert [name for name, _ in calls] == ["put"] and calls[0][1] > 0 and num_files == 2
    assert again == (calls, num_files), "each file was written anew"


def _inodes(store: FileStore) -> set[int]:
    return {path.stat().st_ino for path in store.root.rglob("*") if path.is_file()}


def test_discarding_an_upload_drops_its_blob_unless_another_upload_needs_it(
    catalog: StoredAdapters, tmp_path: Path
) -> None:
    write_directory(tmp_path / "1", make_members())
    adapter = inspect(tmp_path / "1", tmp_path / "1", SHAPE, AdapterLimits())
    reservations = [catalog.store_blob(adapter) for _ in range(2)]
    catalog.discard(adapter, reservations[0])
    assert list(catalog.store.digests()) == [adapter.digest]
    with pytest.raises(BadAdapterName):
        catalog.commit("t1", "No Good", adapter, reservations[1])
    catalog.discard(adapter, reservations[1])
    assert list(catalog.store.digests()) == []


def test_a_sweep_deletes_only_the_blobs_left_by_a_crash(catalog: StoredAdapters, tmp_path: Path) -> None:
    kept = _publish(catalog, tmp_path / "1").record.version.digest
    catalog.store.put("e" * 64, {"a": b"left by a crash"})
    with reserved(catalog.registry, "f" * 64):
        catalog.store.put("f" * 64, {"a": b"being uploaded"})
        assert catalog.sweep() == 1
        assert sorted(catalog.store.digests()) == sorted([kept, "f" * 64])


def test_an_unreferenced_blob_is_deleted_after_the_grace_period(
    tmp_path: Path, open_database: OpenDatabase
) -> None:
    now = [0.0]
    registry = Registry(open_database())
    catalog = StoredAdapters(registry, FileStore(tmp_path / "store"), grace_s=10.0, clock=lambda: now[0])
    for digest in ("e" * 64, "f" * 64):
        catalog.store.put(digest, {"a": b"left by a crash"})

    def left_at(at: float) -> list[str]:
        now[0] = at
        catalog.sweep()
        return sorted(digest[0] for digest in catalog.store.digests())

    assert left_at(0.0) == ["e", "f"]
    with reserved(registry, "f" * 64):
        assert left_at(5.0) == ["e", "f"]
    assert left_at(9.75) == ["e", "f"]
    assert left_at(10.0) == ["f"], "one of them was needed meanwhile"
    assert left_at(19.5) == ["f"] and left_at(19.75) == []


def test_no_blob_is_deleted_from_a_store_that_another_registry_uses(
    catalog: StoredAdapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(tmp_path / "other.db")
    other = StoredAdapters(Registry(database), FileStore(tmp_path / "store"))
    digest = _publish(other, tmp_path / "1").record.version.digest
    assert catalog.sweep() == 0
    _publish(catalog, tmp_path / "2")
    catalog.withdraw("t1", "a")
    assert other.store.exists(digest)
    assert other.registry.registry in caplog.text
    other.withdraw("t1", "a")
    assert other.store.exists(digest), "who of them was last nobody knows"
    (tmp_path / "store" / "claims" / other.registry.registry).unlink()
    assert catalog.sweep() == 1 and not catalog.store.exists(digest)
    database.close()


class ConcurrentlyClaimedStore(FileStore):
    """While one registry deletes an unreferenced blob, another registry starts to use it."""

    def digests(self) -> Iterator[str]:
        found = list(super().digests())
        self.claim("another")
        return iter(found)


def test_a_registry_that_claims_a_store_during_a_sweep_keeps_its_blobs(
    tmp_path: Path, open_database: OpenDatabase
) -> None:
    catalog = StoredAdapters(Registry(open_database()), ConcurrentlyClaimedStore(tmp_path / "store"))
    catalog.store.put("e" * 64, {"a": b"the other one's"})
    catalog.sweep()
    assert catalog.store.exists("e" * 64)


def test_an_emptied_database_deletes_no_blobs(tmp_path: Path) -> None:
    """A database that was emptied holds no references, so every blob would look unreferenced."""
    path = tmp_path / "slora.db"
    with closing(Database(path)) as database:
        catalog = StoredAdapters(Registry(database), FileStore(tmp_path / "store"))
        digest = _publish(catalog, tmp_path / "1").record.version.digest
    path.unlink()
    with closing(Database(path)) as database:
        assert StoredAdapters(Registry(database), FileStore(tmp_path / "store")).sweep() == 0
    assert catalog.store.exists(digest)


def test_a_store_that_is_down_does_not_undo_a_deletion(
    catalog: StoredAdapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _publish(catalog, tmp_path / "1")
    (tmp_path / "store" / "blobs").rename(tmp_path / "store" / "gone")
    (tmp_path / "store" / "blobs").write_text("not a folder", encoding="utf-8")
    catalog.withdraw("t1", "a")
    assert catalog.registry.list("t1") == [] and "the next sweep tries again" in caplog.text
    caplog.clear()
    with pytest.raises(StoreUnavailable):
        _publish(catalog, tmp_path / "2", tensors=make_tensors(seed=1))
    assert catalog.registry.list("t1") == []
    assert not caplog.records, "it was asked to delete what it could not put, with the database locked"


def test_an_upload_beside_deletions_of_the_same_weights_never_loses_its_blob(
    catalog: StoredAdapters, tmp_path: Path
) -> None:
    """A plain reference count loses this race: it reads zero, the weights are uploaded again, and then they are
    deleted."""

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
