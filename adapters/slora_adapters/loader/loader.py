"""Loads adapters from a store into the host cache: fetches, verifies and packs several adapters in parallel.

A request for a cached version is answered at once. A request for a version that is being loaded waits for that load. A
few loads run at the same time. `LoadQueue` chooses the next one, so that a tenant with many cold or broken adapters
does not delay other tenants' loads. A failed load does not affect other loads. If the copy in the store disappears
during a load, the load starts again with the next copy.

The loader itself has no socket; `loader_process.py` adds one.
"""

import logging
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Condition

from slora_adapters.errors import AdapterCorrupt, AdapterNotFound, StoreUnavailable, TryAgain
from slora_adapters.loader.host_cache import ArenaPrefaulter, CachedAdapter, HostCache
from slora_adapters.loader.source import FetchFailed
from slora_adapters.loader.stored_adapter import BATCH_BYTES, StoredAdapter, make_buffers
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.process.heartbeat import WorkProgress
from slora_adapters.store.store import Blob, Store
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout, ModelShape
from slora_kernels.machine_limits import machine_limits

logger = logging.getLogger(__name__)


class LoadQueue:
    """The requested loads that have not started, and the number of running loads of each tenant.

    Tenants are served round robin, each up to its share of running loads. If every waiting tenant already runs its
    share, the tenant with the fewest running loads may start more, up to a higher limit. One slot then stays free for
    the next tenant. Loads of one tenant start in the order of their requests. The queue does no locking.

    max_running: maximum number of running loads of all tenants.
    share: loads that each tenant may run at once, even while other tenants wait.
    max_alone: loads that a tenant may run at once while every waiting tenant already runs its share.
    """

    def __init__(self, max_running: int, share: int, max_alone: int) -> None:
        self._num_free = max_running
        self._share = share
        self._max_alone = max_alone
        # In round-robin order: the first tenant is next.
        self._waiting: OrderedDict[str, deque[AdapterVersion]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def add(self, version: AdapterVersion) -> None:
        self._waiting.setdefault(version.tenant, deque()).append(version)

    def pop(self) -> AdapterVersion | None:
        """Removes and returns the next load, and counts it as running. Returns None if no load may start."""
        tenant = self._next_tenant()
        if tenant is None:
            return None
        version = self._waiting[tenant].popleft()
        self._waiting.move_to_end(tenant)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._running[tenant] += 1
        self._num_free -= 1
        return version

    def finish(self, version: AdapterVersion) -> None:
        """Marks a running load as ended."""
        assert self._running[version.tenant] > 0, f"no load of {version} is running"
        self._running[version.tenant] -= 1
        if not self._running[version.tenant]:
            del self._running[version.tenant]
        self._num_free += 1

    def _next_tenant(self) -> str | None:
        if not self._num_free:
            return None
        for tenant in self._waiting:
            if self._running[tenant] < self._share:
                return tenant
        least = min(self._waiting, key=lambda tenant: self._running[tenant], default=None)
        if least is None or self._num_free < 2 or self._running[least] >= self._max_alone:
            return None
        return least


# The average covers about the last 20 fetches.
_DECAY = 0.95


class FetchPace:
    """The decayed average of the time to fetch a byte to the host, including fetches of cached adapters. It is the
    decayed sum of seconds divided by the decayed sum of bytes.

    Worked example: a fetch of 100 MB took 0.5 s. The next fetch of 100 MB was cached and took 0 s. The estimate for 20
    MB is then 0.95 * 0.5 s * 20 MB / 195 MB = 49 ms.
    """

    __slots__ = ("_num_bytes", "_seconds")

    def __init__(self) -> None:
        self._num_bytes = self._seconds = 0.0

    def count(self, num_bytes: int, seconds: float) -> None:
        """Adds one completed fetch to the average."""
        self._num_bytes = self._num_bytes * _DECAY + num_bytes
        self._seconds = self._seconds * _DECAY + seconds

    def fetch_s(self, num_bytes: int) -> float:
        """Returns the expected duration of a fetch of `num_bytes` in seconds; 0 before the first fetch."""
        return self._seconds * num_bytes / self._num_bytes if self._num_bytes else 0.0


NUM_THREADS = 4
LOADS_PER_TENANT = 2
# Attempts of one load. While a load reads a copy, the copy may be replaced or found corrupt. Another copy may then
# exist.
_MAX_ATTEMPTS = 3
# How long a load waits for readers to release enough space in the host cache.
WAIT_FOR_ROOM_S = 30.0

# The callback of `load`. It is called once, on a thread of the loader or inside `load`, and must not block. It receives
# a CachedAdapter that stays pinned until `release`, or an error.
Done = Callable[[CachedAdapter | FetchFailed], None]


@dataclass(frozen=True, slots=True)
class ServedFormat:
    """The format in which adapters are packed."""

    shape: ModelShape  # of the whole model
    dtype: str  # "float32", "float16" or "bfloat16"
    limits: AdapterLimits
    num_ranks: int = 1  # the number of tensor-parallel ranks


class Loader:
    """Loads adapters from `store` into `cache`. The loader owns `cache`. Methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        cache: HostCache,
        served: ServedFormat,
        *,
        num_threads: int = NUM_THREADS,
        loads_per_tenant: int = LOADS_PER_TENANT,
        wait_for_room_s: float = WAIT_FOR_ROOM_S,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self.num_loads = 0
        self._store = store
        self._cache = cache
        self._served = served
        self._wait_for_room_s = wait_for_room_s
        self._batch_bytes = batch_bytes
        # Guards everything below and the cache's bookkeeping. Notified whenever space may have become free.
        self._changed = Condition()
        self._waiters: dict[AdapterVersion, list[Done]] = {}
        # One load per core is enough for a tenant, because a single load already keeps about two cores busy. On two
        # cores, 32 loads of 10 MB took 0.4 to 0.5 s, whether one, two, four or six ran at the same time.
        self._queue = LoadQueue(num_threads, loads_per_tenant, max_alone=machine_limits().num_threads)
        self._buffers: list[list[bytearray]] = []
        # Load times, by the tier that the adapters were loaded from.
        self._paces: defaultdict[str, FetchPace] = defaultdict(FetchPace)
        self._num_completed = 0  # completed loads, and completed pieces of running loads
        self._num_running = self._num_without_room = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, "adapter-load")
        self._prefaulter = ArenaPrefaulter(cache.memory)

    @property
    def paces(self) -> dict[str, float]:
        """Recent load time in seconds per packed byte, by the tier that adapters were loaded from."""
        with self._changed:
            return {tier: pace.fetch_s(1) for tier, pace in self._paces.items()}

    def measure(self) -> WorkProgress:
        """Returns the number of completed loads and pieces, and whether a load can make progress now. A load that waits
        for space in the cache cannot make progress.
        """
        with self._changed:
            return WorkProgress(self._num_completed, self._num_running > self._num_without_room)

    def read_cache(self, num_seen: int) -> tuple[int, dict[AdapterVersion, int]] | None:
        """Returns the number of changes of the cache so far, and the bytes of each cached version. Returns None if
        there are no changes after the first `num_seen`.
        """
        with self._changed:
            num_changes = self.num_loads + self._cache.num_evictions + self._cache.num_discards
            return None if num_changes == num_seen else (num_changes, self._cache.contents)

    def load(self, version: AdapterVersion, done: Done) -> None:
        """Requests a version and returns at once; `done` is called with the result."""
        with self._changed:
            entry = self._cache.find(version)
            if entry is None:
                self._join_or_start(version, done)
                return
        done(entry)

    def release(self, entry: CachedAdapter) -> None:
        """Releases one pin of a copy that `done` received."""
        with self._changed:
            self._cache.unpin(entry)
            self._changed.notify_all()

    def discard(self, version: AdapterVersion) -> None:
        """Removes a deleted version from the cache, so that later loads read from the store."""
        with self._changed:
            self._cache.discard(version)
            self._changed.notify_all()

    def purge(self, tenant: str) -> None:
        """Removes all versions of a tenant from the cache, and overwrites free memory that adapters have used."""
        with self._changed:
            self._cache.purge(tenant)
            self._changed.notify_all()

    def check(self) -> None:
        """Asserts the invariants of the cache."""
        with self._changed:
            self._cache.check()

    def close(self) -> None:
        """Waits for running loads, fails the loads that wait for space, and cancels the loads that have not started."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(cancel_futures=True)
        self._prefaulter.close()

    def _join_or_start(self, version: AdapterVersion, done: Done) -> None:
        if version in self._waiters:
            self._waiters[version].append(done)
            return
        self._waiters[version] = [done]
        self._queue.add(version)
        self._start()

    def _start(self) -> None:
        """Starts queued loads while the queue allows more. The caller holds the lock."""
        while not self._closed and (version := self._queue.pop()) is not None:
            self._num_running += 1
            self._threads.submit(self._run, version)

    def _run(self, version: AdapterVersion) -> None:
        try:
            result = self._load(version)
        except Exception:  # top of a thread: a bug must fail this load, not block its requests
            logger.exception("loading adapter %s of tenant %s failed", version.digest, version.tenant)
            result = FetchFailed(
                version, "unavailable", "the adapter could not be loaded; the server's log has the reason"
            )
        with self._changed:
            waiters = self._waiters.pop(version)
            if isinstance(result, CachedAdapter):
                for _ in waiters[1:]:  # the load's own pin belongs to the first waiter
                    self._cache.pin(result)
            self._num_completed += 1
            self._num_running -= 1
            self._queue.finish(version)
            self._start()
        for done in waiters:
            done(result)

    def _load(self, version: AdapterVersion) -> CachedAdapter | FetchFailed:
        try:
            for _ in range(_MAX_ATTEMPTS):
                entry = self._try_to_load(version)
                if entry is not None:
                    return entry
            raise TryAgain(
                f"adapter {version.digest[:12]} was not read in {_MAX_ATTEMPTS} attempts, because its "
                "copy in the store was removed or corrupt each time; try again"
            )
        except AdapterNotFound as error:
            return FetchFailed(version, "not_found", str(error))
        except AdapterCorrupt as error:
            return FetchFailed(version, "corrupt", str(error))
        except (StoreUnavailable, ValueError) as error:
            logger.warning(
                "adapter %s of tenant %s was not loaded: %s", version.digest, version.tenant, error
            )
            message = error.public_message if isinstance(error, StoreUnavailable) else str(error)
            return FetchFailed(version, "unavailable", message)

    def _try_to_load(self, version: AdapterVersion) -> CachedAdapter | None:
        """Makes one attempt at a load. Returns None if the copy in the store was corrupt or disappeared during the
        read. Another attempt may then succeed.
        """
        since = time.monotonic()
        with closing(self._store.open(version.digest)) as blob:
            try:
                served = self._served
                stored = StoredAdapter(blob, version.digest, served.shape, served.limits, served.num_ranks)
                begun_s = time.monotonic() - since
                entry = self._allocate(version, stored.layout)
                self._fill(entry, stored, blob, begun_s)
                return entry
            except AdapterNotFound:
                return None
            except AdapterCorrupt as error:
                logger.error("%s", error)
                if not self._store.report_corrupt(version.digest):
                    raise
                return None

    def _allocate(self, version: AdapterVersion, layout: AdapterLayout) -> CachedAdapter:
        """Allocates a region, and waits until readers have released enough space. Raises StoreUnavailable on a timeout,
        and ValueError if the adapter can never fit.
        """
        deadline = time.monotonic() + self._wait_for_room_s
        num_bytes = layout.num_bytes * self._served.num_ranks
        with self._changed:
            while (entry := self._cache.allocate(version, layout, num_bytes)) is None:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    raise TryAgain(
                        f"the host cache had no room for {num_bytes} bytes within "
                        f"{self._wait_for_room_s:.0f} s, because all of it is in use: try again, or "
                        "raise host_cache_bytes"
                    )
                self._num_without_room += 1
                self._changed.wait(left)
                self._num_without_room -= 1
            self._prefaulter.use(entry.end)
        return entry

    def _fill(self, entry: CachedAdapter, stored: StoredAdapter, blob: Blob, begun_s: float) -> None:
        """Fills the entry, and marks it ready once its whole content is verified. Releases the entry if that fails."""
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
        """Yields buffers for one load. Later loads reuse the buffers. New memory would be ten times as slow, because
        the kernel zeroes it first.
        """
        with self._changed:
            buffers = self._buffers.pop() if self._buffers else []
        buffers = buffers or make_buffers(self._batch_bytes)
        try:
            yield buffers
        finally:
            with self._changed:
                self._buffers.append(buffers)
