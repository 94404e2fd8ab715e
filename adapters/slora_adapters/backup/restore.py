"""Restores a backup into a new data directory and, if asked, into a database and a store.

Everything is verified and prepared in a temporary directory, which is renamed to the new name last. So a restore that
fails or is killed leaves nothing that a server would mistake for its data.
"""

import shutil
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import func, select, update

from slora_adapters.backup.manifest import (
    ADAPTERS,
    DATABASE,
    SECRETS,
    Manifest,
    copy_everything,
    read_manifest,
    verify_files,
)
from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import StoreUnfit
from slora_adapters.process.durable_file import sync_directory
from slora_adapters.process.progress_bar import show_progress
from slora_adapters.store.store import Store

# A database with rows in one of these tables has data.
_DATA = (schema.tenants, schema.api_keys, schema.adapter_names, schema.usage_records)


def restore_backup(
    source: Path, data_dir: Path, database: Database | None = None, store: Store | None = None
) -> Manifest:
    """Restores a backup into the new directory `data_dir`.

    database: receives the tenants and names. None: they go into a SQLite file in `data_dir`.
    store: receives the weights. None: they go into `data_dir`.

    The restored registry gets a new id. If the original and the restored registry share a store, neither then deletes
    the blobs of the other.

    Raises StoreUnfit if the backup is damaged or of a newer release, or if the directory or the database has data.
    """
    _check_directory(data_dir)
    manifest = read_manifest(source)
    verify_files(source, manifest)
    work = data_dir.with_name(f"{data_dir.name}.partial-{uuid.uuid4().hex[:8]}")
    work.mkdir(parents=True, mode=0o700)
    try:
        for secret in manifest.list_files(source, SECRETS):
            shutil.copy(secret, work / secret.name)
            (work / secret.name).chmod(0o600)
        _restore_blobs(source, manifest, work, store)
        if database is None:
            with closing(_open_copy(source, work)):
                pass
            _publish(work, data_dir)
        else:
            with (
                TemporaryDirectory(dir=data_dir.parent) as scratch,
                closing(_open_copy(source, scratch)) as own,
            ):
                _fill(database, own, lambda: _publish(work, data_dir))
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return manifest


def _check_directory(path: Path) -> None:
    found = sorted(entry.name for entry in path.iterdir())[:3] if path.is_dir() else []
    if found or (path.exists() and not path.is_dir()):
        what = f"has {', '.join(found)}" if found else "is a file"
        raise StoreUnfit(
            f"--data-dir {str(path)!r} {what}: a restore overwrites nothing, so name a directory that does not exist"
        )


def _open_copy(source: Path, directory: Path | str) -> Database:
    """Copies the database of the backup into the directory. The copy gets an id of its own."""
    path = Path(directory) / DATABASE
    shutil.copyfile(source / DATABASE, path)
    database = Database(path)
    with database.transaction(CHANGES) as connection:
        connection.execute(update(schema.platform).values(id=uuid.uuid4().hex))
        connection.execute(update(schema.changes).values(nonce=uuid.uuid4().hex))
        record_change(connection, "backup.restore", "", str(source))
    return database


def _restore_blobs(source: Path, manifest: Manifest, work: Path, store: Store | None) -> None:
    if store is None:
        (work / ADAPTERS / "blobs").mkdir(parents=True)
    with show_progress("Restoring", len(manifest.digests), "blob") as advance:
        for digest in manifest.digests:
            folder = Path(ADAPTERS, "blobs", digest[:2], digest)
            verified = manifest.list_files(source, folder.as_posix())
            if store is None:
                (work / folder).mkdir(parents=True)
                for path in verified:
                    shutil.copyfile(path, work / folder / path.name)
            else:
                store.put(digest, {path.name: path for path in verified})
            advance(1)


def _fill(database: Database, source: Database, before_commit: Callable[[], None]) -> None:
    """Copies everything into a database without data, in one transaction."""
    with ExitStack() as stack:
        snapshot = stack.enter_context(source.snapshot())
        snapshot.begin()
        connection = stack.enter_context(database.transaction(CHANGES))
        for table in _DATA:
            if count := connection.execute(select(func.count()).select_from(table)).scalar_one():
                raise StoreUnfit(
                    f"--database {database.label} has {count} rows in the table {table.name}: a restore overwrites "
                    "nothing, so name an empty database"
                )
        copy_everything(snapshot.connection, connection)
        before_commit()


def _publish(work: Path, data_dir: Path) -> None:
    """Renames the prepared directory to `data_dir`, and replaces an empty directory of that name."""
    work.rename(data_dir)
    sync_directory(data_dir.parent)
