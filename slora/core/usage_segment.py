"""One file of a journal. It is written by one process and shipped by any process of the host.

The writer allocates the whole file first, so that appending needs no free space, and holds the file's lock (flock)
while it writes. A segment without a lock is closed: its writer closed it or died. It ends with NUL bytes if its writer
died.
"""

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from slora.core.usage_record import MAX_LINE_BYTES, BadLine, UsageRecord
from slora_adapters.process.durable_file import sync_directory

__all__ = ["ClosedSegment", "OpenSegment", "closed_segments", "measure_bytes"]

_log = logging.getLogger(__name__)

_SUFFIX = ".usage"
_CORRUPT_SUFFIX = ".corrupt"


class OpenSegment:
    """A segment that this process writes. It has been allocated, and this process holds its lock."""

    def __init__(self, path: Path, descriptor: int, num_bytes: int, num_written: int = 0) -> None:
        self.num_written = num_written
        self._num_bytes = num_bytes
        self._path, self._descriptor = path, descriptor

    @staticmethod
    def create(directory: Path, num_bytes: int) -> "OpenSegment":
        """Allocates a new segment. Raises OSError, for example when the disk is full."""
        segment = OpenSegment(*_create_locked(directory), num_bytes)
        try:
            os.posix_fallocate(segment._descriptor, 0, num_bytes)
            os.fsync(segment._descriptor)
            sync_directory(directory)
        except OSError:
            segment.close()
            raise
        return segment

    @staticmethod
    def take_over(directory: Path, num_bytes: int) -> "OpenSegment | None":
        """Returns a segment whose writer ended before it was full, or None. This needs no free space on the disk."""
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            found = _open_unlocked(path)
            if found is None:
                continue
            content = os.pread(found, num_bytes, 0)
            written = content.rstrip(b"\0")
            is_whole = not written or written.endswith(b"\n")
            if is_whole and len(content) == num_bytes and num_bytes - len(written) >= MAX_LINE_BYTES:
                return OpenSegment(path, found, num_bytes, len(written))
            os.close(found)
        return None

    @property
    def num_left(self) -> int:
        """The number of bytes that still fit."""
        return self._num_bytes - self.num_written

    def append(self, lines: bytes) -> None:
        """Writes lines, and returns when they are durable. After an OSError the segment must be closed."""
        written = 0
        while written < len(lines):
            written += os.pwrite(self._descriptor, lines[written:], self.num_written + written)
        os.fdatasync(self._descriptor)
        self.num_written += len(lines)

    def close(self) -> None:
        """Frees the unused space and releases the lock. A segment without records is deleted."""
        try:
            if self.num_written:
                os.ftruncate(self._descriptor, self.num_written)
            else:
                self._path.unlink()
        except OSError as error:
            _log.error("%s keeps its unused space: %s", self._path, error)
        finally:
            os.close(self._descriptor)

    def leave(self) -> None:
        """Releases the lock and keeps the unused space.

        Then a process that finds the disk full may take the segment over, as if its writer had been killed.
        """
        os.close(self._descriptor)


class ClosedSegment:
    """A segment whose writer has closed it or died. This process holds its lock.

    records: all records that can be read. The error of any other record is logged.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.records: list[UsageRecord] = []
        self._has_bad_line = False
        self._parse(content.rstrip(b"\0"))

    def delete(self) -> None:
        """Deletes the file after its records were shipped. A file with damaged records is renamed instead."""
        if self._has_bad_line:
            self.path.rename(self.path.with_suffix(_CORRUPT_SUFFIX))
        else:
            self.path.unlink()

    def _parse(self, content: bytes) -> None:
        *lines, tail = content.split(b"\n")
        if tail:
            offset = len(content) - len(tail)
            _log.warning("%s: its writer died while it wrote the record at byte %d", self.path, offset)
        offset = 0
        for line in lines:
            try:
                self.records.append(UsageRecord.from_line(line))
            except BadLine as error:
                self._has_bad_line = True
                _log.error(
                    "%s: the usage record at byte %d is damaged and is skipped (%s). The file will be kept as *%s",
                    *(self.path, offset, error, _CORRUPT_SUFFIX),
                )
            offset += len(line) + 1


def closed_segments(directory: Path) -> Iterator[ClosedSegment]:
    """Yields each segment that no process writes, and holds its lock until the next segment is requested.

    The caller ships the records and then calls `delete`. A segment that it does not delete is yielded again by a later
    call, in this process or another.
    """
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        descriptor = _open_unlocked(path)
        if descriptor is None:
            continue
        try:
            size = os.fstat(descriptor).st_size
            yield ClosedSegment(path, os.pread(descriptor, size, 0))
        finally:
            os.close(descriptor)


def measure_bytes(directory: Path) -> int:
    """The size of all segments in the directory, damaged segments included."""
    total = 0
    for path in directory.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # Another process has shipped it.
            continue
    return total


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{secrets.token_hex(8)}{_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _lock(descriptor, wait=True)
        # Another process may have taken the empty file for a closed segment and deleted it before it was locked.
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def _open_unlocked(path: Path) -> int | None:
    """Opens and locks a segment. Returns None if another process writes, ships or has shipped it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if _lock(descriptor, wait=False) and os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
