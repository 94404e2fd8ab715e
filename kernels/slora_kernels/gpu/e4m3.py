"""Scales and elements of KV in fp8 (`KVFormat.FP8`) for the Triton kernels, computed with integer operations on bits.

Elements are rounded with integer arithmetic, not with Triton's conversion to e4m3. In Triton's interpreter, that
conversion rounds ties away from zero and converts 124 to 64 (3.9, measured), so tests would not check what a GPU runs.
The extra cost is small, because each element is written once but read often. Reading uses Triton's conversion from
e4m3, which is correct for all finite elements, also in the interpreter.
"""

import triton
import triton.language as tl

_SMALLEST_SCALE = tl.constexpr(0x0080)


@triton.jit
def measure_magnitudes(numbers):
    """Converts float32 values to int32 values that sort by magnitude. NaN and infinity sort after all finite values."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_scale(largest):
    """Returns the bits of the bfloat16 scale of a K or V vector, as int32.

    largest: greatest magnitude in the vector, as the int32 of its float32 bits.
    """
    exact = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    # The upper half of a float32 is a bfloat16. Adding 0xFFFF before taking it rounds up.
    return tl.maximum((exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, _SMALLEST_SCALE)


@triton.jit
def encode_elements(numbers, scale):
    """Rounds float32 values to e4m3 as uint8: to nearest, ties to even. scale: bits of the bfloat16 scale."""
    scaled = tl.div_rn(numbers, (scale << 16).to(tl.float32, bitcast=True))
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Drop 20 bits of the mantissa. The exponent's bias changes from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals: below 2^-6 the spacing of e4m3 is 2^-9. Adding 2^14 gives a float32 the same spacing.
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
