"""Has the system clear the memory of an arena shortly before somebody writes to it.

Linux gives an arena its memory page by page when it is first touched, and clears it then. Measured on a virtual
machine: that takes 0.8 s for a GB, more than to read and to hash what is written there. So a thread of the least
priority stays some way ahead of what is in use; the rest of the arena costs nothing yet.
"""

import mmap
import os
from threading import Condition, Thread, get_native_id

from slora_adapters.peft.packing import ByteArray

AHEAD_BYTES = 512 << 20
# A stretch takes some ms, which is how long `close` waits.
_STRETCH_BYTES = 4 << 20


class ArenaTouch:
    """Reads a byte of each page of `arena`: unlike a write that disturbs nobody, and shared memory is cleared by it."""

    def __init__(self, arena: ByteArray, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._arena = arena
        self._ahead_bytes = ahead_bytes
        self._changed = Condition()
        self._wanted = min(ahead_bytes, len(arena))
        self._closed = False
        self._thread = Thread(target=self._touch, name="arena-touch", daemon=True)
        self._thread.start()

    def use(self, end: int) -> None:
        """The arena is in use up to byte `end`."""
        wanted = min(end + self._ahead_bytes, len(self._arena))
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _touch(self) -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)  # of this thread
        done = 0
        while done < len(self._arena):
            with self._changed:
                while not self._closed and self._wanted == done:
                    self._changed.wait()
                if self._closed:
                    return
                end = min(done + _STRETCH_BYTES, self._wanted)
            self._arena[done : end : mmap.PAGESIZE].max()
            done = end
