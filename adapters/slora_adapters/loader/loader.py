"""Brings adapters from a store into the host cache: fetched, verified, packed, side by side, each but once.

Requests for a version that is cached are answered at once; those for one that is on its way join it. A few loads run at
once, and `LoadQueue` says which, so that a tenant with many cold or broken adapters does not keep others from theirs. A
load that fails fails alone. One that breaks off since its copy in the store is gone begins again with the next copy.

Knows no socket: `loader_process.py` puts one in front.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Condition

from slora_adapters.errors import AdapterCorrupt, AdapterNotFound, StoreUnavailable, TryAgain
from slora_adapters.heartbeat import Progress
from slora_adapters.limits import AdapterLimits
from slora_adapters.loader.arena_touch import ArenaTouch
from slora_adapters.loader.fetch_pace import FetchPace
from slora_adapters.loader.host_cache import CachedAdapter, HostCache
from slora_adapters.loader.load_queue import LoadQueue
from slora_adapters.loader.source import FetchFailed
from slora_adapters.loader.stored_adapter import StoredAdapter, make_buffers
from slora_adapters.store.store import Blob, Store
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout, ModelShape

logger = logging.getLogger(__name__)

NUM_THREADS = 4
LOADS_PER_TENANT = 2
# A copy in the store may be replaced or found wrong while it is read; each time there may be another.
_MAX_ATTEMPTS = 3
# How long a load waits for readers to give back room in the cache.
WAIT_FOR_ROOM_S = 30.0

# Called once for each `load`, from a loader's thread or within `load`; must not block. A copy comes pinned.
Done = Callable[[CachedAdapter | FetchFailed], None]


@dataclass(frozen=True, slots=True)
class ServedFormat:
    """What adapters are packed for. dtype: "float32", "float16" or "bfloat16"."""

    shape: ModelShape
    dtype: str
    limits: AdapterLimits


class Loader:
    """Loads from `store` into `cache`, which it owns from now on. Methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        cache: HostCache,
        served: ServedFormat,
        *,
        num_threads: int = NUM_THREADS,
        loads_per_tenant: int = LOADS_PER_TENANT,
        wait_for_room_s: float = WAIT_FOR_ROOM_S,
    ) -> None:
        self.num_loads = 0
        self._store = store
        self._cache = cache
        self._served = served
        self._wait_for_room_s = wait_for_room_s
        # Guards everything below and the cache's bookkeeping; notified whenever room may have come free.
        self._changed = Condition()
        self._waiters: dict[AdapterVersion, list[Done]] = {}
        # A load keeps about two cores busy: on two, 32 of 10 MB took 0.4 to 0.5 s one, two, four or six at a time.
        self._queue = LoadQueue(num_threads, loads_per_tenant, alone=os.cpu_count() or 1)
        self._buffers: list[list[bytearray]] = []
        # By the tier that was loaded from.
        self._paces: defaultdict[str, FetchPace] = defaultdict(FetchPace)
        self._num_completed = 0  # loads that ended, and pieces of those under way
        self._num_running = self._num_without_room = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, "adapter-load")
        self._touch = ArenaTouch(cache.memory)

    @property
    def paces(self) -> dict[str, float]:
        """Seconds a byte, as packed, by the tier that adapters were loaded from lately."""
        with self._changed:
            return {tier: pace.fetch_s(1) for tier, pace in self._paces.items()}

    def measure(self) -> Progress:
        """Loads and pieces of them so far, and whether any load could go on now: one that waits for room cannot."""
        with self._changed:
            return Progress(self._num_completed, self._num_running > self._num_without_room)

    def load(self, version: AdapterVersion, done: Done) -> None:
        """Asks for a version; returns at once."""
        with self._changed:
            entry = self._cache.find(version)
            if entry is None:
                self._join_or_start(version, done)
                return
        done(entry)

    def release(self, entry: CachedAdapter) -> None:
        """Gives back one copy that `load` handed out."""
        with self._changed:
            self._cache.unpin(entry)
            self._changed.notify_all()

    def forget(self, version: AdapterVersion) -> None:
        """The version was deleted: later loads ask the store again."""
        with self._changed:
            self._cache.forget(version)
            self._changed.notify_all()

    def check(self) -> None:
        """Proves the cache's books right."""
        with self._changed:
            self._cache.check()

    def close(self) -> None:
        """Waits for loads under way, fails those that wait for room, drops those that have not begun."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(cancel_futures=True)
        self._touch.close()

    def _join_or_start(self, version: AdapterVersion, done: Done) -> None:
        if version in self._waiters:
            self._waiters[version].append(done)
            return
        self._waiters[version] = [done]
        self._queue.add(version)
        self._start()

    def _start(self) -> None:
        """Starts what may run. The lock is held."""
        while not self._closed and (version := self._queue.take()) is not None:
            self._num_running += 1
            self._threads.submit(self._run, version)

    def _run(self, version: AdapterVersion) -> None:
        try:
            result = self._load(version)
        except Exception:  # top of a thread's loop: a bug must fail this load, not hang it
            logger.exception("loading %s of %s failed", version.digest, version.tenant)
            result = FetchFailed(
                version, "unavailable", "the adapter could not be loaded; the server's log says why"
            )
        with self._changed:
            waiters = self._waiters.pop(version)
            if isinstance(result, CachedAdapter):
                for _ in waiters[1:]:  # the load's own pin is the first waiter's
                    self._cache.pin(result)
            self._num_completed += 1
            self._num_running -= 1
            self._queue.end(version)
            self._start()
        for done in waiters:
            done(result)

    def _load(self, version: AdapterVersion) -> CachedAdapter | FetchFailed:
        try:
            for _ in range(_MAX_ATTEMPTS):
                entry = self._try_to_load(version)
                if entry is not None:
                    return entry
            raise TryAgain(f"adapter {version.digest[:12]} was gone each time before it was read; try again")
        except AdapterNotFound as error:
            return FetchFailed(version, "not_found", str(error))
        except AdapterCorrupt as error:
            return FetchFailed(version, "corrupt", str(error))
        except (StoreUnavailable, ValueError) as error:
            logger.warning("loading %s of %s: %s", version.digest, version.tenant, error)
            message = error.public_message if isinstance(error, StoreUnavailable) else str(error)
            return FetchFailed(version, "unavailable", message)

    def _try_to_load(self, version: AdapterVersion) -> CachedAdapter | None:
        """None if the copy in the store was wrong, or gone before it was read, and there may be another one."""
        since = time.monotonic()
        with closing(self._store.open(version.digest)) as blob:
            try:
                served = self._served
                stored = StoredAdapter(blob, version.digest, served.shape, served.limits)
                begun_s = time.monotonic() - since
                entry = self._allocate(version, stored.layout)
                self._fill(entry, stored, blob, begun_s)
                return entry
            except AdapterNotFound:
                return None
            except AdapterCorrupt as error:
                logger.error("%s", error)
                if not self._store.distrust(version.digest):
                    raise
                return None

    def _allocate(self, version: AdapterVersion, layout: AdapterLayout) -> CachedAdapter:
        """Waits until readers have given back enough. Raises StoreUnavailable, or ValueError if it never fits."""
        deadline = time.monotonic() + self._wait_for_room_s
        with self._changed:
            while (entry := self._cache.allocate(version, layout)) is None:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    raise TryAgain(
                        f"no room for {layout.num_bytes} bytes in the host cache within {self._wait_for_room_s:.0f} s: "
                        "all of it is in use (host_cache_bytes)"
                    )
                self._num_without_room += 1
                self._changed.wait(left)
                self._num_without_room -= 1
            self._touch.use(entry.end)
        return entry

    def _fill(self, entry: CachedAdapter, stored: StoredAdapter, blob: Blob, begun_s: float) -> None:
        """Shows the entry once all of it is there and verified; gives it back if that fails."""
        since = time.monotonic()
        try:
            with self._lent_buffers() as buffers:
                entry.scales = stored.pour(
                    self._cache.region(entry), self._served.dtype, buffers, self._note_piece
                )
            seconds = begun_s + time.monotonic() - since
            with self._changed:
                self._paces[blob.tier].count(entry.num_bytes, seconds)
                next_pace = self._paces.get(blob.next_tier, self._paces[blob.tier])
                entry.reload_s = next_pace.fetch_s(entry.num_bytes)
                entry.ready = True
                self.num_loads += 1
        finally:
            if not entry.ready:
                self.release(entry)

    def _note_piece(self) -> None:
        with self._changed:
            self._num_completed += 1

    @contextmanager
    def _lent_buffers(self) -> Iterator[list[bytearray]]:
        """Used again and again: to clear new memory takes as long as to read into it ten times."""
        with self._changed:
            buffers = self._buffers.pop() if self._buffers else []
        buffers = buffers or make_buffers()
        try:
            yield buffers
        finally:
            with self._changed:
                self._buffers.append(buffers)
