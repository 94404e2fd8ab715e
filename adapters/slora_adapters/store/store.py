"""Where adapters lie at rest: blobs of a few named members, under the digest of the adapter's arithmetic.

A store knows no tenant, no name and no PEFT; the registry counts who refers to a blob and says when to delete it.
Every blob ever put under one digest is interchangeable with every other (`bundle.py`), so to put a digest again is
never a conflict: it writes as much as the first time, and replaces what is there.

A blob is read piece by piece, into memory of the reader: nothing here ever holds a whole one. Stores do not verify what
they return; the reader does, end to end, and says `distrust` when it does not match. `store_url.py` opens them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol


class Blob(Protocol):
    """A blob that was opened: all that is read of it comes from one copy. For one thread at a time."""

    @property
    def members(self) -> Mapping[str, int]:
        """Bytes of each member, by name. To read one after the other, each from its begin on, is fastest."""

    @property
    def tier(self) -> str:
        """The kind of place that it is read from, by which loads are measured."""

    @property
    def next_tier(self) -> str:
        """Where it will be read from the next time, as far as one can tell."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with bytes [start, start + len(buffer)) of a member, which has that many.

        Raises AdapterNotFound if the copy is gone that was opened (to open the blob again tells whether there is
        another), StoreUnavailable.
        """

    def close(self) -> None:
        """Ends reading, wherever it is."""


class Store(Protocol):
    """A place for blobs. All methods may be called from several threads and processes at once; all block.

    All raise ValueError for a digest or member name that is not well-formed, StoreUnavailable when the place does not
    answer or has no room.
    """

    @property
    def tiers(self) -> tuple[str, ...]:
        """The kinds of place that its blobs may be read from, nearest first; see `Blob.tier`."""

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        """Stores a blob, whole or not at all. When it returns, the blob survives a crash (a warm tier excepted)."""

    def open(self, digest: str) -> Blob:
        """The blob, for reading; the caller closes it. Raises AdapterNotFound."""

    def exists(self, digest: str) -> bool:
        """Whether the store holds a blob."""

    def delete(self, digest: str) -> None:
        """Deletes a blob; none there is fine."""

    def distrust(self, digest: str) -> bool:
        """What was read was wrong. True if another copy may be right, so that opening it again is worth it."""

    def digests(self) -> Iterator[str]:
        """Every blob that the store holds, in no order."""

    def claim(self, registry: str) -> None:
        """Notes, for good, that a registry of this name refers to blobs here; again is fine. Done before its first put.

        registry: of letters and digits.
        """

    def claims(self) -> frozenset[str]:
        """The registries that were ever noted."""

    def check(self) -> None:
        """Returns if the store answers."""

    def close(self) -> None:
        """Ends background work and connections."""


class WarmStore(Store, Protocol):
    """A store that may stand in front of another one."""

    def copy(self, digest: str, blob: Blob) -> None:
        """As `put`, from a blob of another store. Raises what reading it raises."""
