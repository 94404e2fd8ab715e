"""The manifest of a backup: its files with their sizes and SHA-256.

manifest.json       written last, so a directory without it is not a complete backup
slora.db            a SQLite file with all tables, whatever database they came from
secrets/            the pepper and the hash of the admin key (mode 0600)
adapters/blobs/...  the weights and the content of files, as `FileStore` keeps them
"""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, insert, select
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.errors import StoreUnfit
from slora_adapters.process.progress_bar import show_progress

DATABASE, SECRETS, ADAPTERS = "slora.db", "secrets", "adapters"
_NAME = "manifest.json"
_FORMAT = 1
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class BackupFile:
    """The size and hash of one file."""

    num_bytes: int
    sha256: str  # in hexadecimal


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of one backup."""

    created_at: float  # Unix time
    files: Mapping[str, BackupFile]  # by path relative to the backup, with `/`
    digests: tuple[str, ...]  # the digests of the blobs in the backup

    def list_files(self, directory: Path, folder: str) -> list[Path]:
        """The verified files in a folder of the backup. Others that may be there are not a part of the backup."""
        return [directory / name for name in self.files if name.startswith(f"{folder}/")]

    def write(self, directory: Path) -> None:
        content = {
            "format": _FORMAT,
            "created_at": self.created_at,
            "digests": list(self.digests),
            "files": {name: asdict(file) for name, file in sorted(self.files.items())},
        }
        (directory / _NAME).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a backup. Raises StoreUnfit if the directory is not a complete backup, or was made by a
    newer release.
    """
    try:
        content: dict[str, Any] = json.loads((directory / _NAME).read_text(encoding="utf-8"))
        if (found := content["format"]) != _FORMAT:
            raise StoreUnfit(
                f"the backup {str(directory)!r} has format {found}, but this release reads {_FORMAT}: use a newer "
                "release"
            )
        files = {name: BackupFile(**file) for name, file in content["files"].items()}
        manifest = Manifest(content["created_at"], files, tuple(content["digests"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreUnfit(
            f"{str(directory)!r} is not a complete backup: its {_NAME} cannot be read ({error})"
        ) from error
    for digest in manifest.digests:
        if re.fullmatch(r"[0-9a-f]{64}", str(digest)) is None:
            raise StoreUnfit(
                f"the backup {str(directory)!r} names the blob {str(digest)[:80]!r}, which is no digest"
            )
    for name in manifest.files:
        if name.startswith("/") or ".." in name.split("/"):
            raise StoreUnfit(f"the backup {str(directory)!r} names the file {name!r}, which is outside of it")
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Reads every file again. Raises StoreUnfit for the first one that is missing or differs from the manifest."""

    def check(name: str) -> None:
        path = directory / name
        if any(part.is_symlink() for part in (path, *path.parents) if part.is_relative_to(directory)):
            raise StoreUnfit(f"the backup {str(directory)!r} is damaged: {name} is behind a symbolic link")
        try:
            found = hash_file(directory / name)
        except OSError as error:
            raise StoreUnfit(f"the backup {str(directory)!r} is damaged: {error}") from error
        if found != manifest.files[name]:
            raise StoreUnfit(
                f"the backup {str(directory)!r} is damaged: the content of {name} has changed since it was made"
            )

    total = sum(file.num_bytes for file in manifest.files.values())
    with ThreadPoolExecutor(_NUM_THREADS) as threads, show_progress("Verifying", total) as advance:
        for file, _ in zip(manifest.files.values(), threads.map(check, manifest.files), strict=True):
            advance(file.num_bytes)


def hash_file(path: Path) -> BackupFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return BackupFile(file.tell(), digest)


# Not copied: these rows concern only the processes that use the source.
_TRANSIENT = (schema.changes, schema.adapter_reservations)
# Maximum number of rows of a large table in one statement.
_ROWS_AT_ONCE = 2000


def copy_everything(source: Connection, target: Connection) -> None:
    """Copies all rows into a new database, some rows at a time. source: see `Database.snapshot`."""
    target.execute(delete(schema.platform))
    for table in schema.metadata.sorted_tables:
        if table in _TRANSIENT:
            continue
        query = table.select().execution_options(stream_results=True)
        for rows in source.execute(query).mappings().partitions(_ROWS_AT_ONCE):
            target.execute(insert(table), [dict(row) for row in rows])
        number = table.autoincrement_column
        if target.dialect.name == "postgresql" and number is not None:
            # Inserting rows with explicit ids does not advance the sequence.
            sequence = func.pg_get_serial_sequence(table.name, number.name)
            last = select(func.max(number)).scalar_subquery()
            target.execute(select(func.setval(sequence, func.coalesce(last, 1))))
