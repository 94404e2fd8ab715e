"""A local journal, which keeps usage records until they are in the ledger of the database.

All processes of a host share one directory, and each process writes segments of its own. A record is durable when its
future is done. One thread writes all records that are waiting and syncs them together (group commit), so many requests
share one fsync and no event loop waits for the disk.

            append          rotate, full, or its writer died            shipped
    (memory) ----> open segment ------------------------> closed segment ----> (deleted)

Besides the open segment there is a spare segment, already allocated. There is no spare segment if the disk is full or
the journal has reached its limit. Then `check` refuses new requests as soon as the open segment is half full. The other
half has room for the records of the requests in progress.
"""

import asyncio
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from slora.core.errors import UsageJournalFull
from slora.core.usage_record import UsageRecord
from slora.core.usage_segment import OpenSegment, measure_bytes

__all__ = ["MAX_BYTES", "SEGMENT_BYTES", "UsageJournal"]

_log = logging.getLogger(__name__)

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
