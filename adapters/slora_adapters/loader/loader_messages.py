"""The frames between a loader process and the engines that it serves.

After connecting, a client receives one byte that carries the arena's memfd, and then a `hello`. The client sends
`load`, `release`, `discard` and `purge`. Each `load` has a number and is answered by one `loaded` or `failed` with this
number. After a message that changed the host cache, the loader sends a `cache` with the changes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slora_adapters.errors import SloraError
from slora_adapters.loader.host_cache import CachedAdapter
from slora_adapters.loader.source import FetchFailed
from slora_adapters.peft.packing import ByteArray, PackedAdapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LAYOUT_VERSION, AdapterLayout

PROTOCOL_VERSION = 7

Message = dict[str, Any]


class LoaderMismatch(SloraError):
    """The loader is from another release: its protocol or its layout of packed adapters differs from that of the
    client.
    """


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a loader."""

    arena_bytes: int  # size of the arena


def encode_hello(arena_bytes: int) -> Message:
    return {"op": "hello", "protocol": PROTOCOL_VERSION, "layout": LAYOUT_VERSION, "arena_bytes": arena_bytes}


def decode_hello(message: Message) -> Hello:
    """Decodes a `hello`. Raises LoaderMismatch if the protocol or the layout version differs."""
    found = (message.get("protocol"), message.get("layout"))
    if found != (PROTOCOL_VERSION, LAYOUT_VERSION):
        raise LoaderMismatch(
            f"the loader has protocol and layout versions {found}, but this process has "
            f"{(PROTOCOL_VERSION, LAYOUT_VERSION)}: restart both from the same installation"
        )
    return Hello(message["arena_bytes"])


def encode_call(op: str, version: AdapterVersion, number: int = 0) -> Message:
    """Encodes a message from a client to the loader. op: "load", "release" or "discard"."""
    return {"op": op, "version": [version.tenant, version.digest], "number": number}


def encode_purge(tenant: str) -> Message:
    return {"op": "purge", "tenant": tenant}


def decode_version(message: Message) -> AdapterVersion:
    tenant, digest = message["version"]
    return AdapterVersion(str(tenant), str(digest))


def encode_loaded(entry: CachedAdapter, number: int, paces: Mapping[str, float]) -> Message:
    """Encodes the reply to a successful load. paces: current value of `Loader.paces`."""
    return {
        "op": "loaded",
        "version": [entry.version.tenant, entry.version.digest],
        "number": number,
        "offset": entry.offset,
        "num_bytes": entry.num_bytes,
        "num_segments": entry.layout.num_segments,
        "num_groups": entry.layout.num_groups,
        "changes_kv": entry.layout.changes_kv,
        "groups": entry.layout.groups.tobytes(),
        "modules": entry.layout.modules.tobytes(),
        "affine": entry.layout.affine.tobytes(),
        "rows": entry.layout.rows.tobytes(),
        "norms": entry.layout.norms.tobytes(),
        "invocation": list(entry.layout.invocation),
        "num_added": entry.layout.num_added,
        "scales": entry.scales.tobytes(),
        "paces": dict(paces),
    }


def decode_loaded(message: Message, arena: ByteArray) -> PackedAdapter:
    """Returns the packed adapter. Its buffer is a view into the mapped arena."""
    groups = np.frombuffer(bytearray(message["groups"]), np.int32).reshape(-1, 2)
    modules = np.frombuffer(bytearray(message["modules"]), np.int32).reshape(-1, 3)
    affine = np.frombuffer(bytearray(message["affine"]), np.int32).reshape(-1, 4)
    rows = np.frombuffer(bytearray(message["rows"]), np.int32).reshape(-1, 3)
    norms = np.frombuffer(bytearray(message["norms"]), np.int32).reshape(-1, 2)
    scales = np.frombuffer(bytearray(message["scales"]), np.float32)
    layout = AdapterLayout(
        groups,
        modules,
        affine,
        rows,
        norms,
        message["num_segments"],
        message["num_groups"],
        message["changes_kv"],
        tuple(message["invocation"]),
        message["num_added"],
    )
    content = arena[message["offset"] : message["offset"] + message["num_bytes"]]
    return PackedAdapter(layout, scales, content, max(1, len(content) // max(1, layout.num_bytes)))


def encode_failed(failed: FetchFailed, number: int) -> Message:
    version = [failed.version.tenant, failed.version.digest]
    return {
        "op": "failed",
        "version": version,
        "number": number,
        "code": failed.code,
        "message": failed.message,
    }


def encode_cache(added: Iterable[tuple[AdapterVersion, int]], removed: Iterable[AdapterVersion]) -> Message:
    """Encodes changes of the host cache. added: each version with its size in bytes."""
    return {
        "op": "cache",
        "added": [[version.tenant, version.digest, size] for version, size in added],
        "removed": [[version.tenant, version.digest] for version in removed],
    }


def decode_cache(message: Message) -> tuple[list[tuple[AdapterVersion, int]], list[AdapterVersion]]:
    """Returns the added versions, each with its size in bytes, and the removed versions."""
    added = [(AdapterVersion(tenant, digest), size) for tenant, digest, size in message["added"]]
    return added, [AdapterVersion(tenant, digest) for tenant, digest in message["removed"]]
