"""What Triton's kernels need to write KV in fp8 (`KVFormat.FP8`): scales and numbers, worked out on bits.

Numbers are rounded in integer arithmetic, not by a conversion of Triton's: its interpreter (3.9, measured) rounds ties
away from zero and makes 64 of 124, so tests would see another kernel than a GPU runs. It costs little: each number is
written once. Reading, which is what takes time, is the GPU's own conversion; of numbers that are finite the interpreter
reads each as it should.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_NAN_SCALE = tl.constexpr(0x7FC0)
_SMALLEST_SCALE = tl.constexpr(0x0080)


@triton.jit
def measure_magnitudes(numbers):
    """float32 -> int32 that orders them by size; what is not finite is greater than any number."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_scale(largest, other):
    """Magnitudes int32, of one side and of the other -> bits of the side's scale in bfloat16, int32."""
    exact = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    # The upper half of a float32 is a bfloat16; what is cut off rounds up.
    scale = tl.maximum((exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, _SMALLEST_SCALE)
    return tl.where(tl.maximum(largest, other) < _INFINITY, scale, _NAN_SCALE)


@triton.jit
def encode_numbers(numbers, scale):
    """float32 numbers, and the bits of their scale -> e4m3, uint8: to nearest, ties to even."""
    scaled = tl.div_rn(numbers, (scale << 16).to(tl.float32, bitcast=True))
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Twenty bits of the fraction go; the exponent counts from 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are of 2^-9, and so are float32's from 2^14 on.
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
