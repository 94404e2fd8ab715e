"""Reads safetensors files strictly and without copying, and writes them.

A file begins with 8 bytes, the little-endian length of the header. The header is a JSON object name -> {dtype, shape,
data_offsets}. The tensors' bytes follow. The offsets must cover these bytes exactly, without a hole, an overlap or a
remainder.

The checks are stricter than the reference reader's. Keys must be unique (the reference reader uses the last one). The
header must stay below 1 MiB (the reference reader allows 100 MB). Only the three dtypes of LoRA weights are accepted.

This module does not interpret the tensors. numpy has no bfloat16 type, so BF16 values are read as uint16 bit patterns.
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.errors import abbreviate
from slora_adapters.peft.strict_json import parse_object


def map_file(path: Path) -> memoryview:
    """Returns a read-only view of a file's bytes. It stays valid when the file is unlinked or replaced."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


# Size of the length field at the start of the file.
PREFIX_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
# Limit on the header of a base model's file, which may list every expert of every layer. The reference reader has the
# same limit.
MAX_BASE_HEADER_BYTES = 100_000_000

# Safetensors dtype name -> numpy dtype of the values.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor with its content. `values` is a read-only view of the file; for BF16 it holds uint16 bit patterns."""

    name: str
    dtype: str
    values: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor as a header describes it. Its content is bytes [start, end) of the body, which begins after
    the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


# A tensor with its content, or as it is known before its bytes are read. Both have a name, a dtype and a shape.
Factor = StoredTensor | TensorSpan


def read_tensors(raw: bytes | memoryview) -> dict[str, StoredTensor]:
    """Returns all tensors of a safetensors file, by name, in the order of their bytes. Raises ValueError for an invalid
    file.
    """
    header, body = _split(raw, MAX_HEADER_BYTES)
    return {name: _view(span, body) for name, span in parse_spans(header, len(body)).items()}


def measure_header(prefix: bytes | memoryview, file_bytes: int, max_bytes: int = MAX_HEADER_BYTES) -> int:
    """Returns the size of the header, from the first `PREFIX_BYTES` of the file. Raises ValueError if the header is too
    large or does not fit into the file.
    """
    if file_bytes < PREFIX_BYTES:
        raise ValueError(f"the file has {file_bytes} bytes, which is too short for a safetensors header")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > max_bytes:
        raise ValueError(
            f"the file states a header of {header_bytes} bytes; at most {max_bytes} are accepted"
        )
    if PREFIX_BYTES + header_bytes > file_bytes:
        left = file_bytes - PREFIX_BYTES
        raise ValueError(
            f"the file states a header of {header_bytes} bytes, but the file ends after {left} of them"
        )
    return header_bytes


def parse_spans(header: bytes | memoryview, body_bytes: int) -> dict[str, TensorSpan]:
    """Returns the tensors that a header describes, by name, in the order of their bytes. Raises ValueError."""
    entries = parse_object(header, source="the header", max_bytes=MAX_HEADER_BYTES)
    _check_metadata(entries.pop("__metadata__", None))
    spans = [_parse_entry(name, entry) for name, entry in entries.items()]
    spans.sort(key=lambda span: (span.start, span.end))
    _check_cover(spans, body_bytes)
    return {span.name: span for span in spans}


def read_shaped(raw: bytes | memoryview, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
    """Returns the tensors with this shape in a base model's file, by name. The file may have many other tensors of any
    dtype.

    Raises ValueError.
    """
    header, body = _split(raw, MAX_BASE_HEADER_BYTES)
    entries = parse_object(header, source="the header", max_bytes=MAX_BASE_HEADER_BYTES)
    wanted = {
        name: entry
        for name, entry in entries.items()
        if isinstance(entry, dict) and entry.get("shape") == list(shape)
    }
    return {name: _view(_parse_entry(name, entry), body) for name, entry in wanted.items()}


def tensor_file_parts(tensors: Iterable[StoredTensor]) -> Iterator[bytes]:
    """Yields the pieces of a safetensors file with these tensors in name order. A piece is at most one tensor."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    ends = list(accumulate(tensor.values.nbytes for tensor in ordered))
    header = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.values.nbytes, end],
        }
        for tensor, end in zip(ordered, ends, strict=True)
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    yield len(raw).to_bytes(8, "little")
    yield raw
    for tensor in ordered:
        yield tensor.values.tobytes()


def _split(raw: bytes | memoryview, max_header_bytes: int) -> tuple[memoryview, memoryview]:
    """Returns header and body of a file."""
    view = memoryview(raw).cast("B").toreadonly()
    body_start = PREFIX_BYTES + measure_header(view[:PREFIX_BYTES], len(view), max_header_bytes)
    return view[PREFIX_BYTES:body_start], view[body_start:]


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the header's __metadata__ is not a table of strings")


def _parse_entry(name: str, entry: object) -> TensorSpan:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"tensor {name!r}: the header entry must have exactly the keys dtype, shape and data_offsets"
        )
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}; accepted are {', '.join(DTYPES)}")
    shape = _sizes(entry["shape"])
    offsets = _sizes(entry["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"tensor {name!r}: shape {abbreviate(entry['shape'])} or data_offsets "
            f"{abbreviate(entry['data_offsets'])} are not valid sizes"
        )
    expected = DTYPES[dtype].itemsize
    for size in shape:
        expected *= size
    if expected != offsets[1] - offsets[0]:
        raise ValueError(
            f"tensor {name!r}: shape {list(shape)} of {dtype} takes {expected} bytes, but its "
            f"data_offsets span {offsets[1] - offsets[0]}"
        )
    return TensorSpan(name, dtype, shape, offsets[0], offsets[1])


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 8:
        return None
    if not all(type(size) is int and 0 <= size < (1 << 48) for size in value):
        return None
    return tuple(value)


def _check_cover(spans: Iterable[TensorSpan], body_bytes: int) -> None:
    position = 0
    for span in spans:
        if span.start != position:
            fault = "overlaps the tensor before it" if span.start < position else "leaves a gap before it"
            raise ValueError(
                f"tensor {span.name!r} {fault}: it starts at byte {span.start} instead of {position}"
            )
        position = span.end
    if position != body_bytes:
        fault = "is truncated" if position > body_bytes else "continues after the last tensor"
        raise ValueError(
            f"the file {fault}: the header describes {position} bytes of tensors, but the file has "
            f"{body_bytes}"
        )


def _view(span: TensorSpan, body: memoryview) -> StoredTensor:
    values = np.frombuffer(body[span.start : span.end], DTYPES[span.dtype]).reshape(span.shape)
    return StoredTensor(span.name, span.dtype, values)
