"""x times a 4-bit weight with a scale for each group of columns.

The numbers of the table and x are multiplied on tensor cores. The float32 sum over the columns of a group is multiplied
by the group's scale. A minimum is multiplied by the sum of x over the group. So nothing is rounded to x's dtype after
the table: table number times scale has more bits than a 16-bit dtype.

16-bit dtypes hold integers and e2m1 exactly, but not the numbers of bitsandbytes (nf4, fp4). Such a number is split
into up to three numbers of x's dtype, whose sum is exact, and each of them is multiplied. That is three times the
arithmetic on tensor cores. float32 products without them have a fifteenth of their rate (H200, data sheet).

A program adds over the whole input width in a fixed order, as in `quantized_linear`. It multiplies the codes in the low
bits of the bytes with their columns of x, and those in the high bits with theirs, so no number moves between threads. A
row's result does not depend on the other rows, as long as the block sizes are the same.

A group of 32 columns has only 16 bytes of codes in a row. So a decode step multiplies several groups in an iteration.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.coded_weight import BLOCK_COLUMNS, CodedWeight
from slora_kernels.gpu.launch import Launch, dot_dtype


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Block sizes of one program.

    width: the most columns of an iteration, which are part of a group or, in a decode step, whole groups.
    Shared memory: about (num_stages - 1) * width * (rows / 2 + tokens * bytes of an element of x), and more for numbers
    in parts. All sizes fit the 64 KiB of gfx942.
    """

    tokens: int
    rows: int
    width: int
    num_warps: int
    num_stages: int


# Not measured on a GPU yet. Decode is bound by reading the weight, so it takes few rows per program for many programs,
# and many stages to keep reads in flight. Prefill is bound by arithmetic. Two square blocks of sums (of a group, and of
# all groups) have to fit the registers of its eight warps.
_DECODE = _Blocks(tokens=16, rows=32, width=256, num_warps=4, num_stages=4)
_MIXED = _Blocks(tokens=64, rows=64, width=128, num_warps=4, num_stages=3)
_PREFILL = _Blocks(tokens=128, rows=128, width=64, num_warps=8, num_stages=3)
# float32 is only used to check results.
_FLOAT32 = _Blocks(tokens=16, rows=32, width=128, num_warps=4, num_stages=2)

_MAX_PARTS = 3
# Columns in the low bits of a block's bytes. The next ones are in the high bits.
_HALF = tl.constexpr(BLOCK_COLUMNS // 2)
# For each dtype: an integer of its size, and a power of two whose last 4 bits of mantissa count units. So the bits of
# the power | code are those of the power + code.
UNITS = {
    tl.bfloat16: (tl.int16, 0x4300, 2.0**7),
    tl.float16: (tl.int16, 0x6400, 2.0**10),
    tl.float32: (tl.int32, 0x4B000000, 2.0**23),
}


def _choose_blocks(num_tokens: int, dtype: torch.dtype) -> _Blocks:
    if dtype == torch.float32:
        return _FLOAT32
    if num_tokens <= _DECODE.tokens:
        return _DECODE
    return _MIXED if num_tokens <= 2 * _MIXED.tokens else _PREFILL


def _find_first(numbers: tuple[float, ...]) -> float | None:
    """The table's first number if the table counts up from it in steps of 1 as integers of 4 bits do, or None."""
    first = numbers[0]
    counts = first in range(-16, 1) and all(number == first + code for code, number in enumerate(numbers))
    return first if counts else None


def _choose_factor(numbers: tuple[float, ...], dtype: torch.dtype) -> float:
    """A power of two. Table numbers times this factor have no subnormal parts in float16, and do not overflow it."""
    largest = max(map(abs, numbers))
    return 2.0 ** (15 - math.frexp(largest)[1]) if dtype == torch.float16 and largest else 1.0


@functools.cache
def _count_parts(numbers: tuple[float, ...], factor: float, dtype: torch.dtype) -> int:
    """The count of numbers of `dtype` that add up to any number of the table times the factor.

    Three of float16 miss what is smaller than 2^-38 of the table's largest number.
    """
    rest = torch.tensor(numbers) * factor
    for count in range(1, _MAX_PARTS):
        rest -= rest.to(dtype).float()
        if not rest.any():
            return count
    return _MAX_PARTS


@triton.jit
def _add_products(
    sums,
    codes,
    x,
    table,
    COUNTS: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """sums [..., N, T] plus the numbers of codes [..., N, k] times x [..., k, T]."""
    right = x.to(DOT_DTYPE)
    if COUNTS is not None:
        # A conversion of integers would be slower.
        left = (codes.to(COUNTS[0]) | COUNTS[1]).to(DOT_DTYPE, bitcast=True) - COUNTS[2]
        return tl.dot(left, right, sums, input_precision="ieee")
    rest = tl.load(table + codes.to(tl.int32)) * FACTOR
    for _ in tl.static_range(PARTS):
        part = rest.to(x.dtype)
        sums = tl.dot(part.to(DOT_DTYPE), right, sums, input_precision="ieee")
        rest -= part.to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _coded_linear_kernel(
    x,
    codes,
    scales,
    minimums,
    table,
    bias,
    out,
    num_tokens,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COUNTS: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    # Token blocks vary fastest, so programs that read the same rows of the weight run side by side.
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    are_rows, are_tokens = rows < num_rows, tokens < num_tokens
    row_starts = codes + rows.to(tl.int64)[:, None] * (WIDTH // 2)
    token_starts = x + tokens.to(tl.int64)[:, None] * x_stride
    first_groups = rows.to(tl.int64) * (WIDTH // GROUP)
    places = tl.arange(0, BLOCK_K // 2)
    low_columns = places // _HALF * (2 * _HALF) + places % _HALF
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    # The columns of an iteration belong to one group.
    for start in range(0, WIDTH, BLOCK_K):
        pairs = tl.load(row_starts + (start // 2 + places)[None, :], mask=are_rows[:, None], other=0)
        low_places = token_starts + (start + low_columns)[None, :]
        low = tl.load(low_places, mask=are_tokens[:, None], other=0.0)
        high = tl.load(low_places + _HALF, mask=are_tokens[:, None], other=0.0)
        sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        sums = _add_products(sums, pairs & 15, tl.trans(low), table, COUNTS, FACTOR, PARTS, DOT_DTYPE)
        sums = _add_products(sums, pairs >> 4, tl.trans(high), table, COUNTS, FACTOR, PARTS, DOT_DTYPE)
        scale = tl.load(scales + first_groups + start // GROUP, mask=are_rows, other=0.0).to(tl.float32)
        acc += sums * (scale * (1 / FACTOR))[:, None]
        if HAS_MINIMUMS:
            minimum = tl.load(minimums + first_groups + start // GROUP, mask=are_rows, other=0.0).to(
                tl.float32
            )
            x_sum = tl.sum(low.to(tl.float32), axis=1) + tl.sum(high.to(tl.float32), axis=1)
            acc += minimum[:, None] * x_sum[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=are_rows, other=0.0).to(tl.float32)[:, None]
    target = out + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(target, acc, mask=are_rows[:, None] & are_tokens[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _coded_linear_groups_kernel(
    x,
    codes,
    scales,
    minimums,
    table,
    bias,
    out,
    num_tokens,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COUNTS: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Multiplies several small groups in an iteration, with sums for each of them, so that reads are wide.

    GROUP: a power of two. GROUPS: divides the number of groups.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    are_rows, are_tokens = rows < num_rows, tokens < num_tokens
    groups, places = tl.arange(0, GROUPS), tl.arange(0, GROUP // 2)
    first_groups = rows.to(tl.int64) * (WIDTH // GROUP)
    low_columns = places // _HALF * (2 * _HALF) + places % _HALF
    row_starts = codes + rows.to(tl.int64)[:, None, None] * (WIDTH // 2)
    row_places = row_starts + (groups * (GROUP // 2))[None, :, None] + places[None, None, :]
    token_starts = x + tokens.to(tl.int64)[:, None, None] * x_stride
    token_places = token_starts + (groups * GROUP)[None, :, None] + low_columns[None, None, :]
    acc = tl.zeros((GROUPS, BLOCK_N, BLOCK_T), tl.float32)
    for start in range(0, WIDTH, GROUP * GROUPS):
        pairs = tl.permute(tl.load(row_places + start // 2, mask=are_rows[:, None, None], other=0), (1, 0, 2))
        low = tl.load(token_places + start, mask=are_tokens[:, None, None], other=0.0)
        high = tl.load(token_places + start + _HALF, mask=are_tokens[:, None, None], other=0.0)
        low, high = tl.permute(low, (1, 2, 0)), tl.permute(high, (1, 2, 0))
        sums = tl.zeros((GROUPS, BLOCK_N, BLOCK_T), tl.float32)
        sums = _add_products(sums, pairs & 15, low, table, COUNTS, FACTOR, PARTS, DOT_DTYPE)
        sums = _add_products(sums, pairs >> 4, high, table, COUNTS, FACTOR, PARTS, DOT_DTYPE)
        at = first_groups[:, None] + start // GROUP + groups[None, :]
        scale = tl.trans(tl.load(scales + at, mask=are_rows[:, None], other=0.0)).to(tl.float32)
        acc += sums * (scale * (1 / FACTOR))[:, :, None]
        if HAS_MINIMUMS:
            minimum = tl.trans(tl.load(minimums + at, mask=are_rows[:, None], other=0.0)).to(tl.float32)
            x_sum = tl.sum(low.to(tl.float32), axis=1) + tl.sum(high.to(tl.float32), axis=1)
            acc += minimum[:, :, None] * x_sum[:, None, :]
    total = tl.sum(acc, axis=0)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=are_rows, other=0.0).to(tl.float32)[:, None]
    target = out + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(target, total, mask=are_rows[:, None] & are_tokens[None, :])


def _find_power(number: int) -> int:
    """The largest power of two that divides the number."""
    return number & -number


def _count_groups(num_tokens: int, weight: CodedWeight, width: int) -> int:
    """The number of groups that an iteration multiplies. width: the most columns of an iteration."""
    group, num_groups = weight.group, weight.scales.shape[1]
    if num_tokens > _DECODE.tokens or group != _find_power(group):
        return 1
    return min(max(1, width // group), _find_power(num_groups))


def bind_coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> tuple[Launch, Tensor]:
    """Binds the kernel to x [T, K], a weight [N, K], and bias [N] or None. Rows of x are contiguous.

    Returns the launch and the output that it fills, [T, N] of x's dtype.
    """
    num_tokens, (num_rows, width) = len(x), weight.shape
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    blocks = _choose_blocks(num_tokens, x.dtype)
    has_minimums, numbers = weight.minimums.numel() > 0, weight.numbers
    first, dtype = _find_first(numbers), dot_dtype(x.dtype)
    integer, bits, power = UNITS[dtype]
    factor = 1.0 if first is not None else _choose_factor(numbers, x.dtype)
    parts = 1 if first is not None else _count_parts(numbers, factor, x.dtype)
    # Numbers in parts take more registers and, on gfx942, more than its shared memory at the full width.
    num_groups = _count_groups(num_tokens, weight, blocks.width if parts == 1 else blocks.width // 2)
    by_part = {"BLOCK_K": min(blocks.width, _find_power(weight.group))}
    return Launch(
        _coded_linear_kernel if num_groups == 1 else _coded_linear_groups_kernel,
        (triton.cdiv(num_tokens, blocks.tokens), triton.cdiv(num_rows, blocks.rows)),
        {
            "x": x,
            "codes": weight.codes,
            "scales": weight.scales,
            "minimums": weight.minimums if has_minimums else weight.scales,
            "table": weight.table,
            "bias": weight.scales if bias is None else bias,
            "out": out,
            "num_tokens": num_tokens,
            "num_rows": num_rows,
            "x_stride": x.stride(0),
        },
        {
            "WIDTH": width,
            "GROUP": weight.group,
            "HAS_MINIMUMS": has_minimums,
            "HAS_BIAS": bias is not None,
            # The dtype of codes, bits to add to them, and what to subtract from the number with these bits.
            "COUNTS": None if first is None else (integer, bits, power - first),
            "FACTOR": factor,
            "PARTS": parts,
            "BLOCK_T": blocks.tokens,
            "BLOCK_N": blocks.rows,
            "DOT_DTYPE": dtype,
            **(by_part if num_groups == 1 else {"GROUPS": num_groups}),
        },
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    ), out
