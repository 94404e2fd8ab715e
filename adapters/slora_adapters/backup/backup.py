"""Copies the database, the store and the secrets into a directory while servers keep running.

One transaction reserves every blob that a version or a file refers to, and takes a snapshot of the database at the
same moment. So the copy of the database is consistent, and no blob that the copy needs is deleted during the backup.
Changes after that moment are not in the backup. The directory gets its final name only after every file has been read
again and verified.
"""

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import Connection

from slora_adapters.backup.manifest import (
    ADAPTERS,
    DATABASE,
    SECRETS,
    BackupFile,
    Manifest,
    copy_everything,
    hash_file,
    read_manifest,
    verify_files,
)
from slora_adapters.database.database import Database
from slora_adapters.errors import AdapterNotFound, StoreUnfit
from slora_adapters.process.durable_file import sync_directory
from slora_adapters.process.progress_bar import show_progress
from slora_adapters.registry.registry import RESERVATION_S, BlobReferences
from slora_adapters.store.file_store import FileStore
from slora_adapters.store.store import Store


def make_backup(
    database: Database,
    store: Store,
    secrets: Mapping[str, Path],
    target: Path,
    previous: Path | None = None,
) -> Manifest:
    """Makes a backup in the new directory `target`.

    secrets: files by their name in the backup; missing files are skipped.
    previous: an earlier backup on the same file system. Blobs that it contains are not copied but hard-linked.

    Raises StoreUnfit if the target exists, if the previous backup is damaged, or if the store lacks a blob. Raises
    StoreUnavailable and OSError. A backup that fails leaves nothing behind; a killed backup leaves a directory
    `<target>.partial-<id>`.
    """
    if target.exists():
        raise StoreUnfit(f"{str(target)!r} exists already: name a directory that does not exist")
    old = None if previous is None else _OldBackup(previous, read_manifest(previous))
    work = target.with_name(f"{target.name}.partial-{uuid.uuid4().hex[:8]}")
    work.mkdir(parents=True, mode=0o700)
    try:
        manifest = _Backup(database, store, work, old).fill(secrets)
        verify_files(work, manifest)
        manifest.write(work)
        _sync_tree(work)
        work.rename(target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return manifest


@dataclass(frozen=True, slots=True)
class _OldBackup:
    directory: Path
    manifest: Manifest

    def link_blob(self, digest: str, work: Path) -> Mapping[str, BackupFile]:
        """Hard-links the files of a blob into `work`, and returns the files by name. The result is empty if this backup
        lacks the blob.
        """
        folder = _blob_folder(digest)
        found = {name: file for name, file in self.manifest.files.items() if name.startswith(f"{folder}/")}
        if found:
            (work / folder).mkdir(parents=True)
        for name in found:
            os.link(self.directory / name, work / name)
        return found


class _Backup:
    """One backup in progress, in the directory `work`."""

    def __init__(self, database: Database, store: Store, work: Path, old: _OldBackup | None) -> None:
        self._old = old
        self._database = database
        self._references = BlobReferences(database)
        self._store = store
        self._work = work
        # The names of all reservations of this backup begin with this prefix.
        self._holder = f"backup-{uuid.uuid4().hex}"
        self._files: dict[str, BackupFile] = {}

    def fill(self, secrets: Mapping[str, Path]) -> Manifest:
        created_at = time.time()
        try:
            with self._database.snapshot() as snapshot:
                digests = self._references.hold_all(self._holder, snapshot.begin)
                self._copy_database(snapshot.connection)
            self._copy_secrets(secrets)
            with show_progress("Copying", len(digests), "blob") as advance:
                self._copy_blobs(digests, advance)
        finally:
            self._references.release_held(self._holder)
        return Manifest(created_at, self._files, tuple(digests))

    def _copy_database(self, source: Connection) -> None:
        path = self._work / DATABASE
        with closing(Database(path)) as copy, copy.transaction() as connection:
            copy_everything(source, connection)
        self._files[DATABASE] = hash_file(path)

    def _copy_secrets(self, secrets: Mapping[str, Path]) -> None:
        folder = self._work / SECRETS
        folder.mkdir(mode=0o700)
        for name, path in secrets.items():
            if path.exists():
                copy = folder / name
                copy.touch(mode=0o600)
                copy.write_bytes(path.read_bytes())
                self._files[f"{SECRETS}/{name}"] = hash_file(copy)

    def _copy_blobs(self, digests: Sequence[str], advance: Callable[[int], object]) -> None:
        """Copies blobs into the backup. advance: called with the number of blobs copied since the last call."""
        copies = FileStore(self._work / ADAPTERS)
        renewed_at = time.monotonic()
        for digest in digests:
            if time.monotonic() - renewed_at > RESERVATION_S / 4:
                self._references.renew_held(self._holder)
                renewed_at = time.monotonic()
            if self._old is not None and (linked := self._old.link_blob(digest, self._work)):
                self._files.update(linked)
                advance(1)
                continue
            hashes: dict[str, hashlib._Hash] = {}
            sizes: dict[str, int] = {}

            def count(
                member: str,
                piece: memoryview,
                hashes: dict[str, "hashlib._Hash"] = hashes,
                sizes: dict[str, int] = sizes,
            ) -> None:
                hashes.setdefault(member, hashlib.sha256()).update(piece)
                sizes[member] = sizes.get(member, 0) + len(piece)

            try:
                with closing(self._store.open(digest)) as blob:
                    copies.copy(digest, blob, count)
            except AdapterNotFound as error:
                if file_id := self._references.find_file(digest):
                    raise StoreUnfit(
                        f"the store lacks the blob {digest} of the file {file_id}: delete that file"
                    ) from error
                raise StoreUnfit(
                    f"the store lacks the weights {digest}, which the database refers to: push that adapter again, or "
                    "delete its version"
                ) from error
            for member, found in hashes.items():
                self._files[f"{_blob_folder(digest)}/{member}"] = BackupFile(sizes[member], found.hexdigest())
            advance(1)


def _blob_folder(digest: str) -> str:
    return f"{ADAPTERS}/blobs/{digest[:2]}/{digest}"


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))
