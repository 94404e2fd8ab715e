"""A durable store with a warm tier in front. Reads try the warm tier first, but never depend on it.

A write or delete is complete when the durable store has completed it. Blobs are copied to the warm tier in the
background, after they were put or were read from the durable store. After a failure, the warm tier is not used for a
few seconds. Otherwise each read would wait for a timeout while the warm tier is unavailable.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.store.store import Blob, Store

if TYPE_CHECKING:
    from slora_adapters.store.redis_store import RedisStore

logger = logging.getLogger(__name__)

REST_AFTER_FAILURE_S = 5.0
# Maximum number of blobs that wait to be copied to the warm tier. Further blobs are not copied.
MAX_PENDING_COPIES = 8


class TieredStore:
    """Implements `store.Store`. `exists`, `digests` and `claims` use only the durable store."""

    def __init__(
        self, durable: Store, warm: "RedisStore", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.durable = durable
        self.warm = warm
        self._clock = clock
        self._resting_until = float("-inf")
        # Digests that wait to be copied. The value says whether the copy replaces an existing warm copy.
        self._pending: dict[str, bool] = {}
        self._lock = Lock()
        self._copier = ThreadPoolExecutor(1, "warm-copy")

    @property
    def tiers(self) -> tuple[str, ...]:
        return (*self.warm.tiers, *self.durable.tiers)

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        self.durable.put(digest, members)
        self.copy_later(digest, replace=True)

    def open(self, digest: str) -> Blob:
        if self._warm_is_up():
            try:
                return _WarmBlob(self.warm.open(digest), self, digest)
            except AdapterNotFound:
                pass
            except StoreUnavailable as error:
                self.rest(error)
        return _DurableBlob(self.durable.open(digest), self, digest)

    def exists(self, digest: str) -> bool:
        return self.durable.exists(digest)

    def delete(self, digest: str) -> None:
        """Deletes both copies. If a process is copying the blob to the warm tier at that time, readers can open the new
        warm copy for a moment. That process deletes the warm copy as soon as it is complete.
        """
        self.durable.delete(digest)
        try:
            self.warm.delete(digest)
        except StoreUnavailable as error:
            # The warm copy expires by itself. No reader opens it until then, because no version in the registry has
            # this digest.
            self.rest(error)

    def report_corrupt(self, digest: str) -> bool:
        """Drops the warm copy. Returns True if there was a warm copy. The reader should then open the blob again,
        because the durable copy may be intact.
        """
        try:
            had_copy = self.warm.exists(digest)
            self.warm.delete(digest)
        except StoreUnavailable as error:
            self.rest(error)
            return True
        return self.durable.report_corrupt(digest) or had_copy

    def digests(self) -> Iterator[str]:
        return self.durable.digests()

    def claim(self, registry: str) -> None:
        self.durable.claim(registry)

    def claims(self) -> frozenset[str]:
        return self.durable.claims()

    def check(self) -> None:
        """Checks only the durable store, because the platform can serve without its warm tier."""
        self.durable.check()

    def close(self) -> None:
        """Waits for the copy in progress, if any."""
        self._copier.shutdown(cancel_futures=True)
        self.warm.close()
        self.durable.close()

    def drain(self) -> None:
        """Waits until every queued copy to the warm tier has completed or failed."""
        self._copier.submit(lambda: None).result()

    def _warm_is_up(self) -> bool:
        return self._clock() >= self._resting_until

    def rest(self, error: StoreUnavailable) -> None:
        """Stops using the warm tier for REST_AFTER_FAILURE_S."""
        logger.warning(
            "the warm tier is unavailable and will not be used for %.0f s: %s", REST_AFTER_FAILURE_S, error
        )
        self._resting_until = self._clock() + REST_AFTER_FAILURE_S

    def _is_warm(self, digest: str) -> bool:
        """Returns whether the warm tier has a copy that can be opened."""
        try:
            self.warm.open(digest).close()
        except AdapterNotFound:
            return False
        return True

    def copy_later(self, digest: str, *, replace: bool = False) -> None:
        """Queues a copy to the warm tier. Does nothing if the queue is full or the warm tier is not in use."""
        with self._lock:
            if digest in self._pending:
                self._pending[digest] |= replace
                return
            if not self._warm_is_up() or len(self._pending) >= MAX_PENDING_COPIES:
                return
            self._pending[digest] = replace
        self._copier.submit(self._copy, digest)

    def _copy(self, digest: str) -> None:
        with self._lock:  # dequeue before the copy, so that a later put of the digest is queued again
            replace = self._pending.pop(digest)
        try:
            if not replace and self._is_warm(digest):
                return  # the blob was copied in the meantime, and readers may have it open
            with closing(self.durable.open(digest)) as blob:
                self.warm.copy(digest, blob)
            if not self.durable.exists(digest):  # a process deleted the blob in the meantime
                self.warm.delete(digest)
        except AdapterNotFound:
            pass  # the blob was deleted before the copy started
        except StoreUnavailable as error:
            self.rest(error)
        except Exception:  # top of a background job: a bug must be logged and must not end the thread
            logger.exception("copying blob %s to the warm tier failed", digest)


class _DurableBlob:
    """A blob of the durable store that the warm tier lacked. Closing it queues a copy to the warm tier."""

    def __init__(self, blob: Blob, tiers: TieredStore, digest: str) -> None:
        self.members = blob.members
        self.tier = blob.tier
        self.next_tier = tiers.warm.tiers[0]
        self._blob = blob
        self._tiers = tiers
        self._digest = digest

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._blob.read_into(name, start, buffer)

    def close(self) -> None:
        self._blob.close()
        self._tiers.copy_later(self._digest)


class _WarmBlob:
    """A blob in the warm tier. If a read fails, it raises AdapterNotFound, and opening the blob again reads the durable
    copy.
    """

    def __init__(self, blob: Blob, tiers: TieredStore, digest: str) -> None:
        self.members = blob.members
        self.tier = self.next_tier = blob.tier
        self._blob = blob
        self._tiers = tiers
        self._digest = digest

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        try:
            self._blob.read_into(name, start, buffer)
        except AdapterNotFound:
            self._tiers.report_corrupt(self._digest)
            raise
        except StoreUnavailable as error:
            self._tiers.rest(error)
            raise AdapterNotFound("the warm tier failed while a copy was being read") from error

    def close(self) -> None:
        self._blob.close()
