"""Writes small files that must stay complete across a crash: secrets, identities and state of a server.

The content is written to a temporary file beside the target, synced, and then linked or renamed into place. After a
crash of the process or the machine, the target has its old content or its new content, or does not exist. Files are
created with mode 0600.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def create_durably(path: Path, content: bytes) -> bool:
    """Creates the file unless it exists. Returns whether this call created it. If several processes call this at the
    same time, exactly one of them creates the file.
    """
    with _synced_copy(path, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    sync_directory(path.parent)
    return True


def replace_durably(path: Path, content: bytes) -> None:
    """Creates or replaces the file. Writing the content that the file already has is a no-op and needs no
    free space.
    """
    try:
        if path.read_bytes() == content:
            return
    except FileNotFoundError:
        pass
    with _synced_copy(path, content) as temporary:
        os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Syncs a directory, so that created, renamed and removed entries survive a crash."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _synced_copy(path: Path, content: bytes) -> Iterator[str]:
    """Yields the path of a synced temporary file in the same directory. The file is deleted at the end unless it was
    renamed.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)
