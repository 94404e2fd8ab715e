"""Backups of either database, restored into either, with everything that refers to anything."""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update

from slora_adapters.backup.backup import make_backup
from slora_adapters.backup.manifest import hash_file, read_manifest, verify_files
from slora_adapters.backup.restore import restore_backup
from slora_adapters.database import schema
from slora_adapters.database.audit_log import AuditFilter, AuditLog, record_change
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import StoreUnavailable, StoreUnfit
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.store.file_store import FileStore
from slora_adapters.store.store import Blob
from slora_adapters.version import AdapterVersion
from tests.adapters.database.test_migration import contents

DETAILS = AdapterDetails(2, ("q_proj",), 100)
DIGESTS = [f"{number:064x}" for number in range(1, 4)]
SHARE = {"weight": 1.0, "min_pool_share": 0.0, "max_pool_share": 1.0, "priority": 0}


class WatchedStore(FileStore):
    """Calls `before_open` with the digest of each blob that is read."""

    before_open: Callable[[str], None] = staticmethod(lambda _digest: None)

    def open(self, digest: str) -> Blob:
        self.before_open(digest)
        return super().open(digest)


class Site:
    """A database with a tenant, a key, three versions and their blobs, and a pepper."""

    def __init__(self, place: str, directory: Path) -> None:
        self.database = Database(place)
        self.store = WatchedStore(directory / "store")
        self.registry = Registry(self.database)
        self.pepper = directory / "pepper"
        self.pepper.write_bytes(b"p" * 32)
        with self.database.transaction(CHANGES) as connection:
            connection.execute(
                insert(schema.tenants),
                {"tenant_id": "acme", "name": "the-name-of-acme", "created_at": 1, **SHARE},
            )
            key = {"key_id": "k", "tenant": "acme", "digest": b"\0\xff", "created_at": 1}
            connection.execute(insert(schema.api_keys), key)
            record_change(connection, "key.create", "acme", "k")
        for number, digest in enumerate(DIGESTS):
            self.push(f"a{number}", digest)

    def push(self, name: str, digest: str) -> None:
        self.store.put(digest, {"weights": digest.encode() * 100, "config": b"{}"})
        self.registry.put(name, AdapterVersion("acme", digest), DETAILS, AdapterExtras("t \u00fc"))

    def back_up(self, target: Path) -> Path:
        make_backup(self.database, self.store, {"pepper": self.pepper, "none": target / "none"}, target)
        return target


@pytest.fixture
def site(database_place: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(database_place, tmp_path)
    with closing(site.database):
        yield site


def members(store: FileStore, digest: str) -> dict[str, int]:
    with closing(store.open(digest)) as blob:
        return dict(blob.members)


def without_transient(found: dict[str, list[str]]) -> dict[str, list[str]]:
    own = {"platform", "changes", "adapter_reservations", "audit_log"}
    return {name: rows for name, rows in found.items() if name not in own}


def test_a_backup_is_restored_as_a_data_directory(site: Site, tmp_path: Path) -> None:
    backup = site.back_up(tmp_path / "backup")
    before = contents(site.database)
    restore_backup(backup, tmp_path / "elsewhere" / "data")
    data = tmp_path / "elsewhere" / "data"
    assert (data / "pepper").read_bytes() == b"p" * 32
    assert (data / "pepper").stat().st_mode & 0o777 == 0o600 and data.stat().st_mode & 0o777 == 0o700
    store = FileStore(data / "adapters")
    assert set(store.digests()) == set(DIGESTS)
    assert members(store, DIGESTS[0]) == {"weights": 6400, "config": 2}
    with closing(Database(data / "slora.db")) as restored:
        assert without_transient(contents(restored)) == without_transient(before)
        registry = Registry(restored)
        assert registry.serve("acme", "a1")[1] == AdapterExtras("t \u00fc")
        assert registry.registry != site.registry.registry, "each deletes only its own blobs"
        entries = AuditLog(restored).read(AuditFilter(), 10)
        assert entries[0].action == "backup.restore"
        assert {"key.create", "adapter.push"} <= {entry.action for entry in entries}
        assert registry.delete("acme", "a0").orphaned
        assert not registry.blobs.find_referenced(DIGESTS[:1]), "no reservation is left"
    assert site.registry.delete("acme", "a0").orphaned
    assert not site.registry.blobs.find_referenced(DIGESTS[:1])


def test_a_backup_of_either_database_is_restored_into_the_other(
    site: Site, empty_database: str, tmp_path: Path
) -> None:
    backup, other = site.back_up(tmp_path / "backup"), FileStore(tmp_path / "other")
    before = contents(site.database)
    place = empty_database.replace("slora.db", "other.db")
    with closing(Database(place)) as target:
        restore_backup(backup, tmp_path / "data", target, other)
        assert without_transient(contents(target)) == without_transient(before)
        assert set(other.digests()) == set(DIGESTS)
        registry = Registry(target)
        last = AuditLog(target).read(AuditFilter(), 1)[0].entry_id
        registry.put("new", AdapterVersion("acme", DIGESTS[0]), DETAILS)
        assert AuditLog(target).read(AuditFilter(), 1)[0].entry_id > last
        again = contents(target)
        with pytest.raises(
            StoreUnfit, match=r"has 1 rows in the table tenants: a restore overwrites nothing"
        ):
            restore_backup(backup, tmp_path / "again", target, other)
        assert contents(target) == again and not (tmp_path / "again").exists()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["pepper"]


def test_changes_during_a_backup_neither_enter_nor_break_it(site: Site, tmp_path: Path) -> None:
    """Before each blob is copied, a version is pushed, and the one whose blob is copied next is deleted."""
    copied: list[str] = []

    def change(digest: str) -> None:
        number = len(copied)
        copied.append(digest)
        site.push(f"late{number}", f"{100 + number:064x}")
        if number + 1 < len(DIGESTS):
            for one in site.registry.delete("acme", f"a{number + 1}").orphaned:
                assert not site.registry.blobs.collect(one.digest, site.store.delete)

    site.store.before_open = change
    backup = site.back_up(tmp_path / "backup")
    assert copied == DIGESTS
    restore_backup(backup, tmp_path / "data")
    with closing(Database(tmp_path / "data" / "slora.db")) as restored:
        assert [one.label for one in Registry(restored).list("acme")] == ["a0", "a1", "a2"]
    assert [one.label for one in site.registry.list("acme")] == ["a0", "late0", "late1", "late2"]
    for digest in DIGESTS[1:]:
        assert site.registry.blobs.collect(digest, site.store.delete), "the backup has ended its reservations"


def test_a_tenant_that_is_being_purged_does_not_stop_a_backup(site: Site, tmp_path: Path) -> None:
    """Its blobs may be gone already."""
    site.store.delete(DIGESTS[1])
    with pytest.raises(StoreUnfit, match=f"the store lacks the weights {DIGESTS[1]}"):
        site.back_up(tmp_path / "refused")
    assert not list(tmp_path.glob("refused*"))
    assert not site.database.read(select(schema.adapter_reservations.c.digest))
    with site.database.transaction(CHANGES) as connection:
        connection.execute(update(schema.tenants).values(status="purging"))
    assert read_manifest(site.back_up(tmp_path / "backup")).digests == ()


def test_weights_of_an_earlier_backup_are_linked_and_verified(site: Site, tmp_path: Path) -> None:
    first, copied = site.back_up(tmp_path / "first"), list[str]()
    site.push("new", f"{9:064x}")
    site.store.before_open = copied.append
    second = tmp_path / "second"
    make_backup(site.database, site.store, {"pepper": site.pepper}, second, first)
    assert copied == [f"{9:064x}"]
    own = next(second.glob(f"adapters/blobs/*/{DIGESTS[0]}/weights"))
    assert own.samefile(next(first.glob(f"adapters/blobs/*/{DIGESTS[0]}/weights")))
    shutil.rmtree(first)
    restore_backup(second, tmp_path / "data")
    assert set(FileStore(tmp_path / "data" / "adapters").digests()) == {*DIGESTS, f"{9:064x}"}
    damage_weights(second)
    with pytest.raises(StoreUnfit, match="is damaged"):
        make_backup(site.database, site.store, {}, tmp_path / "third", second)
    assert not list(tmp_path.glob("third*"))


# -- what is refused, which does not depend on the database ------------------------------------------------------------


@pytest.fixture
def backup(tmp_path: Path) -> Iterator[Path]:
    site = Site(str(tmp_path / "slora.db"), tmp_path)
    with closing(site.database):
        yield site.back_up(tmp_path / "backup")


def damage_weights(backup: Path) -> None:
    path = next(backup.glob("adapters/blobs/*/*/weights"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def damage_database(backup: Path) -> None:
    with (backup / "slora.db").open("r+b") as file:
        file.seek(200)
        file.write(b"?")


def change_format(backup: Path) -> None:
    manifest = json.loads((backup / "manifest.json").read_text(encoding="utf-8"))
    (backup / "manifest.json").write_text(json.dumps({**manifest, "format": 2}), encoding="utf-8")


def link_weights(backup: Path) -> None:
    path = next(backup.glob("adapters/blobs/*/*/weights"))
    outside = path.rename(backup.parent / "outside")
    path.symlink_to(outside)


def link_folder(backup: Path) -> None:
    outside = (backup / "adapters").rename(backup.parent / "outside")
    (backup / "adapters").symlink_to(outside)


def name_digest(digest: str) -> Callable[[Path], None]:
    def change(backup: Path) -> None:
        manifest = json.loads((backup / "manifest.json").read_text(encoding="utf-8"))
        (backup / "manifest.json").write_text(json.dumps({**manifest, "digests": [digest]}), encoding="utf-8")

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (link_weights, "weights is behind a symbolic link"),
        (link_folder, "is behind a symbolic link"),
        (name_digest("../../../../etc"), "which is no digest"),
        (name_digest("/etc"), "which is no digest"),
        (damage_weights, "is damaged: the content of adapters/blobs/.*/weights has changed"),
        (damage_database, r"is damaged: the content of slora\.db has changed"),
        (lambda backup: (backup / "secrets" / "pepper").unlink(), "is damaged: .*secrets/pepper"),
        (lambda backup: (backup / "manifest.json").unlink(), "is not a complete backup"),
        (change_format, "has format 2, but this release reads 1: use a newer release"),
    ],
)
def test_a_damaged_backup_restores_nothing(
    backup: Path, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    damage(backup)
    with pytest.raises(StoreUnfit, match=message):
        restore_backup(backup, tmp_path / "data")
    assert not list(tmp_path.glob("data*"))


def test_files_that_the_manifest_does_not_name_are_not_restored(backup: Path, tmp_path: Path) -> None:
    weights = next(backup.glob("adapters/blobs/*/*/weights"))
    for folder in (weights.parent, backup / "secrets"):
        (folder / "stranger").symlink_to("/etc/hostname")
    restore_backup(backup, tmp_path / "data")
    assert not list((tmp_path / "data").rglob("stranger"))
    assert (tmp_path / "data" / weights.relative_to(backup)).read_bytes() == weights.read_bytes()


def test_a_backup_from_before_the_first_release_restores_nothing(backup: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(backup / "slora.db")) as connection, connection:
        connection.execute("UPDATE slora_schema SET version_num = '0010'")
    manifest = read_manifest(backup)
    files = {**manifest.files, "slora.db": hash_file(backup / "slora.db")}
    replace(manifest, files=files).write(backup)
    with pytest.raises(StoreUnavailable, match="made before the first release"):
        restore_backup(backup, tmp_path / "data")
    assert not list(tmp_path.glob("data*"))


def test_nothing_is_written_over(backup: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "slora.db").write_bytes(b"precious")
    with pytest.raises(StoreUnfit, match=r"--data-dir .*used' has slora\.db: a restore overwrites nothing"):
        restore_backup(backup, used)
    assert (used / "slora.db").read_bytes() == b"precious" and len(list(used.iterdir())) == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    restore_backup(backup, empty)
    assert (empty / "slora.db").exists()


def test_a_backup_that_cannot_be_completed_leaves_nothing(tmp_path: Path) -> None:
    site = Site(str(tmp_path / "slora.db"), tmp_path)

    def fail(digest: str) -> None:
        if digest == DIGESTS[-1]:
            raise OSError("no space")

    with closing(site.database):
        site.store.before_open = fail
        with pytest.raises(OSError, match="no space"):
            site.back_up(tmp_path / "backup")
        site.store.before_open = WatchedStore.before_open
        assert not list(tmp_path.glob("backup*"))
        assert not site.database.read(select(schema.adapter_reservations.c.digest))
        backup = site.back_up(tmp_path / "backup")
        with pytest.raises(StoreUnfit, match="exists already"):
            site.back_up(tmp_path / "backup")
        verify_files(backup, read_manifest(backup))
