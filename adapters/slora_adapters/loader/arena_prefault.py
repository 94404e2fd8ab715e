"""Makes the kernel zero the memory of an arena shortly before it is written.

Linux allocates and zeroes each page of an arena when the page is first touched. Measured on a virtual machine, this
takes 0.8 s per GB, which is more than reading and hashing the data that is written there. So a thread of the lowest
priority touches the pages up to AHEAD_BYTES beyond the used part. Later pages take no memory yet.
"""

import mmap
import os
from threading import Condition, Thread, get_native_id

from slora_adapters.peft.packing import ByteArray

AHEAD_BYTES = 512 << 20
# Bytes touched at a time. Touching them takes a few milliseconds, and `close` waits for at most that time.
_STRETCH_BYTES = 4 << 20


class ArenaPrefaulter:
    """Reads one byte of each page of `arena`. In shared memory, a read is enough to make the kernel zero a page. Unlike
    a write, it cannot overwrite the data of a concurrent writer.
    """

    def __init__(self, arena: ByteArray, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._arena = arena
        self._ahead_bytes = ahead_bytes
        self._changed = Condition()
        self._wanted = min(ahead_bytes, len(arena))
        self._closed = False
        self._thread = Thread(target=self._prefault, name="arena-prefault", daemon=True)
        self._thread.start()

    def use(self, end: int) -> None:
        """Reports that the arena is in use up to byte `end`."""
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

    def _prefault(self) -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)  # affects this thread only
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
