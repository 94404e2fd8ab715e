"""What keeps the registry's names, for all processes that share it, and tells each of them what changed.

A change of a name is one transaction: the rules of `named_adapter.py` are applied to what is there, and the outcome is
kept with everything that is found by it (who has a digest, what is pinned), together with an entry in the feed of
changes. `sqlite_storage.py` keeps them for one host, `redis_storage.py` for several.

The feed is read from a cursor on. A cursor is the last change that its reader knows, and is good for as long as the
feed has this change: what is older than the feed reaches back, or comes of another history (the database is another
one, or lost its last changes), is answered with `resync`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from slora_adapters.errors import TryAgain
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterRecord, Holdings, Rollout
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

# Tenant and name: what versions and aliases belong to.
NameKey = tuple[str, str]
T = TypeVar("T")
# Instead of numbers: every version of the name.
ALL_VERSIONS = None
# How long an upload may take between storing its blob and naming it. A crashed one frees its blob afterwards.
RESERVATION_S = 3600.0
# Entries of the feed. A reader that was away for longer looks everything up again.
KEPT_CHANGES = 10_000


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to one name: its versions or aliases are others now.

    orphaned: versions that no name of the tenant has any more. moved_pin: whether something else is pinned now.
    """

    tenant: str
    name: str
    orphaned: tuple[AdapterVersion, ...] = ()
    moved_pin: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened since a cursor, oldest first. cursor: to go on from.

    resync: it is not known what happened before these; anything may have. is_all: whether there were no more.
    """

    cursor: str
    changes: tuple[Change, ...] = ()
    resync: bool = False
    is_all: bool = True


class RegistryStorage(Protocol):
    """All methods may be called from several threads and processes at once; all block, and raise StoreUnavailable when
    the storage does not answer. Each sees a name at one moment. `now` is Unix time.
    """

    @property
    def registry(self) -> str:
        """A name that no other registry has; whoever opened this one, anywhere, is told the same."""

    # -- looking up -------------------------------------------------------------------------------------------------

    def find_version(self, key: NameKey, number: int) -> AdapterRecord | None: ...

    def find_rollout(self, key: NameKey, alias: str) -> Rollout | None: ...

    def newest(self, key: NameKey) -> AdapterRecord | None: ...

    def aliases(self, key: NameKey) -> Sequence[Rollout]:
        """Sorted."""

    def rollouts(self, tenant: str, limit: int | None, after: tuple[str, str] | None) -> Sequence[Rollout]:
        """The tenant's aliases strictly after this name and alias, sorted by both."""

    def names(self, tenant: str, limit: int | None, after: str | None) -> Sequence[Rollout]:
        """What the tenant's names strictly after this one serve, sorted."""

    def versions(self, key: NameKey, limit: int | None, after: int | None) -> Sequence[AdapterRecord]:
        """Those older than this number, newest first."""

    def find_extras(self, key: NameKey, record: AdapterRecord) -> AdapterExtras | None:
        """The texts of a version that has some; None if it has been deleted since the record was read."""

    def holdings(self, tenant: str, digest: str) -> Holdings:
        """digest: of the weights that are asked about."""

    def pinned(self) -> Sequence[Rollout]:
        """By tenant, name and alias."""

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        """Those of them that a name of their tenant has."""

    def is_referenced(self, digest: str, now: float) -> bool:
        """Whether a version of any tenant, or a reservation, needs the blob."""

    # -- changing ---------------------------------------------------------------------------------------------------

    def change(
        self,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        *,
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        """Applies `edit` to a name and keeps what comes of it, durably and in one step; what it raises is raised, and
        then nothing has changed. It may be called several times. Returns what it returned.

        wanted: numbers of versions whose records it needs, or ALL_VERSIONS. frees_room: try it even on a full disk.
        """

    def push(
        self,
        key: NameKey,
        digest: str,
        edit: Callable[[NamedAdapter, Holdings], T],
        reservation: str | None = None,
        now: float = 0.0,
    ) -> tuple[T, Change]:
        """The same as `change`, for an edit that adds a version and depends on what the tenant holds. No other process
        adds to that meanwhile.

        digest: of the weights of the new version. reservation: is given back in the same step; raises
        `reservation_lost` if it has run out.
        """

    def change_pins(
        self, key: NameKey, edit: Callable[[NamedAdapter, Sequence[Rollout]], T]
    ) -> tuple[T, Change]:
        """The same for an edit that depends on all that is pinned: nobody changes that meanwhile."""

    # -- blobs ------------------------------------------------------------------------------------------------------

    def reserve(self, digest: str, now: float) -> str:
        """Until it is given back, or RESERVATION_S have passed, `collect` leaves the digest alone."""

    def give_back(self, reservation: str) -> None:
        """One that is not there any more is fine."""

    def collect(self, digest: str, drop: Callable[[str], None], now: float) -> bool:
        """Calls `drop(digest)` if nobody refers to the blob or has reserved it, while nobody can begin to. Returns
        whether it did."""

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None) -> Changes:
        """None: from now on."""

    def close(self) -> None:
        """Ends connections."""


def reservation_lost() -> TryAgain:
    """Its blob may be gone."""
    return TryAgain("the upload took too long, so its space was given up; upload again")
