"""Reads one safetensors file from bytes, strictly, without copying; writes what was read.

The format: 8 bytes little-endian length of the header; the header, a JSON object name -> {dtype, shape,
data_offsets}; then the tensors' bytes, which the offsets must cover exactly, with no hole, overlap or
remainder. Beyond what the reference reader checks, keys must be unique (it lets the last one win), the header
must stay below 1 MiB (it allows 100 MB), and only the three dtypes of LoRA weights are known.

Does not know what the tensors mean. bfloat16 has no numpy type, so its values come as uint16 bit patterns.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.peft.strict_json import parse_object

# The header's length.
PREFIX_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
# A base model's, whose file may hold every expert of every layer: what the reference reader allows.
MAX_BASE_HEADER_BYTES = 100_000_000

# Safetensors name -> the numpy type that the values are viewed as.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the file: `values` is a read-only view, uint16 bit patterns when `dtype` is
    BF16.
    """

    name: str
    dtype: str
    values: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor that a header describes. It takes bytes [start, end) of the body, which begins behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_tensors(raw: bytes | memoryview) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file, by name, in the order of their bytes. Raises ValueError: what is wrong."""
    header, body = _split(raw, MAX_HEADER_BYTES)
    return {name: _view(span, body) for name, span in parse_spans(header, len(body)).items()}


def measure_header(prefix: bytes | memoryview, file_bytes: int, max_bytes: int = MAX_HEADER_BYTES) -> int:
    """Bytes of the header, from the `PREFIX_BYTES` before it. Raises ValueError if no such file begins like this."""
    if file_bytes < PREFIX_BYTES:
        raise ValueError(f"the file is {file_bytes} bytes long, too short for a safetensors header")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > max_bytes:
        raise ValueError(f"the header claims {header_bytes} bytes; at most {max_bytes} are accepted")
    if PREFIX_BYTES + header_bytes > file_bytes:
        left = file_bytes - PREFIX_BYTES
        raise ValueError(f"the header claims {header_bytes} bytes, but the file ends after {left}")
    return header_bytes


def parse_spans(header: bytes | memoryview, body_bytes: int) -> dict[str, TensorSpan]:
    """What a header says of the body behind it, by name, in the order of their bytes. Raises ValueError."""
    entries = parse_object(header, source="the header", max_bytes=MAX_HEADER_BYTES)
    _check_metadata(entries.pop("__metadata__", None))
    spans = [_parse_entry(name, entry) for name, entry in entries.items()]
    spans.sort(key=lambda span: (span.start, span.end))
    _check_cover(spans, body_bytes)
    return {span.name: span for span in spans}


def read_shaped(raw: bytes | memoryview, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
    """The tensors of this shape in a base model's file, by name; the others may be many and of any dtype.

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
    """A safetensors file of these tensors, in the order of their names; piece by piece, one tensor's bytes at most."""
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
    """Header and body of a file."""
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
            f"tensor {name!r}: the header entry must hold dtype, shape and data_offsets, nothing else"
        )
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}; accepted are {', '.join(DTYPES)}")
    shape = _sizes(entry["shape"])
    offsets = _sizes(entry["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"tensor {name!r}: shape {_short(entry['shape'])} or data_offsets {_short(entry['data_offsets'])} are not "
            "proper sizes"
        )
    expected = DTYPES[dtype].itemsize
    for size in shape:
        expected *= size
    if expected != offsets[1] - offsets[0]:
        raise ValueError(
            f"tensor {name!r}: shape {list(shape)} of {dtype} takes {expected} bytes, its data_offsets span "
            f"{offsets[1] - offsets[0]}"
        )
    return TensorSpan(name, dtype, shape, offsets[0], offsets[1])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


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
            fault = "overlaps the tensor before it" if span.start < position else "leaves a hole before it"
            raise ValueError(
                f"tensor {span.name!r} {fault}: it starts at byte {span.start}, expected {position}"
            )
        position = span.end
    if position != body_bytes:
        fault = "is cut short" if position > body_bytes else "goes on after the last tensor"
        raise ValueError(
            f"the file {fault}: the header describes {position} bytes of tensors, it has {body_bytes}"
        )


def _view(span: TensorSpan, body: memoryview) -> StoredTensor:
    values = np.frombuffer(body[span.start : span.end], DTYPES[span.dtype]).reshape(span.shape)
    return StoredTensor(span.name, span.dtype, values)
