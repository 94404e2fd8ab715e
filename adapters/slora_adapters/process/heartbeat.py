"""The heartbeat of a child process: one page of memory that the child shares with its supervisor.

The child writes the page several times a second on the event loop that serves its socket, so a blocked loop stops the
heartbeat. Each beat contains the amount of work that the worker threads have completed, so the supervisor also detects
a worker thread that hangs. The supervisor polls the page. Neither side can block the other.
"""

import asyncio
import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

BEAT_S = 0.25
_PAGE_BYTES = 4096
# The page starts with 64-bit words: the fields of `Beat` in order, then the length of the reason. The reason follows as
# UTF-8.
_NUM_WORDS = 6
_REASON_AT = 8 * _NUM_WORDS
_MAX_REASON_BYTES = _PAGE_BYTES - _REASON_AT


class WorkProgress(NamedTuple):
    """What a child has done so far."""

    # Completed units of work since the start, such as engine steps or pieces of an adapter.
    num_completed: int
    is_busy: bool  # whether the child has work now


class Beat(NamedTuple):
    """One beat, as the page stores it."""

    number: int  # beats since the start
    is_serving: bool  # whether the child has finished its startup and listens
    is_busy: bool
    num_completed: int
    # CPU time of its worker threads in microseconds. It stays 0 if CPU time does not prove progress, because the child
    # busy-waits for a GPU.
    computing_us: int


class HeartbeatPage:
    """The shared page. Any process that has `descriptor` can map it. A new page is all zeros, which means that the
    child is still starting.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _PAGE_BYTES)
        self._words = memoryview(self._map)[:_REASON_AT].cast("Q")

    @staticmethod
    def create() -> "HeartbeatPage":
        """Creates a page that no other process has mapped yet. `close` closes its descriptor."""
        descriptor = os.memfd_create("slora-heartbeat")
        os.ftruncate(descriptor, _PAGE_BYTES)
        return HeartbeatPage(descriptor)

    def read(self) -> Beat:
        """Reads the last beat. A read during a write may return a mix of two beats; the next read corrects it."""
        number, is_serving, is_busy, num_completed, computing_us, _ = self._words
        return Beat(number, bool(is_serving), bool(is_busy), num_completed, computing_us)

    def write(self, beat: Beat) -> None:
        for at in range(1, len(beat)):
            self._words[at] = int(beat[at])
        self._words[0] = beat.number

    @property
    def reason(self) -> str:
        """The reason why the child ended, as the child wrote it; empty if it wrote none."""
        num_bytes = min(self._words[_NUM_WORDS - 1], _MAX_REASON_BYTES)
        return self._map[_REASON_AT : _REASON_AT + num_bytes].decode(errors="replace")

    def explain(self, reason: str) -> None:
        """Writes the reason for the supervisor, truncated to the space in the page."""
        text = reason.encode(errors="replace")[:_MAX_REASON_BYTES]
        self._map[_REASON_AT : _REASON_AT + len(text)] = text
        self._words[_NUM_WORDS - 1] = len(text)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.descriptor)


class Heartbeat:
    """The child's side of the heartbeat. descriptor: the memfd of the supervisor's page; None if this process has no
    supervisor.

    computes_here: whether this process does its work on the CPU and not on a GPU. Its CPU time then counts as progress.
    """

    def __init__(self, descriptor: int | None, *, computes_here: bool) -> None:
        self._page = HeartbeatPage.create() if descriptor is None else HeartbeatPage(descriptor)
        self.computes_here = computes_here
        self._last = self._page.read()

    def begin_serving(self) -> None:
        """Marks the startup as complete. From now on the supervisor expects progress."""
        self._last = self._last._replace(is_serving=True)
        self._page.write(self._last)

    def explain(self, reason: str) -> None:
        """Tells the supervisor why this process ends."""
        self._page.explain(reason)

    async def run(self, measure: Callable[[], WorkProgress]) -> None:
        """Writes beats until it is cancelled. Must run on the event loop that serves the child's socket."""
        while True:
            progress = measure()
            # Exclude the event loop's thread, because its CPU time does not show that the worker threads make progress.
            own_s = time.thread_time()
            computing_s = max(0.0, time.process_time() - own_s) if self.computes_here else 0.0
            self._last = Beat(
                self._last.number + 1,
                self._last.is_serving,
                progress.is_busy,
                progress.num_completed,
                int(1e6 * computing_s),
            )
            self._page.write(self._last)
            await asyncio.sleep(BEAT_S)
