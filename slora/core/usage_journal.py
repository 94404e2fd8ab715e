"""A local journal, which keeps usage records until they are in the ledger of the database.

All processes of a host share one directory, and each process writes segments of its own. A record is durable when its
future is done. One thread writes all records that are waiting and syncs them together (group commit), so many requests
share one fsync and no event loop waits for the disk.

            append          rotate, full, or its writer died            shipped
    (memory) ----> open segment ------------------------> closed segment ----> (deleted)

Besides the open segment there is a spare segment, already allocated. There is no spare segment if the disk is full or
the journal has reached its limit. Then `check` refuses new requests as soon as the open segment is half full. The other
half has room for the records of the requests in progress.

A segment is one file. The writer allocates the whole file first, so that appending needs no free space, and holds the
file's lock (flock) while it writes. A segment without a lock is closed: its writer closed it or died. It ends with NUL
bytes if its writer died.
"""

import asyncio
import fcntl
import json
import logging
import os
import secrets
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from slora.core.errors import UsageJournalFull
from slora.core.request import RequestUsage
from slora_adapters.process.durable_file import sync_directory

_log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2048
_CHECKSUM_CHARS = 8
_encode = json.JSONEncoder(separators=(",", ":")).encode


class BadLine(ValueError):
    """A line of a journal is damaged."""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """The usage of one request. Writing a record twice is harmless: the ledger counts each request id once, with its
    largest usage.

    Its line in a journal is the CRC-32 of a JSON object, a space, the object and a newline. The object is ASCII, so a
    line contains no other newline and no NUL byte.
    """

    request_id: str  # The id that the server chose, which is unique.
    tenant: str
    account: str  # The account that is billed within the tenant, as in `EngineRequest.account`.
    adapter_digest: str | None  # As `EngineRequest.adapter_digests`.
    ended_at: float  # Seconds since the epoch.
    usage: RequestUsage
    # False if the engine died before it reported the usage. Then only the tokens that the API received are counted,
    # and `adapter_bytes` and `page_seconds` are 0.
    is_complete: bool = True
    is_batch: bool = False  # Whether the request was a line of a batch, which costs less.

    def to_line(self) -> bytes:
        values = {name: getattr(self, name) for name in _OWN_FIELDS}
        values |= {name: getattr(self.usage, name) for name in _USAGE_FIELDS}
        body = _encode(values).encode("ascii")
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        assert len(line) <= MAX_LINE_BYTES, f"a usage record has {len(line)} bytes; at most {MAX_LINE_BYTES}"
        return line

    @staticmethod
    def from_line(line: bytes) -> "UsageRecord":
        """Parses a line, with or without its newline. Raises BadLine.

        Ignores unknown fields, which a newer release may have written. A field that an older release did not write has
        its default.
        """
        checksum, _, body = line.removesuffix(b"\n").partition(b" ")
        try:
            if len(checksum) != _CHECKSUM_CHARS or int(checksum, 16) != zlib.crc32(body):
                raise BadLine("the checksum is wrong")
            values = json.loads(body)
            usage = RequestUsage(**{name: values[name] for name in _USAGE_FIELDS})
            own = {name: values[name] for name in _OWN_FIELDS if name != "is_batch" or name in values}
            return UsageRecord(**own, usage=usage)
        except (ValueError, KeyError, TypeError) as error:
            raise BadLine(str(error)) from error


_OWN_FIELDS = tuple(field.name for field in fields(UsageRecord) if field.name != "usage")
_USAGE_FIELDS = tuple(field.name for field in fields(RequestUsage))


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


# A record has about 350 bytes, so half a segment holds about 3,000: more than a process has requests in progress.
SEGMENT_BYTES = 2 << 20
# About three million records, which a host keeps while its database is unreachable.
MAX_BYTES = 1 << 30
_RETRY_S = 1.0


class _Entry(NamedTuple):
    line: bytes
    done: "Future[None]"


class UsageJournal:
    """The journal of this process in `directory`, which is created. It may be used by several threads.

    max_bytes: the limit on the size of all segments in the directory, including segments of other processes.
    """

    def __init__(
        self, directory: Path, segment_bytes: int = SEGMENT_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: list[_Entry] = []
        self._rotations: list[Future[None]] = []
        self._is_closing = False
        # The reasons why there is no spare segment and why requests are refused; None if there are none.
        self._no_spare_reason: str | None = None
        self._refusal: str | None = None
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Used only by the thread, once it runs.
        self._open = self._allocate()
        self._spare = self._allocate() if self._open is not None else None
        self._update_refusal()
        self._thread = threading.Thread(target=self._run, name="usage-journal", daemon=True)
        self._thread.start()

    @property
    def has_records(self) -> bool:
        """Whether the open segment has records."""
        segment = self._open
        return segment is not None and segment.num_written > 0

    def check(self) -> None:
        """Checks that the usage of a new request can be recorded. Raises UsageJournalFull if not."""
        if self._refusal is not None:
            raise UsageJournalFull(self._refusal)

    def append(self, record: UsageRecord) -> "Future[None]":
        """Queues a record without blocking. The future is done when it is durable, or raises UsageJournalFull."""
        entry = _Entry(record.to_line(), _uncancellable())
        with self._changed:
            assert not self._is_closing, "a record was appended to a closed journal"
            self._waiting.append(entry)
            self._changed.notify()
        return entry.done

    async def write(self, record: UsageRecord) -> None:
        """Writes a record, even if the caller is cancelled. Returns when it is durable. Raises UsageJournalFull."""
        await asyncio.wrap_future(self.append(record))

    def rotate(self) -> "Future[None]":
        """Closes the open segment so that it can be shipped, unless it has no record or there is no spare segment."""
        done = _uncancellable()
        with self._changed:
            self._rotations.append(done)
            self._changed.notify()
        return done

    def close(self) -> None:
        """Writes all records and ends the thread. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._waiting or self._rotations or self._is_closing):
                    self._changed.wait(timeout=_RETRY_S if self._spare is None else None)
                entries, self._waiting = self._waiting, []
                rotations, self._rotations = self._rotations, []
                is_closing = self._is_closing
            try:
                self._write(entries)
            except Exception:  # Requests wait for this thread, so it must not end.
                _log.exception("the usage journal in %s failed", self._directory)
                self._give_up([entry for entry in entries if not entry.done.done()])
            # Without a spare, the requests in progress need the rest of the open segment.
            if rotations and self._spare is not None and self._open is not None and self._open.num_written:
                self._close_open()
            if is_closing:
                self._close_all()
            else:
                self._allocate_missing()
                self._update_refusal()
            for done in rotations:
                done.set_result(None)
            if is_closing:
                return

    def _write(self, entries: list[_Entry]) -> None:
        has_failed = False
        while entries:
            segment = self._find_room(len(entries[0].line))
            if segment is None:
                self._give_up(entries)
                return
            count, num_bytes = 0, 0
            while count < len(entries) and num_bytes + len(entries[count].line) <= segment.num_left:
                num_bytes += len(entries[count].line)
                count += 1
            try:
                segment.append(b"".join(entry.line for entry in entries[:count]))
            except OSError as error:
                # It is unknown which of these records are durable, so all of them are written again to another segment.
                _log.error("a segment of the usage journal in %s failed: %s", self._directory, error)
                self._close_open()
                if has_failed:
                    self._give_up(entries)
                    return
                has_failed = True
                continue
            for entry in entries[:count]:
                entry.done.set_result(None)
            entries = entries[count:]

    def _find_room(self, num_bytes: int) -> OpenSegment | None:
        if self._open is not None and self._open.num_left < num_bytes:
            self._close_open()
        if self._open is None:
            self._allocate_missing()
        return self._open

    def _close_open(self) -> None:
        """Closes the open segment. The spare segment takes its place."""
        if self._open is not None:
            self._open.close()
        self._open, self._spare = self._spare, None

    def _allocate_missing(self) -> None:
        if self._open is None:
            self._open = self._allocate()
        if self._open is not None and self._spare is None:
            self._spare = self._allocate()

    def _allocate(self) -> OpenSegment | None:
        try:
            num_bytes = measure_bytes(self._directory)
            if num_bytes + self._segment_bytes > self._max_bytes:
                self._no_spare_reason = f"it has {num_bytes} bytes and the limit is {self._max_bytes}"
                return None
            segment = OpenSegment.create(self._directory, self._segment_bytes)
        except OSError as error:
            left = OpenSegment.take_over(self._directory, self._segment_bytes)
            if left is None:
                self._no_spare_reason = f"no file can be created: {error.strerror}"
                return None
            segment = left
        return segment

    def _update_refusal(self) -> None:
        is_half_full = self._open is None or self._open.num_left < self._segment_bytes // 2
        refusal = self._no_spare_reason if self._spare is None and is_half_full else None
        if refusal is not None and self._refusal is None:
            _log.error(
                "the usage journal in %s is full (%s): new requests are refused until the disk has space and the "
                "journal's records are in the database",
                *(self._directory, refusal),
            )
        elif refusal is None and self._refusal is not None:
            _log.info("the usage journal in %s has room again", self._directory)
        self._refusal = refusal

    def _give_up(self, entries: list[_Entry]) -> None:
        for entry in entries:
            line = entry.line.decode("ascii").strip()
            _log.error("this usage record could not be written and is not billed: %s", line)
            entry.done.set_exception(UsageJournalFull(self._no_spare_reason or "its disk failed"))

    def _close_all(self) -> None:
        for segment in (self._open, self._spare):
            if segment is not None:
                segment.leave()
        self._open = self._spare = None


def _uncancellable() -> "Future[None]":
    """A future that a cancelled caller cannot cancel, because the record is written in any case."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
