"""Registry and store together: the order of steps in which an adapter becomes visible, or goes, without a gap.

To publish: reserve the digest, store the blob durably, try it out, then make the version. A failure before the last
step takes the blob away again, unless another version refers to it; a crash leaves one without references, which
`sweep` finds; a crash after the last step leaves nothing to do. To withdraw: take the versions away first, then drop
the blobs that no other version refers to.

Only the registry knows who refers to a blob. So each claims the store before it puts anything there, and in a store
that several have claimed nothing is ever dropped: what this one knows nothing of may be another's.
"""

import logging
import time
from collections.abc import Callable

from slora_adapters.errors import StoreUnavailable
from slora_adapters.peft.checked_adapter import CheckedAdapter
from slora_adapters.registry.reference import check_adapter_name
from slora_adapters.registry.registry import AdapterDetails, HoldingsCheck, Publication, Registry, Removal
from slora_adapters.store.store import Store
from slora_adapters.version import AdapterVersion

logger = logging.getLogger(__name__)


# How long a blob that nobody refers to stays in a store that other hosts, too, may know of. Nobody does what they do
# there by accident for longer without noticing: a registry brought back from a backup, a Redis of the same name.
SHARED_GRACE_S = 24 * 3600.0


class Catalog:
    """What an API process does with adapters. All calls block; publishing takes as long as storing the blob.

    grace_s: how long `sweep` must have found a blob unneeded. Raises StoreUnavailable if the store can't be claimed.
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
        # When a sweep first found that nobody refers to them.
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

        try_out: called in between, when engines can load the adapter and no request can name it. Its error is raised,
        and the adapter is deleted again. check: see `Registry.put`.

        When it returns, both are durable. It takes as long, and answers the same, whether or not another tenant has
        stored these weights before. Raises BadAdapterName, StoreUnavailable.
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
            # What a failed put left is the store's to clear up, or the sweep's: a store that is out of reach would be
            # waited for with the database locked.
            if is_stored:
                self._drop_orphan(version.digest)
            raise

    def withdraw(self, tenant: str, reference: str, *, force: bool = False) -> Removal:
        """Takes a version or a name away, and weights that nobody else needs. Raises what `Registry.delete` raises."""
        removal = self.registry.delete(tenant, reference, force=force)
        for digest in removal.unreferenced:
            self._drop_orphan(digest)
        return removal

    def sweep(self) -> int:
        """Drops blobs that nobody refers to, left by crashes; returns how many. Safe beside running uploads."""
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
        """Asks again whose the store is: another registry may have begun to use it a moment ago."""
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
        """A store that is down must not change what is true already: the versions are gone, or have never been. `sweep`
        comes later."""
        try:
            self.registry.collect(digest, self._drop)
        except StoreUnavailable:
            logger.exception("blob %s is orphaned and stays until the next sweep", digest)
