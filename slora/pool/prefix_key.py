"""What a block of KV is known by: a SHA-256 chain over everything that its content depends on, and who may share it.

    root_key(scope, adapter, weight) -> key of block 0 -> key of block 1 -> ...

A key names all tokens from the first to the last of its block, so equal keys mean equal content. The scope is the
server's choice: a tenant, or one that all tenants have in common. Only the bare base can be common to tenants: an
adapter's version names the tenant that it belongs to, so blocks of two tenants' adapters differ in every scope, though
their weights be the same.

Knows no page and no sequence.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from slora_adapters.version import AdapterVersion

_TOKEN_BYTES = array("i").itemsize


def root_key(scope: str, adapter: AdapterVersion | None, weight: float, *, is_long: bool) -> bytes:
    """32 bytes that stand before the first block of a sequence.

    weight: the factor on the adapter's scale; it does not count for the bare base. is_long: whether keys are rotated
    with the long factors of a model that has two sets.
    """
    version = None if adapter is None else (adapter.tenant, adapter.digest, float(weight))
    # The repr of a tuple of strings and numbers is unambiguous, whatever characters a name has.
    return sha256(repr((scope, version, is_long)).encode()).digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], block_tokens: int) -> None:
    """Appends to `keys` those of the further whole blocks of `token_ids`, each of 32 bytes.

    A key is the SHA-256 of the one before it (of `root` for the first) and the block's tokens as little-endian int32.
    Worked example: 40 tokens in blocks of 16 have two keys; the last 8 tokens have none until their block is whole.
    """
    start, end = len(keys), len(token_ids) // block_tokens
    tokens = array("i", token_ids[start * block_tokens : end * block_tokens])
    if sys.byteorder == "big":
        tokens.byteswap()
    content = tokens.tobytes()
    key, size = keys[-1] if keys else root, block_tokens * _TOKEN_BYTES
    for offset in range(0, len(content), size):
        key = sha256(key + content[offset : offset + size]).digest()
        keys.append(key)
