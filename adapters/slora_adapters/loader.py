"""Brings adapters from a store into the host cache: fetched, verified, packed, side by side, each but once.

Requests for a version that is cached are answered at once; those for one that is on its way join it. Loads run on a
few threads, of one tenant never more than its share, so that a tenant with many cold or broken adapters does not keep
others from theirs. A load that fails fails alone.

Knows no socket: `loader_process.py` puts one in front.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

from slora_adapters.adapter import Adapter
from slora_adapters.bundle import unbundle
from slora_adapters.errors import AdapterCorrupt, AdapterInvalid, AdapterNotFound, StoreUnavailable
from slora_adapters.host_cache import CachedAdapter, HostCache
from slora_adapters.limits import AdapterLimits
from slora_adapters.packing import pack_into
from slora_adapters.source import FetchFailed
from slora_adapters.store import Store
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout, ModelShape, lay_out_adapter

logger = logging.getLogger(__name__)

NUM_THREADS = 4
LOADS_PER_TENANT = 2
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
        self._loads_per_tenant = loads_per_tenant
        self._wait_for_room_s = wait_for_room_s
        # Guards everything below and the cache's bookkeeping; notified whenever room may have come free.
        self._changed = Condition()
        self._waiters: dict[AdapterVersion, list[Done]] = {}
        self._running: dict[str, int] = {}
        self._queued: dict[str, deque[AdapterVersion]] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, "adapter-load")

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

    def _join_or_start(self, version: AdapterVersion, done: Done) -> None:
        if version in self._waiters:
            self._waiters[version].append(done)
            return
        self._waiters[version] = [done]
        self._queued.setdefault(version.tenant, deque()).append(version)
        self._start_next(version.tenant)

    def _start_next(self, tenant: str) -> None:
        """Starts the tenant's next load if it is not at its share. The lock is held."""
        queue = self._queued.get(tenant)
        if not queue or self._running.get(tenant, 0) >= self._loads_per_tenant or self._closed:
            return
        version = queue.popleft()
        if not queue:
            del self._queued[tenant]
        self._running[tenant] = self._running.get(tenant, 0) + 1
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
            self._running[version.tenant] -= 1
            if not self._running[version.tenant]:
                del self._running[version.tenant]
            self._start_next(version.tenant)
        for done in waiters:
            done(result)

    def _load(self, version: AdapterVersion) -> CachedAdapter | FetchFailed:
        try:
            adapter = self._fetch(version.digest)
            layout = lay_out_adapter(self._served.shape, adapter.ranks(self._served.shape))
            entry = self._allocate(version, layout)
        except AdapterNotFound as error:
            return FetchFailed(version, "not_found", str(error))
        except AdapterCorrupt as error:
            return FetchFailed(version, "corrupt", str(error))
        except (StoreUnavailable, ValueError) as error:
            return FetchFailed(version, "unavailable", str(error))
        return self._fill(entry, adapter)

    def _fetch(self, digest: str) -> Adapter:
        try:
            return unbundle(self._store.fetch(digest), digest, self._served.shape, self._served.limits)
        except AdapterCorrupt as error:
            logger.error("%s", error)
            if not self._store.distrust(digest):
                raise
        return unbundle(self._store.fetch(digest), digest, self._served.shape, self._served.limits)

    def _allocate(self, version: AdapterVersion, layout: AdapterLayout) -> CachedAdapter:
        """Waits until readers have given back enough. Raises StoreUnavailable, or ValueError if it never fits."""
        deadline = time.monotonic() + self._wait_for_room_s
        with self._changed:
            while (entry := self._cache.allocate(version, layout)) is None:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    raise StoreUnavailable(
                        f"no room for {layout.num_bytes} bytes in the host cache within {self._wait_for_room_s:.0f} s: "
                        "all of it is in use (host_cache_bytes)"
                    )
                self._changed.wait(left)
        return entry

    def _fill(self, entry: CachedAdapter, adapter: Adapter) -> CachedAdapter | FetchFailed:
        served = self._served
        try:
            region = self._cache.region(entry)
            entry.scales = pack_into(adapter, served.shape, served.dtype, entry.layout, region).scales
            with self._changed:
                entry.ready = True
                self.num_loads += 1
            return entry
        except AdapterInvalid as error:
            return FetchFailed(entry.version, "corrupt", str(error))
        finally:
            if not entry.ready:
                self.release(entry)
