"""Reads complete blobs, so that tests can compare them."""

from contextlib import closing

from slora_adapters.errors import AdapterNotFound
from slora_adapters.store.store import Blob, Store


def read_members(store: Store, digest: str, piece_bytes: int = 1 << 20) -> dict[str, bytes]:
    """Reads a blob piece by piece. Starts again if a new copy replaced the blob during the read. Raises
    AdapterNotFound."""
    for _ in range(100):
        with closing(store.open(digest)) as blob:
            try:
                return {name: read_member(blob, name, piece_bytes) for name in blob.members}
            except AdapterNotFound:
                continue
    raise AssertionError("each copy went while it was read")


def read_member(blob: Blob, name: str, piece_bytes: int = 1 << 20, start: int = 0) -> bytes:
    content = bytearray(blob.members[name] - start)
    view = memoryview(content)
    for at in range(0, len(content), piece_bytes):
        blob.read_into(name, start + at, view[at : at + piece_bytes])
    return bytes(content)
