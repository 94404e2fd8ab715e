"""The store interface. A store keeps blobs. A blob consists of a few named members. Its key is a digest of everything
that determines an adapter's results.

A store does not know tenants, names or PEFT. The registry tracks which versions refer to a blob and decides when it is
deleted. All blobs with the same digest are interchangeable (`peft/adapter.py`). So a second put of a digest is never
a conflict: the put writes all members again, and replaces the existing blob.

A blob is read in pieces into the reader's memory, so no store holds a whole blob in memory. Stores do not verify what
they return. The reader verifies the digest of the content, and calls `report_corrupt` if the digest does not match.
`store_url.py` opens stores.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

# Digests and member names become file names and Redis keys, so no name may escape its folder or key prefix.
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_digest(digest: str) -> str:
    """Returns the digest. Raises ValueError unless it is 64 lower-case hexadecimal digits."""
    if not is_digest(digest):
        raise ValueError(f"{digest[:80]!r} is not a digest; a digest has 64 lower-case hexadecimal digits")
    return digest


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def check_member_name(name: str) -> str:
    """Returns the name. Raises ValueError unless it is a plain file name."""
    if not _MEMBER.fullmatch(name):
        raise ValueError(
            f"{name[:140]!r} is not a valid member name; a name has at most 128 letters, digits, '.', "
            "'_' and '-'"
        )
    return name


class Blob(Protocol):
    """An open blob. All reads come from the same copy. Use it from one thread at a time."""

    @property
    def members(self) -> Mapping[str, int]:
        """Size in bytes of each member, by name. Reading the members one by one, from their start, is fastest."""

    @property
    def tier(self) -> str:
        """The tier that the blob is read from. Load times are measured by tier."""

    @property
    def next_tier(self) -> str:
        """The tier that the next read of this digest will probably use."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with bytes [start, start + len(buffer)) of a member. The member must have that many bytes.

        Raises AdapterNotFound if the opened copy does not exist any more; opening the blob again shows whether another
        copy exists. Raises StoreUnavailable.
        """

    def close(self) -> None:
        """Closes the blob, which need not have been read completely."""


class Store(Protocol):
    """A place for blobs. All methods may be called from several threads and processes at once, and all of them block.

    All methods raise ValueError for a digest or member name that is not well-formed. They raise StoreUnavailable if the
    store does not answer or has no space.
    """

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers from which the store's blobs may be read, nearest first; see `Blob.tier`."""

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        """Stores a blob atomically. When it returns, the blob survives a crash, except in a warm tier."""

    def open(self, digest: str) -> Blob:
        """Opens the blob for reading; the caller closes it. Raises AdapterNotFound."""

    def exists(self, digest: str) -> bool:
        """Returns whether the store has the blob."""

    def delete(self, digest: str) -> None:
        """Deletes a blob; a no-op if it does not exist."""

    def report_corrupt(self, digest: str) -> bool:
        """Reports that the content of a blob was corrupt. Returns True if another copy may be intact, so that the
        reader should open the blob again.
        """

    def digests(self) -> Iterator[str]:
        """Yields the digest of every blob in the store, in no particular order."""

    def claim(self, registry: str) -> None:
        """Records permanently that the registry with this id refers to blobs in this store. Repeating the claim is a
        no-op. A registry claims a store before its first put.

        registry: an id of letters and digits.
        """

    def claims(self) -> frozenset[str]:
        """Returns the ids of all registries that ever claimed the store."""

    def check(self) -> None:
        """Raises StoreUnavailable if the store does not answer."""

    def close(self) -> None:
        """Ends background work and closes connections."""
