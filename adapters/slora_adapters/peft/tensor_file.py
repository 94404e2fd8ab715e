"""Reads safetensors files strictly and without copying, and writes them.

A file begins with 8 bytes, the little-endian length of the header. The header is a JSON object name -> {dtype, shape,
data_offsets}. The tensors' bytes follow. The offsets must cover these bytes exactly, without a hole, an overlap or a
remainder.

The checks are stricter than the reference reader's. Keys must be unique (the reference reader uses the last one). The
header must stay below 1 MiB (the reference reader allows 100 MB). Only the three dtypes of LoRA weights are accepted.

This module does not interpret the tensors. It converts their values between the three floating-point formats of
weights, with round to nearest, ties to even. numpy has no bfloat16, so bfloat16 values are uint16 bit patterns. Dtypes
of files have the names of safetensors (F32, F16, BF16). Served dtypes have the names of torch (float32, float16,
bfloat16).
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
# Limit on the header of an uploaded file, which may have two tensors for each linear of each expert. Stores keep files
# with a header of at most `MAX_HEADER_BYTES`.
MAX_UPLOAD_HEADER_BYTES = 16 << 20
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
    """Returns all tensors of an uploaded safetensors file, by name, in the order of their bytes. Raises ValueError for
    an invalid file.
    """
    header, body = _split(raw, MAX_UPLOAD_HEADER_BYTES)
    spans = parse_spans(header, len(body), MAX_UPLOAD_HEADER_BYTES)
    return {name: _view(span, body) for name, span in spans.items()}


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


def parse_spans(
    header: bytes | memoryview, body_bytes: int, max_bytes: int = MAX_HEADER_BYTES
) -> dict[str, TensorSpan]:
    """Returns the tensors that a header describes, by name, in the order of their bytes. Raises ValueError."""
    entries = parse_object(header, source="the header", max_bytes=max_bytes)
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
        raise ValueError(
            f"tensor {name[:120]!r} has dtype {abbreviate(dtype)}; accepted are {', '.join(DTYPES)}: convert it, as "
            "model.to(torch.bfloat16) does before save_pretrained"
        )
    shape = _sizes(entry["shape"])
    offsets = _sizes(entry["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"tensor {name[:120]!r}: shape {abbreviate(entry['shape'])} or data_offsets "
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


Values = npt.NDArray[Any]

# The numpy dtype in which values of each served dtype are stored.
STORAGE: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}

# Served dtype -> the name of the same dtype in files.
STORED_NAMES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

# Magnitude bits of infinity in each format.
_INFINITY_BITS = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
# The bits of the smallest float32 magnitude that rounds to infinity in each served dtype. 65520 is half-way between
# float16's largest finite value, 65504, and the next power of two; bfloat16 is analogous.
_ROUNDS_TO_INFINITY = {"float32": 0x7F80_0000, "float16": 0x477F_F000, "bfloat16": 0x7F7F_8000}

# Elements per block. A block and its temporaries stay in the L2 cache. The C library can reuse the memory of such small
# arrays instead of mapping new pages. With blocks, the scan for non-finite values runs at 7.8 GB/s instead of 0.55
# GB/s, and conversions are several times as fast.
_BLOCK = 1 << 14


def largest_magnitude_bits(values: Values) -> int:
    """Returns the bit pattern of the greatest magnitude in `values`, in their own dtype. Infinity and NaN count as
    greater than every finite value.
    """
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    magnitude = bits.dtype.type((1 << (8 * values.dtype.itemsize - 1)) - 1)
    blocks = (bits[start : start + _BLOCK] for start in range(0, bits.size, _BLOCK))
    return max((int((block & magnitude).max()) for block in blocks), default=0)


def is_finite(dtype: str, magnitude_bits: int) -> bool:
    """Returns whether all values of a tensor are finite. dtype: the tensor's dtype in the file. magnitude_bits: result
    of `largest_magnitude_bits`.
    """
    return magnitude_bits < _INFINITY_BITS[dtype]


def may_overflow(dtype: str, served: str) -> bool:
    """Returns whether a finite value stored as `dtype` in the file can overflow when it is converted to the dtype
    `served`.
    """
    return (dtype, served) in (("F32", "float16"), ("F32", "bfloat16"), ("BF16", "float16"))


def fits(dtype: str, magnitude_bits: int, served: str) -> bool:
    """Returns whether the finite values of a tensor stay finite when they are converted to the dtype `served`.

    dtype: dtype of the tensor in the file. magnitude_bits: result of `largest_magnitude_bits`.
    """
    if not may_overflow(dtype, served):
        return True
    float32_bits = magnitude_bits << 16 if dtype == "BF16" else magnitude_bits
    return float32_bits < _ROUNDS_TO_INFINITY[served]


def convert(values: Values, dtype: str, served: str) -> Values:
    """Converts finite `values`, stored as `dtype` in the file, to the dtype `served`. Values that overflow become
    infinity.

    The result has the type `STORAGE[served]`. It is `values` itself if no conversion is needed.
    """
    if (dtype, served) in _UNCHANGED:
        return values
    flat = np.ascontiguousarray(values).reshape(-1)
    converted = np.empty(flat.size, STORAGE[served])
    for start in range(0, flat.size, _BLOCK):
        single = _widen(flat[start : start + _BLOCK], dtype)
        converted[start : start + _BLOCK] = _narrow(single, served)
    return converted.reshape(values.shape)


_UNCHANGED = (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"))


def _widen(block: Values, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (block.astype("<u4") << np.uint32(16)).view("<f4")
    return _widen_half(block.view("<u2")) if dtype == "F16" else block


def _widen_half(bits: Values) -> npt.NDArray[np.float32]:
    """Converts float16 bits to float32. The result is exact for all finite values, including subnormals. This is seven
    times as fast as numpy's conversion.

    Shifted to the bit positions of a float32, the bits represent the value times 2**-112, because the exponent biases
    of the two dtypes differ by 112.
    """
    wide = bits.astype("<u4")
    magnitude = ((wide & np.uint32(0x7FFF)) << np.uint32(13)).view("<f4") * np.float32(2.0**112)
    sign = (wide & np.uint32(0x8000)) << np.uint32(16)
    single: npt.NDArray[np.float32] = (magnitude.view("<u4") | sign).view("<f4")
    return single


def _narrow(single: npt.NDArray[np.float32], served: str) -> Values:
    if served == "bfloat16":
        return _round_to_bfloat16(single)
    with np.errstate(over="ignore"):
        return single.astype(STORAGE[served], copy=False)


def _round_to_bfloat16(single: npt.NDArray[np.float32]) -> Values:
    bits = single.view("<u4")
    # Add just under half of the last kept bit, plus one if that bit is odd. This carries exactly when round to nearest,
    # ties to even, rounds up. Computing in place takes 31 us per block instead of 135 us.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    upper_halves: Values = rounded.view("<u2")[1::2]
    return upper_halves
