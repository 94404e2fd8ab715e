"""Rendezvous hashing: each key has its own order of the replicas.

When a replica leaves, the order of all other replicas stays the same. So only keys with their home on this replica get
another home, and routers agree on homes without communicating.
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]


def hash_key(*parts: bytes) -> int:
    """Returns 64 bits that are the same in every process, unlike `hash`."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def hash_names(names: Iterable[str]) -> UInt64Array:
    return np.fromiter((hash_key(name.encode()) for name in names), np.uint64)


def rank_names(key: int, name_hashes: UInt64Array, most: int) -> IntArray:
    """Returns the positions of the first `most` names in the key's order."""
    scores = _mix(name_hashes ^ np.uint64(key))
    if most < len(scores):
        first = np.argpartition(scores, most - 1)[:most]
        return first[np.argsort(scores[first], kind="stable")]
    return np.argsort(scores, kind="stable")


def _mix(values: UInt64Array) -> UInt64Array:
    """The finalizer of SplitMix64: changing one bit of the input changes about half of the bits of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
