"""Locates each tensor of a safetensors file from its header alone.

The format: 8 bytes with the header's length, little-endian; the header, a JSON object name -> {dtype, shape,
data_offsets}; the bytes of the tensors.

No tensor is read here: a caller reads a tensor's bytes from `offset` directly into their final memory. This parser is
stricter than the reference reader in one point: a name may occur only once.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slora.core.errors import ConfigError

# The reference reader's limit. A tensor needs about 100 bytes of the header.
_MAX_HEADER_BYTES = 100_000_000

# Bytes of one element. Other dtypes can't be used as weights.
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: row-major, `num_bytes` bytes from byte `offset` of `path`. dtype: safetensors' name."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is one index of the first axis."""
        return math.prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]

    def item(self, index: int) -> "StoredTensor":
        """The part of the tensor at one index of the first axis."""
        return replace(self, shape=self.shape[1:], offset=self.offset + index * self.row_bytes)


def read_header(path: Path) -> list[StoredTensor]:
    """Reads the tensors of a file.

    Raises ConfigError naming file and tensor if the file is damaged or not safetensors.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise _damaged(
                    path, f"it states a header of {header_bytes} bytes, but has only {file_bytes} bytes"
                )
            header = json.loads(file.read(header_bytes), object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    tensors = [_parse(path, name, entry, start) for name, entry in header.items()]
    _check_contiguous(path, tensors, start, file_bytes)
    return tensors


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name appears twice")
    return table


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {what}")


def _parse(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = (entry[key] for key in ("dtype", "shape", "data_offsets"))  # type: ignore[index]
        sizes = [begin, end, *shape]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"{name} lacks dtype, shape or data_offsets") from error
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise _damaged(path, f"{name} has invalid sizes")
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"{path}: {name} has dtype {dtype!r}; supported are {', '.join(ELEMENT_BYTES)}")
    tensor = StoredTensor(name, path, dtype, tuple(shape), start + begin)
    if tensor.num_bytes != end - begin:
        raise _damaged(
            path, f"{name} takes {tensor.num_bytes} bytes, but its data_offsets span {end - begin}"
        )
    return tensor


def _check_contiguous(path: Path, tensors: list[StoredTensor], start: int, file_bytes: int) -> None:
    """Checks that the tensors follow each other without gap or overlap, up to the end of the file."""
    position = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != position:
            raise _damaged(path, f"{tensor.name} starts at byte {tensor.offset} instead of {position}")
        position += tensor.num_bytes
    if position != file_bytes:
        raise _damaged(path, f"its tensors end at byte {position}, but the file ends at {file_bytes}")
