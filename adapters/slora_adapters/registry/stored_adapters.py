"""Adds adapters to registry and store, and deletes them, in an order that keeps both consistent after a crash.

An adapter is added in two steps. `store_blob` reserves the digest and stores the blob durably. `commit` creates the
version. Between the two steps, engines can load the adapter, but no request can name it. If the caller fails between
the steps, it calls `discard`. A crash leaves an unreferenced blob, which `sweep` deletes after the reservation has
expired. `withdraw` deletes the versions first, and then drops the blobs that no other version refers to.

Only a registry knows which versions refer to a blob. So each registry claims the store before it writes there. In a
store with claims of several registries, no blob is dropped, because a blob without references in one registry may have
references in another.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slora_adapters.errors import StoreUnavailable
from slora_adapters.peft.adapter import CheckedAdapter
from slora_adapters.registry.record import AdapterDetails, Publication, Removal
from slora_adapters.registry.registry import Registry, StorageCheck
from slora_adapters.store.store import Store
from slora_adapters.store.tiered_store import TieredStore
from slora_adapters.version import AdapterVersion

logger = logging.getLogger(__name__)


# How long a shared store keeps a blob that no version refers to. Operators have a day to notice that a registry was
# restored from an old backup, or that a server uses the wrong database.
SHARED_GRACE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class PurgedBlobs:
    """The number and the total bytes of the deleted blobs of a tenant."""

    num_deleted: int
    num_bytes: int
    # Number of blobs that other tenants need, or that are kept because other registries have claimed the store.
    num_kept: int


class StoredAdapters:
    """The operations of an API process on adapters. All calls block. `store_blob` waits until the store has written the
    blob.

    grace_s: minimum time between the first `sweep` that finds a blob unreferenced and the `sweep` that drops the blob.

    The constructor raises StoreUnavailable if the store cannot be claimed.
    """

    def __init__(
        self,
        registry: Registry,
        store: Store,
        *,
        grace_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.store = store
        self._grace_s = grace_s
        self._clock = clock
        # For each unreferenced digest, the time at which a sweep first found it unreferenced.
        self._unneeded_since: dict[str, float] = {}
        store.claim(registry.registry)

    def store_blob(self, adapter: CheckedAdapter) -> str:
        """Stores the blob of an adapter that passed every check. Returns the reservation that protects the blob.

        The blob is durable on return. Pass the reservation to `commit` or `discard`. The duration does not reveal
        whether another tenant has stored the same weights before. Raises StoreUnavailable.
        """
        reservation = self.registry.blobs.reserve(adapter.digest)
        try:
            self.store.put(adapter.digest, adapter.members)
        except BaseException:
            # Do not call `collect` here: it would wait for an unreachable store with the database locked. The store or
            # the sweep cleans up after a failed `put`.
            self.registry.blobs.release(reservation)
            raise
        return reservation

    def commit(
        self,
        tenant: str,
        name: str,
        adapter: CheckedAdapter,
        reservation: str,
        check: StorageCheck = lambda usage: None,
    ) -> Publication:
        """Creates the next version of an adapter name from a stored blob, durably. See `Registry.put`, which also
        describes `check`.
        """
        details = AdapterDetails(
            adapter.rank,
            adapter.target_modules,
            adapter.tensor_bytes,
            adapter.certificate.pool_bytes,
            adapter.blob_bytes,
        )
        version = AdapterVersion(tenant, adapter.digest)
        return self.registry.put(name, version, details, adapter.extras, reservation=reservation, check=check)

    def discard(self, adapter: CheckedAdapter, reservation: str) -> None:
        """Releases the reservation, and drops the stored blob unless a version or another upload needs it."""
        self.registry.blobs.release(reservation)
        self.drop_unreferenced([adapter.digest])

    def withdraw(self, tenant: str, reference: str, *, force: bool = False) -> Removal:
        """Deletes a version or a name, and blobs that no other version needs. Raises what `Registry.delete` raises."""
        removal = self.registry.delete(tenant, reference, force=force)
        self.drop_unreferenced(version.digest for version in removal.orphaned)
        return removal

    def purge_blobs(self, tenant: str) -> PurgedBlobs:
        """Drops the blobs that only this tenant's versions and files refer to. These are kept, so the purge can be
        repeated after an interruption.
        """
        blobs = self.registry.blobs.sizes_of(tenant)
        deleted = [
            num_bytes
            for digest, num_bytes in blobs.items()
            if not self._other_claims() and self.registry.blobs.collect(digest, self._drop, leaving=tenant)
        ]
        return PurgedBlobs(len(deleted), sum(deleted), len(blobs) - len(deleted))

    @property
    def durable(self) -> Store:
        """The store without its warm tier, for blobs that no engine reads."""
        return self.store.durable if isinstance(self.store, TieredStore) else self.store

    def drop_unreferenced(self, digests: Iterable[str]) -> None:
        """Drops those of the blobs that no version, file or reservation needs. Logs StoreUnavailable instead of raising
        it, because the caller's operation is already complete. A later `sweep` then drops the blob.
        """
        for digest in digests:
            try:
                self.registry.blobs.collect(digest, self._drop)
            except StoreUnavailable:
                logger.exception("orphaned blob %s could not be deleted; the next sweep tries again", digest)

    def sweep(self) -> int:
        """Drops unreferenced blobs that crashes left behind, and returns their number. Safe to run during uploads."""
        if self._other_claims():
            return 0
        now, before = self._clock(), self._unneeded_since
        stored = set(self.store.digests())
        unneeded = stored - self.registry.blobs.find_referenced(stored)
        self._unneeded_since = {digest: before.get(digest, now) for digest in unneeded}
        due = [digest for digest, since in self._unneeded_since.items() if now - since >= self._grace_s]
        return sum(self.registry.blobs.collect(digest, self._drop) for digest in due)

    def _drop(self, digest: str) -> None:
        """Drops a blob, unless another registry has claimed the store in the meantime."""
        if not self._other_claims():
            self.store.delete(digest)

    def _other_claims(self) -> frozenset[str]:
        others = self.store.claims() - {self.registry.registry}
        if others:
            logger.warning(
                "no adapter is deleted in the store, because %d other registries (%s) have also used "
                "it; delete the names of registries that no longer exist from the store's `claims`",
                *(len(others), ", ".join(sorted(others))),
            )
        return others
