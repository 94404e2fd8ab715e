"""Conversions between the three floating-point formats of weights, in numpy, by round to nearest, ties to
even.

numpy has no bfloat16: its values are uint16 bit patterns here. Formats go by safetensors' names (F32, F16,
BF16) for what files hold and by torch's (float32, float16, bfloat16) for what the engine serves.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]

# What a served dtype is stored as in numpy.
STORAGE: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}

# Magnitude bits of infinity in each format.
_INFINITY_BITS = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
# The least float32 magnitude, as bits, that rounds to infinity in a served dtype: 65520 is half-way between
# float16's largest number, 65504, and the next power of two; for bfloat16 likewise.
_ROUNDS_TO_INFINITY = {"float32": 0x7F80_0000, "float16": 0x477F_F000, "bfloat16": 0x7F7F_8000}

# Elements looked at at a time: a block and its temporary stay in the second-level cache (7.8 against 0.55
# GB/s).
_SCAN_BLOCK = 1 << 16


def largest_magnitude_bits(values: Values) -> int:
    """The greatest magnitude in `values`, as a bit pattern of its own format; non-finite numbers sort above
    all.
    """
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    magnitude = bits.dtype.type((1 << (8 * values.dtype.itemsize - 1)) - 1)
    blocks = (bits[start : start + _SCAN_BLOCK] for start in range(0, bits.size, _SCAN_BLOCK))
    return max((int((block & magnitude).max()) for block in blocks), default=0)


def is_finite(dtype: str, magnitude_bits: int) -> bool:
    """Whether a tensor of file format `dtype`, whose largest magnitude is `magnitude_bits`, has only finite
    numbers.
    """
    return magnitude_bits < _INFINITY_BITS[dtype]


def may_overflow(dtype: str, served: str) -> bool:
    """Whether some finite number of file format `dtype` is too large for the dtype `served`."""
    return (dtype, served) in (("F32", "float16"), ("F32", "bfloat16"), ("BF16", "float16"))


def fits(dtype: str, magnitude_bits: int, served: str) -> bool:
    """Whether finite numbers of file format `dtype` stay finite when rounded to the dtype `served`."""
    if not may_overflow(dtype, served):
        return True
    float32_bits = magnitude_bits << 16 if dtype == "BF16" else magnitude_bits
    return float32_bits < _ROUNDS_TO_INFINITY[served]


def convert(values: Values, dtype: str, served: str) -> Values:
    """`values` of file format `dtype` in the dtype `served`; what is too large becomes infinity (`fits`
    tells).

    The result has the type of `STORAGE[served]`, and is `values` itself when nothing needs to change.
    """
    if (dtype, served) in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")):
        return values
    single = _widen(values, dtype)
    if served == "bfloat16":
        return _round_to_bfloat16(single)
    with np.errstate(over="ignore"):
        return single.astype(STORAGE[served])


def _widen(values: Values, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (values.astype("<u4") << np.uint32(16)).view("<f4")
    return values.astype("<f4", copy=False)


def _round_to_bfloat16(single: npt.NDArray[np.float32]) -> Values:
    bits = np.ascontiguousarray(single).view("<u4")
    # Adding just under half of the last kept place, plus one if that place is odd, carries exactly when RNE
    # rounds up.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    bfloat16: Values = (rounded >> np.uint32(16)).astype("<u2")
    return bfloat16
