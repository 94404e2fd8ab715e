"""The interface of the registry's storage. All processes share the storage, and it reports changes to each of them.

A change of a name is one transaction. It applies a rule of `named_adapter.py` to the stored name. It writes the result,
the indexes (which tenants have a digest, which aliases are pinned), and an entry in the feed of changes.
`sqlite_storage.py` implements the storage for one host, `redis_storage.py` for several.

A process reads the feed from a cursor on. The cursor identifies the last change that the process knows, and is valid
while the feed contains that change. The answer to an invalid cursor has `resync` set. A cursor becomes invalid if its
change is too old, or if the database was replaced or lost its last changes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from slora_adapters.errors import TryAgain
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterRecord, Rollout, StorageUsage
from slora_adapters.registry.named_adapter import NamedAdapter
from slora_adapters.version import AdapterVersion

__all__ = [
    "ALL_VERSIONS",
    "KEPT_CHANGES",
    "RESERVATION_S",
    "Change",
    "Changes",
    "NameKey",
    "RegistryStorage",
    "reservation_lost",
]

# Tenant and name, which together identify a `NamedAdapter`.
NameKey = tuple[str, str]
T = TypeVar("T")
# Means every version of a name, where a parameter expects version numbers.
ALL_VERSIONS = None
# How long an upload may take between storing its blob and creating its version. After that time, the blob of a crashed
# upload may be dropped.
RESERVATION_S = 3600.0
# Length of the feed. A process that has missed more changes than this looks everything up again.
KEPT_CHANGES = 10_000


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the versions or aliases of one name.

    orphaned: versions that no name of the tenant has any more. moved_pin: whether the set of pinned versions changed.
    """

    tenant: str
    name: str
    orphaned: tuple[AdapterVersion, ...] = ()
    moved_pin: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes after a cursor, oldest first. cursor: pass it to the next call.

    resync: earlier changes may be missing, so the reader must look everything up again. is_all: whether the feed has no
    further changes.
    """

    cursor: str
    changes: tuple[Change, ...] = ()
    resync: bool = False
    is_all: bool = True


class RegistryStorage(Protocol):
    """Storage of the registry.

    All methods may be called from several threads and processes at once. All methods block, and raise StoreUnavailable
    if the storage does not answer. Each method sees a consistent snapshot of a name. `now` is Unix time.
    """

    @property
    def registry(self) -> str:
        """The unique id of this registry. Every process that opens this registry reads the same id."""

    # -- looking up -------------------------------------------------------------------------------------------------

    def find_version(self, key: NameKey, number: int) -> AdapterRecord | None: ...

    def find_rollout(self, key: NameKey, alias: str) -> Rollout | None: ...

    def newest(self, key: NameKey) -> AdapterRecord | None: ...

    def aliases(self, key: NameKey) -> Sequence[Rollout]:
        """Returns all aliases of a name, sorted."""

    def rollouts(self, tenant: str, limit: int | None, after: tuple[str, str] | None) -> Sequence[Rollout]:
        """Returns the tenant's aliases, sorted by (name, alias); only those after the pair `after`."""

    def names(self, tenant: str, limit: int | None, after: str | None) -> Sequence[Rollout]:
        """Returns the rollout of `latest` of each name of the tenant, sorted by name; only names after `after`."""

    def versions(self, key: NameKey, limit: int | None, after: int | None) -> Sequence[AdapterRecord]:
        """Returns the versions with a number below `after`, newest first."""

    def find_extras(self, key: NameKey, record: AdapterRecord) -> AdapterExtras | None:
        """Returns the texts of a version that has extras; None if the version was deleted since the record was read."""

    def storage_usage(self, tenant: str, digest: str) -> StorageUsage:
        """Returns what the tenant stores in total, and the stored size of the weights with this digest."""

    def pinned(self) -> Sequence[Rollout]:
        """Returns all pinned aliases, sorted by tenant, name and alias."""

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        """Returns the given versions that at least one name of their tenant has."""

    def is_referenced(self, digest: str, now: float) -> bool:
        """Returns whether a version of any tenant, or a reservation, needs the blob."""

    # -- changing ---------------------------------------------------------------------------------------------------

    def change(
        self,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        *,
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        """Applies `edit` to a name and writes the result durably, in one transaction. Returns the result of `edit`.

        If `edit` raises, the error is propagated and nothing changes. `edit` may be called several times.

        wanted: the version numbers whose records `edit` needs, or ALL_VERSIONS. frees_room: try the change even on a
        full disk.
        """

    def push(
        self,
        key: NameKey,
        digest: str,
        edit: Callable[[NamedAdapter, StorageUsage], T],
        reservation: str | None = None,
        now: float = 0.0,
    ) -> tuple[T, Change]:
        """Like `change`, for an edit that adds a version and depends on the tenant's usage. No other process adds to
        the usage during the call.

        digest: digest of the new version's weights. reservation: released in the same transaction; `reservation_lost`
        is raised if it has expired.
        """

    def change_pins(
        self, key: NameKey, edit: Callable[[NamedAdapter, Sequence[Rollout]], T]
    ) -> tuple[T, Change]:
        """Like `change`, for an edit that depends on all pins. No other process changes a pin during the call."""

    # -- blobs ------------------------------------------------------------------------------------------------------

    def reserve(self, digest: str, now: float) -> str:
        """Protects the digest from `collect`, until `release` is called or RESERVATION_S have passed."""

    def release(self, reservation: str) -> None:
        """Releases a reservation; a no-op if it does not exist any more."""

    def collect(self, digest: str, drop: Callable[[str], None], now: float) -> bool:
        """Calls `drop(digest)` if no version refers to the blob and no upload has reserved it. No new reference can be
        created while `drop` runs. Returns whether `drop` was called.
        """

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None) -> Changes:
        """Returns the changes after the cursor. None starts at the end of the feed, with `resync` set."""

    def close(self) -> None:
        """Closes the connections to the storage."""


def reservation_lost() -> TryAgain:
    """Returns the error for an upload whose reservation has expired. The blob may have been dropped since."""
    return TryAgain("the upload took too long, so its reservation expired; upload again")
