"""What happens on a full disk, and the disk reserve: space for writes that must succeed even there.

The reserve is a file. When a write finds no free space outside the reserve, the server becomes read-only and only
urgent changes are allowed: those that free space, revoke or suspend. The first urgent change deletes the file, so that
only urgent changes use its space. As soon as the disk has free space again, the file is created again, and then all
changes are allowed.

| who                                   | on a full disk                                                            |
|---------------------------------------|---------------------------------------------------------------------------|
| `Database`, for changes               | raises DiskFull; urgent changes (`even_if_full`) use the reserve          |
| `Database`, for reads                 | reads; without space for SQLite's shared memory, by an exclusive connection |
| uploads (`Quarantine`), `FileStore`   | raise DiskFull, which clients see as 507                                  |
| answers, keys, quotas, usage journal  | go on                                                                     |
| start of a server                     | sockets and metrics go to a temporary directory                           |
| `DiskWatch`                           | looks every few seconds whether the disk has space again                  |
"""

import errno
import logging
import os
import tempfile
from pathlib import Path
from threading import Lock

from slora_adapters.errors import DiskFull

logger = logging.getLogger(__name__)

# SQLite's write-ahead log grows to 4 MB before SQLite reuses it. A revocation adds about 12 KB to it.
RESERVE_BYTES = 4 << 20
# The disk counts as full once less than this is free outside the reserve. It stays full until the free space outside
# the reserve is as large as the reserve.
_MIN_FREE_BYTES = 256 << 10
# Error numbers of a full disk, an exceeded user quota, and an exceeded limit on file size.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def has_space(directory: Path, num_bytes: int) -> bool:
    """Returns whether a file of this size can be written in the directory. Tries to allocate such a file, because
    `statvfs` ignores the user's quota.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if is_full(error):
            return False
        raise
    return True


class DiskReserve:
    """The reserve file at `path`. Methods may be called from several threads.

    is_keeper: whether this process creates the file. Only one process of a host does.
    """

    def __init__(self, path: Path, num_bytes: int = RESERVE_BYTES, *, is_keeper: bool = True) -> None:
        self._path = path
        self._is_keeper = is_keeper
        self._num_bytes = num_bytes
        self._lock = Lock()
        self._is_full = False
        self.watch()

    @property
    def directory(self) -> Path:
        return self._path.parent

    @property
    def is_full(self) -> bool:
        """Whether the disk was full at the last check."""
        return self._is_full

    def check(self) -> None:
        """Raises DiskFull while the disk is full."""
        if self._is_full:
            raise DiskFull(self.directory)

    def watch(self) -> bool:
        """Creates the file if it is missing, the disk has space and this process is the keeper. Returns whether all
        changes are allowed. Call it every few seconds.
        """
        with self._lock:
            needed = self._num_bytes if self._is_full else _MIN_FREE_BYTES
            has_reserve = self._is_whole() or (self._is_keeper and self._make())
            self._note(is_full=not (has_reserve and has_space(self.directory, needed)))
            return not self._is_full

    def report_full(self) -> None:
        """Records that a write into the directory found no space."""
        with self._lock:
            self._note(is_full=True)

    def free(self) -> bool:
        """Deletes the file to free space for an urgent write. Returns whether the file existed."""
        with self._lock:
            self._note(is_full=True)
            try:
                self._path.unlink()
            except FileNotFoundError:
                return False
            return True

    def _is_whole(self) -> bool:
        try:
            return self._path.stat().st_size >= self._num_bytes
        except FileNotFoundError:
            return False

    def _make(self) -> bool:
        """Returns whether the disk had space. The file gets its name only when it is complete."""
        new = self._path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._num_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            new.replace(self._path)
        except OSError as error:
            new.unlink(missing_ok=True)
            if not is_full(error):
                raise
            return False
        return True

    def _note(self, *, is_full: bool) -> None:
        if is_full and not self._is_full:
            logger.error(
                "the disk of %s is full: the server is read-only until %d bytes are free there. It "
                "still answers requests, revokes keys, suspends and purges tenants, cancels batches, and "
                "deletes adapters and files, but refuses other changes.",
                *(self.directory, self._num_bytes),
            )
        elif self._is_full and not is_full:
            logger.info("the disk of %s has free space again: the server accepts changes", self.directory)
        self._is_full = is_full
