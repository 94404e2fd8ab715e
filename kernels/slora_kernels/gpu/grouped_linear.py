"""Groups of rows times a weight for each group: the experts of a mixture, in one launch.

The rows are sorted by group, and only the device knows where a group begins. So the grid has as many programs as the
rows could need in the worst case. Each program finds its group and its rows in the table of starts, and a program
without rows ends. The grid depends only on the number of rows, so a step can be recorded.

The product is weight times x transposed, with float32 sums in the order of the input width, as in `quantized_linear`. A
row's result does not depend on the other rows of its group, as long as the block sizes are the same.
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

    Shared memory: (num_stages - 1) * width * (rows * bytes of a weight + tokens * bytes of an element of x). All sizes
    fit the 64 KiB of gfx942 with 16-bit weights.
    """

    tokens: int
    rows: int
    width: int
    num_warps: int
    num_stages: int


# Not measured on a GPU yet. In a decode step, a group has a few rows, and the kernel is bound by reading the weights of
# the groups that have rows.
_FEW_ROWS = _Blocks(tokens=16, rows=64, width=128, num_warps=4, num_stages=3)
_SOME_ROWS = _Blocks(tokens=64, rows=64, width=64, num_warps=4, num_stages=3)
_MANY_ROWS = _Blocks(tokens=128, rows=128, width=64, num_warps=8, num_stages=3)
# float32 is only used to check results.
_FLOAT32 = _Blocks(tokens=16, rows=32, width=128, num_warps=4, num_stages=2)


def _choose_blocks(num_rows: int, num_groups: int, dtype: torch.dtype) -> _Blocks:
    """Chooses by the mean number of rows of a group."""
    if dtype == torch.float32:
        return _FLOAT32
    if num_rows <= _FEW_ROWS.tokens * num_groups:
        return _FEW_ROWS
    return _SOME_ROWS if num_rows <= 2 * _SOME_ROWS.tokens * num_groups else _MANY_ROWS


@triton.jit
def _grouped_linear_kernel(
    x,
    weight,
    scales,
    starts,
    out,
    num_groups,
    num_rows,
    x_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    # Tiles of tokens vary fastest, so programs that read the same rows of a weight run side by side.
    tile = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    firsts = tl.load(starts + groups, mask=groups < num_groups, other=0)
    ends = tl.load(starts + groups + 1, mask=groups < num_groups, other=0)
    num_tiles = (ends - firsts + BLOCK_T - 1) // BLOCK_T
    is_before = tl.cumsum(num_tiles, axis=0) <= tile
    group = tl.sum(is_before.to(tl.int32), axis=0)
    if group >= num_groups:
        return
    first = tl.load(starts + group) + (tile - tl.sum(tl.where(is_before, num_tiles, 0), axis=0)) * BLOCK_T
    end = tl.load(starts + group + 1)
    tokens = first + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_starts = weight + (group.to(tl.int64) * num_rows + rows)[:, None] * WIDTH
    token_starts = x + tokens.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)[None, :]
        inside = columns < WIDTH
        left = tl.load(row_starts + columns, mask=(rows[:, None] < num_rows) & inside, other=0.0)
        right = tl.load(token_starts + columns, mask=(tokens[:, None] < end) & inside, other=0.0)
        acc = tl.dot(left.to(DOT_DTYPE), tl.trans(right.to(DOT_DTYPE)), acc, input_precision="ieee")
    if HAS_SCALES:
        acc *= tl.load(scales + group * num_rows + rows, mask=rows < num_rows, other=0.0)[:, None]
    target = out + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(target, acc, mask=(rows[:, None] < num_rows) & (tokens[None, :] < end))


def bind_grouped_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor
) -> tuple[Launch, Tensor]:
    """Binds the kernel to x [S, K], weight [E, N, K], scales float32 [E, N] or None, and starts int32 [E + 1].

    Rows of x are contiguous. weight: of x's dtype, or int8 or float8_e4m3fn with scales. On NVIDIA, float8_e4m3fn needs
    sm_89 or later.
    Returns the launch and the output that it fills, [S, N] of x's dtype.
    """
    num_tokens, (num_groups, num_rows, width) = x.shape[0], weight.shape
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    blocks = _choose_blocks(num_tokens, num_groups, x.dtype)
    # Each group with rows has one tile for its first row, and at most one more for each further `blocks.tokens` rows.
    num_used = min(num_groups, num_tokens)
    num_tiles = num_used + (num_tokens - num_used) // blocks.tokens
    return Launch(
        _grouped_linear_kernel,
        (num_tiles, triton.cdiv(num_rows, blocks.rows)),
        {
            "x": x,
            "weight": weight,
            "scales": starts if scales is None else scales,
            "starts": starts,
            "out": out,
            "num_groups": num_groups,
            "num_rows": num_rows,
            "x_stride": x.stride(0),
        },
        {
            "GROUPS": triton.next_power_of_2(num_groups),
            "WIDTH": width,
            "HAS_SCALES": scales is not None,
            "BLOCK_T": blocks.tokens,
            "BLOCK_N": blocks.rows,
            "BLOCK_K": blocks.width,
            "DOT_DTYPE": dot_dtype(x.dtype),
        },
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    ), out
