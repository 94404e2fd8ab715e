"""x times a weight of 8 or 4 bits in torch. The weight is widened one tile of rows at a time, so memory stays bounded.

torch also has a kernel for bfloat16 times int8, which is faster for few tokens and slower for many. It adds in another
order than the tiles, and a row must not have other bits alone than in a batch. The CPU kernels have a product of their
own (`cpu/quantized.py`).

Times in milliseconds for a weight of 8192 x 2048 on one Zen 5 thread with torch 2.13. F.linear is the unquantized
product in the same dtype:

    dtype     tokens  ours  F.linear
    bfloat16  1       3.1   1.95
    bfloat16  16      3.9   2.7
    bfloat16  64      7.0   6.2
    float32   1       1.9   3.0

In float32, tiles and F.linear take the same time from 64 tokens on. torch converts float8 with scalar code, which takes
65 ms for this weight. `widen` takes 4 ms.
"""

import torch
from torch import Tensor

from slora_kernels.coded_weight import CodedWeight
from slora_kernels.torch.row_blocks import multiply_rows

# Bytes of a widened tile. It is written and then read again, so it should fit the L2 cache.
_TILE_BYTES = 2 << 20
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
    out = _multiply_tiles(x if x.dtype == torch.bfloat16 else x.float(), values) * scales
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] or None -> [T, N] of x's dtype. Products and sums are in float32."""
    num_rows, width = weight.shape
    rows, out = x.float(), torch.empty(len(x), num_rows, device=x.device)
    step = max(1, _TILE_BYTES // (width * rows.element_size()))
    for start in range(0, num_rows, step):
        tile = weight.rows(start, start + step).decode()
        out[:, start : start + step] = multiply_rows(rows, tile) if x.device.type == "cpu" else rows @ tile.T
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _multiply_tiles(x: Tensor, values: Tensor) -> Tensor:
    """x [T, K] times values [N, K] transposed -> [T, N] of x's dtype."""
    num_rows, width = values.shape
    sums = torch.empty(len(x), num_rows, dtype=x.dtype, device=x.device)
    step = max(1, _TILE_BYTES // (width * x.element_size()))
    for start in range(0, num_rows, step):
        tile = widen(values[start : start + step], x.dtype)
        if x.device.type == "cpu":
            sums[:, start : start + step] = multiply_rows(x, tile)
        else:
            torch.mm(x, tile.T, out=sums[:, start : start + step])
    return sums
