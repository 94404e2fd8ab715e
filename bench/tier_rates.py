"""What bringing bytes near takes at least, in seconds: each tier read by the plainest program, and what must be done.

Sources are larger than the processor's caches and read further on in each call, since what a server fetches was not
looked at a moment ago either; buffers have been written to before.
"""

import itertools
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import redis
from blake3 import blake3

CHUNK_BYTES = 4 << 20
RING_BYTES = 256 << 20


class TierRates:
    """`max_bytes`: the most that is asked for at once."""

    def __init__(self, max_bytes: int, ring_bytes: int = RING_BYTES) -> None:
        self._ring_bytes = max(ring_bytes, CHUNK_BYTES)
        self._shared = _shared_memory(self._ring_bytes)
        self._buffer = np.ones(max(max_bytes, CHUNK_BYTES), np.uint8)
        self._position = 0

    def host_s(self, num_bytes: int) -> float:
        """Copying from shared memory."""
        return _seconds(lambda: self._go_round(num_bytes, self._copy))

    def hash_s(self, num_bytes: int) -> float:
        """The hash of an adapter's digest, of bytes in memory, on one core."""
        digest = blake3()
        return _seconds(
            lambda: self._go_round(num_bytes, lambda start, end, _: digest.update(self._shared[start:end]))
        )

    def file_s(self, path: Path, *, offset: int = 0) -> float:
        """One read() of a whole file. offset: where to, in the buffer."""
        with path.open("rb", buffering=0) as file:
            view = memoryview(self._buffer)[offset : offset + path.stat().st_size]

            def read() -> None:
                done = 0
                while done < len(view):
                    done += file.readinto(view[done:])

            return _seconds(read)

    def files_s(self, paths: list[Path]) -> float:
        """One after another."""
        ends = itertools.accumulate((path.stat().st_size for path in paths), initial=0)
        return sum(self.file_s(path, offset=offset) for path, offset in zip(paths, ends, strict=False))

    def fill_redis(self, client: "redis.Redis[bytes]") -> None:
        for number in range(self._ring_bytes // CHUNK_BYTES):
            start = number * CHUNK_BYTES
            client.set(_chunk_key(number), self._shared[start : start + CHUNK_BYTES].tobytes())

    def redis_s(self, client: "redis.Redis[bytes]", num_bytes: int) -> float:
        """GET of chunks of 4 MiB, one after another on one connection."""
        count = max(1, round(num_bytes / CHUNK_BYTES))
        first = self._position // CHUNK_BYTES
        self._position += count * CHUNK_BYTES
        keys = [_chunk_key((first + number) % (self._ring_bytes // CHUNK_BYTES)) for number in range(count)]

        def get() -> None:
            for key in keys:
                client.get(key)

        return _seconds(get) * num_bytes / (count * CHUNK_BYTES)

    def _copy(self, start: int, end: int, done: int) -> None:
        self._buffer[done : done + end - start] = self._shared[start:end]

    def _go_round(self, num_bytes: int, work: Callable[[int, int, int], None]) -> None:
        """Calls with stretches of the ring, [start, end), and how many bytes came before."""
        done = 0
        while done < num_bytes:
            start = self._position % self._ring_bytes
            count = min(num_bytes - done, self._ring_bytes - start)
            work(start, start + count, done)
            done += count
            self._position += count


def drop_from_page_cache(path: Path) -> None:
    """As far as the system does it: not what a process maps, nor what is not on the disk yet."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _shared_memory(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    descriptor = os.memfd_create("slora-bench")
    os.ftruncate(descriptor, num_bytes)
    memory = np.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED), np.uint8)
    os.close(descriptor)
    memory[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    return memory


def _chunk_key(number: int) -> str:
    return f"bench:{number}"


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
