"""Proof that a child process moves: one page of memory that it shares with its supervisor.

The child writes the page a few times a second on the event loop that serves its socket, so a blocked loop stops the
beat. Each beat carries what the working threads have done, so a beat also tells a working thread that hangs. The
supervisor polls the page; no read or write can block either side.
"""

import asyncio
import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["BEAT_S", "Beat", "Heartbeat", "HeartbeatPage", "Progress"]

BEAT_S = 0.25
_PAGE_BYTES = 4096
# 64-bit words at the start of the page, in this order; behind them lies the reason, as its length and UTF-8.
_NUM_WORDS = 6
_REASON_AT = 8 * _NUM_WORDS
_MOST_REASON_BYTES = _PAGE_BYTES - _REASON_AT


class Progress(NamedTuple):
    """num_completed: units of work since the start, such as engine steps or pieces of an adapter. is_busy: the child
    has work now."""

    num_completed: int
    is_busy: bool


class Beat(NamedTuple):
    """number: beats since the start. is_serving: the child has finished its start and listens. computing_us: CPU time
    of its working threads in microseconds; it stays 0 where CPU time proves nothing, because the child waits for a
    GPU by spinning."""

    number: int
    is_serving: bool
    is_busy: bool
    num_completed: int
    computing_us: int


class HeartbeatPage:
    """The shared page. Any process that has `descriptor` can map it. A fresh page reads as a child that starts."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _PAGE_BYTES)
        self._words = memoryview(self._map)[:_REASON_AT].cast("Q")

    @staticmethod
    def create() -> "HeartbeatPage":
        """A page that no other process has yet. `close` closes its descriptor."""
        descriptor = os.memfd_create("slora-heartbeat")
        os.ftruncate(descriptor, _PAGE_BYTES)
        return HeartbeatPage(descriptor)

    def read(self) -> Beat:
        """A beat that is written meanwhile may be read in part; the next read corrects it."""
        number, is_serving, is_busy, num_completed, computing_us, _ = self._words
        return Beat(number, bool(is_serving), bool(is_busy), num_completed, computing_us)

    def write(self, beat: Beat) -> None:
        for at in range(1, len(beat)):
            self._words[at] = int(beat[at])
        self._words[0] = beat.number

    @property
    def reason(self) -> str:
        """Why the child ended, in its own words; empty if it said nothing."""
        num_bytes = min(self._words[_NUM_WORDS - 1], _MOST_REASON_BYTES)
        return self._map[_REASON_AT : _REASON_AT + num_bytes].decode(errors="replace")

    def explain(self, reason: str) -> None:
        """Leaves the reason for the supervisor, cut to what fits."""
        text = reason.encode(errors="replace")[:_MOST_REASON_BYTES]
        self._map[_REASON_AT : _REASON_AT + len(text)] = text
        self._words[_NUM_WORDS - 1] = len(text)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.descriptor)


class Heartbeat:
    """The child's side. descriptor: of the supervisor's page; None if no supervisor started this process.

    computes_here: the CPU time of this process is progress, because no GPU does its work.
    """

    def __init__(self, descriptor: int | None, *, computes_here: bool) -> None:
        self._page = HeartbeatPage.create() if descriptor is None else HeartbeatPage(descriptor)
        self.computes_here = computes_here
        self._last = self._page.read()

    def begin_serving(self) -> None:
        """The start is over: from now on the supervisor expects progress."""
        self._last = self._last._replace(is_serving=True)
        self._page.write(self._last)

    def explain(self, reason: str) -> None:
        """Tells the supervisor why this process ends."""
        self._page.explain(reason)

    async def run(self, measure: Callable[[], Progress]) -> None:
        """Beats until it is cancelled. Must run on the event loop that serves the child's socket."""
        while True:
            progress = measure()
            # The event loop's own thread proves nothing about the threads that work.
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
