"""x times an 8-bit weight in torch. The weight is widened one tile of rows at a time, so memory stays bounded.

Times in milliseconds for a weight of 8192 x 2048 on one Zen 5 thread with torch 2.13. F.linear is the unquantized
product in the same dtype:

    dtype     tokens  weight and path      ours  F.linear
    bfloat16  1       int8, packed kernel  0.97  1.95
    bfloat16  1       int8, tiles          3.1   1.95
    bfloat16  16      tiles                3.9   2.7
    bfloat16  64      tiles                7.0   6.2
    float32   1       tiles                1.9   3.0

In float32, tiles and F.linear take the same time from 64 tokens on. torch converts float8 with scalar code, which takes
65 ms for this weight. `widen` takes 4 ms.

In bfloat16, a row's result is bit-identical alone and in a batch, with one exception. The packed kernel, used for few
tokens, and the tiles add in different orders. With inputs 8192 wide, 2 sums in 10,000 then differ by one rounding step.
"""

import torch
from torch import Tensor

# Bytes of a widened tile. It is written and then read again, so it should fit the L2 cache.
_TILE_BYTES = 2 << 20
# Up to this many tokens, torch's packed int8 kernel is faster than tiles. It reads each weight once per token.
_PACKED_TOKENS = 8
# The packed kernel needs multiples of this size. With other sizes it returned wrong results or crashed (torch 2.13,
# AVX-512).
_PACKED_MULTIPLE = 64
# For each target dtype: (integer type of the same size, left shift of a float8's bits, mask of the bits that sign
# extension fills).
_WIDER = {torch.bfloat16: (torch.int16, 4, 0x7800), torch.float32: (torch.int32, 20, 0x78000000)}


def widen(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts int8 or float8_e4m3fn of any shape to bfloat16 or float32, exactly. NaN is not supported."""
    if values.dtype == torch.int8 or values.device.type != "cpu":
        return values.to(dtype)
    # The shift moves the sign to the top bit. The 4 exponent bits align with the low bits of the wider exponent. The 3
    # mantissa bits align with the top of the wider mantissa. The factor 2**120 corrects the difference of the exponent
    # biases, 127 - 7.
    integer, shift, clear = _WIDER[dtype]
    bits = values.view(torch.int8).to(integer)
    return bits.bitwise_left_shift_(shift).bitwise_and_(~clear).view(dtype).mul_(2.0**120)


def quantized_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], values [N, K], scales float32 [N], bias [N] or None -> [T, N] of x's dtype.

    float16 inputs are computed in float32, because sums of unscaled products would overflow float16.
    """
    if _suits_packed(x, values):
        sums = torch._weight_int8pack_mm(x, values, torch.ones_like(scales, dtype=x.dtype))
    else:
        sums = _multiply_tiles(x if x.dtype == torch.bfloat16 else x.float(), values)
    out = sums * scales
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _suits_packed(x: Tensor, values: Tensor) -> bool:
    return (
        x.dtype == torch.bfloat16
        and values.dtype == torch.int8
        and x.device.type == "cpu"
        and len(x) <= _PACKED_TOKENS
        and all(size % _PACKED_MULTIPLE == 0 for size in values.shape)
    )


def _multiply_tiles(x: Tensor, values: Tensor) -> Tensor:
    """x [T, K] times values [N, K] transposed -> [T, N] of x's dtype."""
    num_rows, width = values.shape
    sums = torch.empty(len(x), num_rows, dtype=x.dtype, device=x.device)
    step = max(1, _TILE_BYTES // (width * x.element_size()))
    for start in range(0, num_rows, step):
        tile = widen(values[start : start + step], x.dtype)
        torch.mm(x, tile.T, out=sums[:, start : start + step])
    return sums
