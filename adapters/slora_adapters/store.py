"""Where adapters lie at rest: blobs of a few named members, under the digest of the adapter's arithmetic.

A store knows no tenant, no name and no PEFT; the registry counts who refers to a blob and says when to delete it.
Every blob ever put under one digest is interchangeable with every other (`bundle.py`), so to put a digest again is
never a conflict: it writes as much as the first time, and replaces what is there.

Stores do not verify what they return; the reader does, end to end, and says `distrust` when it does not match.
`store_url.py` opens them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """A place for blobs. All methods may be called from several threads and processes at once; all block.

    All raise ValueError for a digest or member name that is not well-formed, StoreUnavailable when the place does not
    answer or has no room.
    """

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        """Stores a blob, whole or not at all. When it returns, the blob survives a crash (a warm tier excepted)."""

    def fetch(self, digest: str) -> dict[str, memoryview]:
        """The members of a blob, read-only, valid even if it is deleted meanwhile. Raises AdapterNotFound."""

    def exists(self, digest: str) -> bool:
        """Whether the store holds a blob."""

    def delete(self, digest: str) -> None:
        """Deletes a blob; none there is fine."""

    def distrust(self, digest: str) -> bool:
        """What `fetch` returned was wrong. True if another copy may be right, so that fetching again is worth it."""

    def digests(self) -> Iterator[str]:
        """Every blob that the store holds, in no order."""

    def check(self) -> None:
        """Returns if the store answers."""

    def close(self) -> None:
        """Ends background work and connections."""
