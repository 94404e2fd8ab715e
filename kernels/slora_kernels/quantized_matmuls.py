"""x times a weight of 8-bit numbers in torch: a tile of rows is widened at a time, so that memory stays bounded.

Measured on one Zen 5 thread, torch 2.13, weight 8192 x 2048, milliseconds beside a bfloat16 F.linear: 1 token 0.97
(int8, the packed kernel) or 3.1 (int8, tiles) beside 1.95; 16 tokens 3.9 beside 2.7; 64 tokens 7.0 beside 6.2. float32:
1 token 1.9 beside 3.0, level from 64 on. torch's own widening of float8 is scalar: 65 ms for this weight, 4 with ours.

In bfloat16 a row is the same bits alone and among others, but that the packed kernel adds in another order than tiles:
of inputs 8192 wide, 2 sums in 10,000 are rounded to the neighbouring number.
"""

import torch
from torch import Tensor

# Bytes of a widened tile: it is written and read again, so it should stay in the second-level cache.
_TILE_BYTES = 2 << 20
# Up to so many tokens torch's packed int8 kernel is faster than tiles; it reads each number once for each token.
_PACKED_TOKENS = 8
# It handles no remainders: with other sizes it returned wrong numbers, or crashed (torch 2.13, AVX-512).
_PACKED_MULTIPLE = 64
# By dtype: the integer of its size, how far a float8 moves up in it, and the bits between sign and exponent.
_WIDER = {torch.bfloat16: (torch.int16, 4, 0x7800), torch.float32: (torch.int32, 20, 0x78000000)}


def widen(values: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 or float8_e4m3fn of any shape -> the same numbers in bfloat16 or float32, exactly (weights are no NaN)."""
    if values.dtype == torch.int8 or values.device.type != "cpu":
        return values.to(dtype)
    # The sign goes to the top, exponent (4 bits) and mantissa (3) to where the wider number has the end of the one
    # and the start of the other; what is missing is the difference of the exponents' biases, 127 - 7.
    integer, shift, clear = _WIDER[dtype]
    bits = values.view(torch.int8).to(integer)
    return bits.bitwise_left_shift_(shift).bitwise_and_(~clear).view(dtype).mul_(2.0**120)


def quantized_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], values [N, K], scales float32 [N], bias [N] or None -> [T, N] of x's dtype.

    float16 is computed in float32: sums of unscaled numbers would overflow it.
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
