"""Publishes and deletes adapters in registry and store, in an order that keeps both consistent after a crash.

`publish` reserves the digest, stores the blob durably, runs the canary, and then creates the version. A failure before
the last step deletes the blob again, unless another version refers to it. A crash before the last step leaves an
unreferenced blob, which `sweep` deletes. A crash after the last step leaves nothing to clean up. `withdraw` deletes the
versions first, and then drops the blobs that no other version refers to.

Only a registry knows which versions refer to a blob. So each registry claims the store before it writes there. In a
store that several registries have claimed, nothing is ever dropped: a blob that this registry does not know may belong
to another one.
"""

import logging
import time
from collections.abc import Callable

from slora_adapters.errors import StoreUnavailable
from slora_adapters.inspection.checked_adapter import CheckedAdapter
from slora_adapters.registry.reference import check_adapter_name
from slora_adapters.registry.registry import AdapterDetails, HoldingsCheck, Publication, Registry, Removal
from slora_adapters.store.store import Store
from slora_adapters.version import AdapterVersion

logger = logging.getLogger(__name__)


# How long a shared store keeps a blob that no version refers to. Operators notice a mistake within a day, such as a
# registry restored from an old backup, or a wrong Redis of the same name.
SHARED_GRACE_S = 24 * 3600.0


class Catalog:
    """The operations of an API process on adapters. All calls block; `publish` takes as long as storing the blob.

    grace_s: how long a blob must have been unreferenced, as seen by `sweep`, before it is dropped. The constructor
    raises StoreUnavailable if the store cannot be claimed.
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
        # For each digest, when a sweep first found it unreferenced.
        self._unneeded_since: dict[str, float] = {}
        store.claim(registry.registry)

    def publish(
        self,
        tenant: str,
        name: str,
        adapter: CheckedAdapter,
        try_out: Callable[[AdapterVersion], None] = lambda version: None,
        check: HoldingsCheck = lambda holdings: None,
    ) -> Publication:
        """Stores an adapter that passed every check, as the next version of the tenant's name.

        try_out: called when engines can load the adapter but no request can name it yet. If `try_out` raises, the
        adapter is deleted again. check: see `Registry.put`.

        When `publish` returns, blob and version are durable. Its duration and result do not reveal whether another
        tenant has stored the same weights before. Raises BadAdapterName and StoreUnavailable.
        """
        check_adapter_name(name)
        version = AdapterVersion(tenant, adapter.digest)
        details = AdapterDetails(
            adapter.rank,
            adapter.target_modules,
            adapter.tensor_bytes,
            adapter.certificate.pool_bytes,
            adapter.blob_bytes,
        )
        is_stored = False
        try:
            with self.registry.reservation(version.digest) as reservation:
                self.store.put(version.digest, adapter.members)
                is_stored = True
                try_out(version)
                return self.registry.put(
                    name, version, details, adapter.extras, reservation=reservation, check=check
                )
        except BaseException:
            # The store or the sweep cleans up after a failed `put`. `collect` would wait for an unreachable store with
            # the database locked.
            if is_stored:
                self._drop_orphan(version.digest)
            raise

    def withdraw(self, tenant: str, reference: str, *, force: bool = False) -> Removal:
        """Deletes a version or a name, and the weights that no other version needs. Raises what `Registry.delete`
        raises.
        """
        removal = self.registry.delete(tenant, reference, force=force)
        for digest in removal.unreferenced:
            self._drop_orphan(digest)
        return removal

    def sweep(self) -> int:
        """Drops unreferenced blobs that crashes left behind, and returns how many. Safe to run during uploads."""
        if self._other_claims():
            return 0
        now, before = self._clock(), self._unneeded_since
        self._unneeded_since = {
            digest: before.get(digest, now)
            for digest in self.store.digests()
            if not self.registry.is_referenced(digest)
        }
        due = [digest for digest, since in self._unneeded_since.items() if now - since >= self._grace_s]
        return sum(self.registry.collect(digest, self._drop) for digest in due)

    def _drop(self, digest: str) -> None:
        """Checks the claims again, because another registry may have claimed the store a moment ago."""
        if not self._other_claims():
            self.store.delete(digest)

    def _other_claims(self) -> frozenset[str]:
        others = self.store.claims() - {self.registry.registry}
        if others:
            logger.warning(
                "nothing is deleted in the store, because %d other registries (%s) have used it, too; if there are no "
                "such any more, delete their names from its `claims`",
                *(len(others), ", ".join(sorted(others))),
            )
        return others

    def _drop_orphan(self, digest: str) -> None:
        """Drops a blob, and logs StoreUnavailable instead of raising it.

        The outcome of the operation is already fixed: the versions are deleted, or were never created. A later `sweep`
        drops the blob.
        """
        try:
            self.registry.collect(digest, self._drop)
        except StoreUnavailable:
            logger.exception("blob %s is orphaned and stays until the next sweep", digest)
