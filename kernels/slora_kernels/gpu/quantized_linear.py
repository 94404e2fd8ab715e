"""x times an 8-bit weight with one scale per row.

Reading the weight takes half the bytes of a 16-bit weight, but the product is still computed in 16 bits. A program
handles one block of the weight's rows and one block of tokens. It widens elements just before the product, adds over
the whole input width in order, and multiplies the float32 sum by the scale.

The product is weight times x transposed. On Hopper, an operand that is widened in registers has to be the left one,
because the right operand is read from shared memory.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.gpu.launch import Launch, dot_dtype


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Block sizes of one program.

    Shared memory: (num_stages - 1) * width * (rows + tokens * bytes of an element of x).
    """

    tokens: int
    rows: int
    width: int
    num_warps: int
    num_stages: int


# Decode is bound by reading the weight. With 32 rows per program, a weight of 4096 rows has 128 programs. Each of them
# keeps three blocks of 8 KiB in flight. Together that is 3 MiB, about what an H200 reads in 0.7 us.
_DECODE = _Blocks(tokens=16, rows=32, width=256, num_warps=4, num_stages=4)
_MIXED = _Blocks(tokens=64, rows=64, width=128, num_warps=4, num_stages=3)
# Prefill is bound by arithmetic. This is the largest square block whose float32 sums fit the registers of eight warps.
_PREFILL = _Blocks(tokens=128, rows=128, width=64, num_warps=8, num_stages=3)


# float32 is only used to check results and is not tuned for speed. These sizes fit the registers and shared memory of
# every GPU.
_FLOAT32 = _Blocks(tokens=16, rows=32, width=128, num_warps=4, num_stages=2)


def _choose_blocks(num_tokens: int, dtype: torch.dtype) -> _Blocks:
    if dtype == torch.float32:
        return _FLOAT32
    if num_tokens <= _DECODE.tokens:
        return _DECODE
    return _MIXED if num_tokens <= 2 * _MIXED.tokens else _PREFILL


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_linear_kernel(
    x,
    values,
    scales,
    bias,
    out,
    num_tokens,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    # Token blocks vary fastest, so programs that read the same rows of the weight run side by side.
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_starts = values + rows.to(tl.int64)[:, None] * WIDTH
    token_starts = x + tokens.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)[None, :]
        inside = columns < WIDTH
        left = tl.load(row_starts + columns, mask=(rows[:, None] < num_rows) & inside, other=0.0)
        right = tl.load(token_starts + columns, mask=(tokens[:, None] < num_tokens) & inside, other=0.0)
        acc = tl.dot(left.to(DOT_DTYPE), tl.trans(right.to(DOT_DTYPE)), acc, input_precision="ieee")
    acc *= tl.load(scales + rows, mask=rows < num_rows, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    target = out + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(target, acc, mask=(rows[:, None] < num_rows) & (tokens[None, :] < num_tokens))


def bind_quantized_linear(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None
) -> tuple[Launch, Tensor]:
    """Binds the kernel to x [T, K], values int8 or float8_e4m3fn [N, K], scales float32 [N], and bias [N] or None.

    Rows of x are contiguous. On NVIDIA, float8_e4m3fn needs sm_89 or later.
    Returns the launch and the output that it fills, [T, N] of x's dtype.
    """
    num_tokens, num_rows = x.shape[0], values.shape[0]
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    blocks = _choose_blocks(num_tokens, x.dtype)
    return Launch(
        _quantized_linear_kernel,
        (triton.cdiv(num_tokens, blocks.tokens), triton.cdiv(num_rows, blocks.rows)),
        {
            "x": x,
            "values": values,
            "scales": scales,
            "bias": scales if bias is None else bias,
            "out": out,
            "num_tokens": num_tokens,
            "num_rows": num_rows,
            "x_stride": x.stride(0),
        },
        {
            "WIDTH": x.shape[1],
            "HAS_BIAS": bias is not None,
            "BLOCK_T": blocks.tokens,
            "BLOCK_N": blocks.rows,
            "BLOCK_K": blocks.width,
            "DOT_DTYPE": dot_dtype(x.dtype),
        },
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    ), out
