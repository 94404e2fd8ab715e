"""x times a weight of 8 or 4 bits for each number, on a CPU.

Numbers of 8 bits are widened in registers, so the weight is read once, as bytes. Numbers of 4 bits are decoded into
float32, a few rows at a time, in memory that stays in the core's own cache.

Every sum is added in the order of `dots`, whatever the number of rows of x.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from slora_kernels.cpu.worker_sizes import CODE_COLUMNS, CODED_ITEM_ROWS, ITEM_ROWS, LANES
from slora_kernels.cpu.workers.dots import add_four_dots, add_one_dot
from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Float,
    Int,
    Job,
    as_row,
    compiled,
    count_items,
    intrinsic,
    read_byte_matrix,
    read_float_matrix,
    read_half_matrix,
    read_int,
    read_signed_byte_matrix,
    take_item,
    take_thread_index,
    widen,
)
from slora_kernels.cpu.workers.vectors import (
    I32,
    I64,
    IN_ORDER,
    Memory,
    look_up,
    splat,
)

# Rows of x that are multiplied with the weight's rows of an item before the next ones, in elements. 256 KiB of float32.
_TILE_ELEMENTS = 65536
_ZERO = np.float32(0.0)

# Fields of a job: x float32 [T, K], sums float32 [T, N], which are 0 at first, the weight [N, K], K and N.
X, SUMS, VALUES, WIDTH, NUM_ROWS = range(5)
# Further fields for a `CodedWeight`, whose codes are in VALUES. The scales and minimums are in HALVES and HALF_MINIMUMS
# if they are float16, else in SCALES and MINIMUMS. SCRATCH: float32, for each thread CODED_ITEM_ROWS rows.
TABLE, GROUP, SCALES, MINIMUMS, HALVES, HALF_MINIMUMS, IS_HALF, HAS_MINIMUMS, SCRATCH = range(5, 14)


def int8_worker(job: Job) -> None:
    """Multiplies x with a weight of int8. Each item of the job is a block of output columns."""
    multiply_items(job, read_signed_byte_matrix(job, VALUES))


def float8_worker(job: Job) -> None:
    """Like `int8_worker`, for float8_e4m3fn without NaN."""
    multiply_items(job, read_byte_matrix(job, VALUES))


@compiled
def multiply_items(job: Job, values: Array) -> None:
    x, sums = read_float_matrix(job, X), read_float_matrix(job, SUMS)
    width, num_rows = read_int(job, WIDTH), read_int(job, NUM_ROWS)
    numbers = as_row(values)
    item = take_item(job)
    while item < count_items(job):
        first = item * ITEM_ROWS
        multiply_block(sums[:, first:], x, numbers[first * width :], width, min(ITEM_ROWS, num_rows - first))
        item = take_item(job)


@compiled
def multiply_block(sums: Array, x: Array, numbers: Array, width: Int, num_rows: Int) -> None:
    """sums [T, :num_rows] += x [T, width] times rows of numbers."""
    tokens, step = x.shape[0], max(4, _TILE_ELEMENTS // width // 4 * 4)
    for first in range(0, tokens, step):
        last, row = min(first + step, tokens), 0
        while row + 4 <= num_rows:
            add_four_dots(sums[first:last, row:], x[first:last], numbers[row * width :], width, width)
            row += 4
        while row < num_rows:
            add_one_dot(sums[first:last, row:], x[first:last], numbers[row * width :], width, width)
            row += 1


@intrinsic
def decode_block(
    typing: Any, target: Array, codes: Array, column: Int, table: Array, scale: Float, minimum: Float
) -> Any:
    """Decodes the 32 columns from `column` on, of a row of codes, into target [column to column + 31]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        results, numbers = (Memory(context, builder, signature.args[k], args[k], I64(0)) for k in (0, 3))
        own = Memory(context, builder, codes, args[1], I64(0))
        factor, offset = splat(builder, args[4]), splat(builder, args[5])
        first = builder.udiv(args[2], I64(2))
        half = CODE_COLUMNS // 2
        for part in range(0, half, LANES):
            stored = own.load_stored(0, builder.add(first, I64(part)), LANES)
            indexes = builder.zext(stored, ir.VectorType(I32, LANES))
            for nibble in range(2):
                index = builder.lshr(indexes, ir.Constant(indexes.type, [4 * nibble] * LANES))
                number = builder.fmul(look_up(builder, numbers, index), factor, flags=IN_ORDER)
                number = builder.fadd(number, offset, flags=IN_ORDER)
                results.store(0, builder.add(args[2], I64(nibble * half + part)), number)
        return context.get_dummy_value()

    return types.void(target, codes, types.int64, table, types.float32, types.float32), emit


@compiled
def decode_row(
    target: Array, codes: Array, table: Array, scales: Array, minimums: Array, has_minimums: Int, group: Int
) -> None:
    """Decodes a row of a `CodedWeight` into target [K]."""
    for g in range(target.shape[0] // group):
        scale = widen(scales[g])
        minimum = widen(minimums[g]) if has_minimums else _ZERO
        for column in range(g * group, (g + 1) * group, CODE_COLUMNS):
            decode_block(target, codes, column, table, scale, minimum)


def coded_worker(job: Job) -> None:
    """Multiplies x with a `CodedWeight`. Each item of the job is a block of output columns."""
    x, sums = read_float_matrix(job, X), read_float_matrix(job, SUMS)
    codes, table = read_byte_matrix(job, VALUES), read_float_matrix(job, TABLE)[0]
    scales, minimums = read_float_matrix(job, SCALES), read_float_matrix(job, MINIMUMS)
    halves, half_minimums = read_half_matrix(job, HALVES), read_half_matrix(job, HALF_MINIMUMS)
    is_half, has_minimums, group = read_int(job, IS_HALF), read_int(job, HAS_MINIMUMS), read_int(job, GROUP)
    width, num_rows = read_int(job, WIDTH), read_int(job, NUM_ROWS)
    numbers = read_float_matrix(job, SCRATCH)[take_thread_index(job)]
    item = take_item(job)
    while item < count_items(job):
        first = item * CODED_ITEM_ROWS
        count = min(CODED_ITEM_ROWS, num_rows - first)
        for r in range(count):
            target, row = numbers[r * width : (r + 1) * width], first + r
            if is_half:
                decode_row(target, codes[row], table, halves[row], half_minimums[row], has_minimums, group)
            else:
                decode_row(target, codes[row], table, scales[row], minimums[row], has_minimums, group)
        multiply_block(sums[:, first:], x, numbers, width, count)
        item = take_item(job)
