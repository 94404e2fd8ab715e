"""The keys of KV blocks. Each key is a SHA-256 of the previous key and the tokens of the block.

    root_key(scope, adapters) -> key of block 0 -> key of block 1 -> ...

The root key covers the sharing scope, the adapters and their weights. So a key covers everything that the content of
its block depends on, and equal keys mean equal content. The server chooses the scope: one tenant, or one scope that all
tenants share. Only blocks of the base model can be shared between tenants. An adapter version includes its tenant, so
the blocks of two tenants' adapters never share a key, even if the adapters have equal weights.

This module does not depend on pages or sequences.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from slora.core.request import WeightedAdapter

_TOKEN_BYTES = array("i").itemsize


def root_key(
    scope: str, adapters: Sequence[WeightedAdapter], *, uses_long_rope: bool, active_from: int = 0
) -> bytes:
    """The 32-byte key that precedes the first block of a sequence.

    adapters: those that change K or V, in the canonical order of `compose_adapters`; empty for the base model.
    uses_long_rope: whether K is rotated with the long factors of a longrope model.
    active_from: the first token on which the adapters have an effect.
    """
    versions = [(version.tenant, version.digest, float(weight)) for version, weight in adapters]
    # The repr of a tuple of strings and numbers is unambiguous, whatever characters a name has.
    return sha256(repr((scope, versions, uses_long_rope, active_from)).encode()).digest()


def join_keys(first: bytes, second: bytes) -> bytes:
    """A key that depends on both keys and on their order."""
    return sha256(first + second).digest()


def extend_keys(keys: list[bytes], before: bytes, token_ids: Sequence[int], block_tokens: int) -> None:
    """Appends the 32-byte key of each complete block of `token_ids` that `keys` does not cover yet.

    A key is the SHA-256 of the previous key and the block's tokens as little-endian int32.
    before: the key that precedes the first new block.

    Worked example: 40 tokens in blocks of 16 have two keys. The last 8 tokens have none until their block is complete.
    """
    start, end = len(keys), len(token_ids) // block_tokens
    tokens = array("i", token_ids[start * block_tokens : end * block_tokens])
    if sys.byteorder == "big":
        tokens.byteswap()
    content = tokens.tobytes()
    key, size = before, block_tokens * _TOKEN_BYTES
    for offset in range(0, len(content), size):
        key = sha256(key + content[offset : offset + size]).digest()
        keys.append(key)
