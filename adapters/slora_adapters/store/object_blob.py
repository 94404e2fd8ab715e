"""Reads a blob from an object store, with parallel range requests ahead of the reader.

One stream from an object store is slow even at low latency. So several ranges are requested in parallel while the
reader reads sequentially. A read at another position requests only its own range.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future

# One stream from S3 delivers about 50 to 90 MB/s. AWS recommends parallel ranges of 8 to 16 MB.
RANGE_BYTES = 8 << 20
_NUM_AHEAD = 8
TIER = "objects"

# Called with member name, start and end. Returns exactly these bytes, or raises what `store.Blob.read_into` may raise.
ReadRange = Callable[[str, int, int], bytes]


class ObjectBlob:
    """Implements `store.Blob`. The constructor requests the first range of each member."""

    tier = next_tier = TIER

    def __init__(self, members: Mapping[str, int], read_range: ReadRange, threads: Executor) -> None:
        self.members = dict(members)
        self._streams = {
            name: _MemberStream(name, size, read_range, threads) for name, size in members.items()
        }

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._streams[name].read_into(start, buffer)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.drop()


class _MemberStream:
    def __init__(self, name: str, num_bytes: int, read_range: ReadRange, threads: Executor) -> None:
        self._name = name
        self._num_bytes = num_bytes
        self._read_range = read_range
        self._threads = threads
        self._position = self._asked_to = 0
        self._ranges: deque[Future[bytes]] = deque()
        self._rest = memoryview(b"")  # unread part of the current range
        self._ask(num_ahead=1)

    def read_into(self, start: int, buffer: memoryview) -> None:
        if start != self._position:
            self.drop()
            buffer[:] = self._read_range(self._name, start, start + len(buffer))
            self._position = self._asked_to = start + len(buffer)
            return
        while len(buffer):
            if not len(self._rest):
                self._ask(_NUM_AHEAD)
                self._rest = memoryview(self._ranges.popleft().result())
            count = min(len(self._rest), len(buffer))
            buffer[:count] = self._rest[:count]
            self._rest, buffer = self._rest[count:], buffer[count:]
            self._position += count

    def drop(self) -> None:
        """Cancels the requested ranges, because the reader continues at another position. Results of running requests
        are discarded.
        """
        while self._ranges:
            self._ranges.pop().cancel()
        self._rest = memoryview(b"")

    def _ask(self, num_ahead: int) -> None:
        while len(self._ranges) < num_ahead and self._asked_to < self._num_bytes:
            start, self._asked_to = self._asked_to, min(self._asked_to + RANGE_BYTES, self._num_bytes)
            self._ranges.append(self._threads.submit(self._read_range, self._name, start, self._asked_to))
