"""Products with the base model's weights on a CPU with AVX-512 BF16 and without AMX, for bfloat16.

The weights are in the panels of `tile_linear`. There, 64 adjacent bytes have a pair of terms for each of 16 columns.
One instruction multiplies them with a pair of a row of x, and adds both products to the sums of the 16 columns. Every
row takes one such instruction for each pair, in order, whatever the number of rows is.

The sums of at most 12 rows and all 32 columns of a panel stay in registers from the first term to the last.
"""

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import BLOCK_ROWS, COLUMNS, LANES, PANEL_COLUMNS, TERMS
from slora_kernels.cpu.workers.intrinsics import Array, Int, Job, compiled, emit_prefetch, intrinsic
from slora_kernels.cpu.workers.tile_linear import bind_linear
from slora_kernels.cpu.workers.vectors import (
    I32,
    I64,
    IN_ORDER,
    VECTOR,
    Memory,
    join_bfloat16,
    mask_below,
    multiply_add_pairs,
    splat,
)

_PAIR_BYTES, _PAIRS = 4, TERMS // 2
_LINE_BYTES = COLUMNS * _PAIR_BYTES
_TILE_BYTES = _PAIRS * _LINE_BYTES
_BYTES, _WORDS = ir.IntType(8).as_pointer(), ir.VectorType(ir.IntType(16), 2 * LANES)
# With more pairs in the body of the loop, LLVM moves loads up so far that it has to store sums in memory.
_UNROLLED_PAIRS = 4
# Bytes between a line of a panel and the one that is prefetched. Without this, 2 rows of 2048 x 5632 took 1.8 times and
# 16 rows 1.4 times as long.
_PREFETCH_BYTES = 4096


def _emit_sums(
    builder: Any, count: int, x: Any, row_pitch: Any, step_pitch: Any, panel: Any, num_steps: Any
) -> list[list[Any]]:
    """Emits the sums of `count` rows with all columns of a panel: two vectors for each row.

    x, panel: where they begin. row_pitch, step_pitch: the distances in bytes between rows, and between their steps of
    32 terms.
    """
    rows = [builder.add(x, builder.mul(row_pitch, I64(row))) for row in range(count)]
    sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(2)] for _ in range(count)]
    for place in itertools.chain(*sums):
        builder.store(ir.Constant(VECTOR, None), place)
    with (
        cgutils.for_range(builder, num_steps) as steps,
        cgutils.for_range(builder, I64(_PAIRS // _UNROLLED_PAIRS)) as parts,
    ):
        columns = builder.mul(parts.index, I64(_UNROLLED_PAIRS * _LINE_BYTES))
        columns = builder.add(panel, builder.add(builder.mul(steps.index, I64(2 * _TILE_BYTES)), columns))
        terms = builder.mul(parts.index, I64(_UNROLLED_PAIRS * _PAIR_BYTES))
        terms = builder.add(builder.mul(steps.index, step_pitch), terms)
        own_terms = [builder.add(row, terms) for row in rows]
        totals = [list(map(builder.load, own)) for own in sums]
        for pair in range(_UNROLLED_PAIRS):
            lines = [I64(n * _TILE_BYTES + pair * _LINE_BYTES) for n in range(2)]
            weights = [_load_line(builder, builder.add(columns, line)) for line in lines]
            for own, place in zip(totals, own_terms, strict=True):
                at = builder.inttoptr(builder.add(place, I64(pair * _PAIR_BYTES)), I32.as_pointer())
                term = splat(builder, builder.load(at, align=2))
                own[:] = [
                    multiply_add_pairs(builder, term, weight, total)
                    for weight, total in zip(weights, own, strict=True)
                ]
        for total, place in zip(itertools.chain(*totals), itertools.chain(*sums), strict=True):
            builder.store(total, place)
    return [list(map(builder.load, own)) for own in sums]


def _load_line(builder: Any, line: Any) -> Any:
    following = builder.inttoptr(builder.add(line, I64(_PREFETCH_BYTES)), _BYTES)
    emit_prefetch(builder, following)
    return builder.load(builder.inttoptr(line, _WORDS.as_pointer()), align=_LINE_BYTES)


def _bind_block(*, is_ordered: bool) -> Any:
    """Makes the intrinsic that multiplies at most 12 rows with a panel. is_ordered: after `order_rows`."""

    @intrinsic
    def multiply_block(
        typing: Any, out: Array, x: Array, panel: Array, bias: Array, width: Int, column: Int, end: Int
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results = Memory(context, builder, signature.args[0], args[0])
            made, rows, weights = (
                context.make_array(kind)(context, builder, array)
                for kind, array in zip(signature.args[:3], args[:3], strict=True)
            )
            width, column, end = args[4:]
            offsets_memory = Memory(context, builder, signature.args[3], args[3], I64(0))
            num_rows, out_pitch = cgutils.unpack_tuple(builder, made.shape)
            left, steps = builder.sub(end, column), builder.udiv(width, I64(TERMS))
            offsets = []
            for first in (I64(0), I64(COLUMNS)):
                mask = mask_below(builder, builder.sub(left, first))
                offsets.append(offsets_memory.load(0, builder.add(column, first), mask))
            mask = mask_below(builder, left, PANEL_COLUMNS)
            row_pitch, step_pitch = I64(2 * TERMS), I64(2 * TERMS * BLOCK_ROWS)
            if not is_ordered:
                (row_pitch, _), step_pitch = cgutils.unpack_tuple(builder, rows.strides), I64(2 * TERMS)
            x, panel = (builder.ptrtoint(part.data, I64) for part in (rows, weights))
            for count in range(1, BLOCK_ROWS + 1):
                with builder.if_then(builder.icmp_signed("==", num_rows, I64(count))):
                    sums = _emit_sums(builder, count, x, row_pitch, step_pitch, panel, steps)
                    for row, own in enumerate(sums):
                        values = [
                            builder.fadd(value, offset, flags=IN_ORDER)
                            for value, offset in zip(own, offsets, strict=True)
                        ]
                        place = builder.add(builder.mul(out_pitch, I64(row)), column)
                        results.store_stored(0, place, join_bfloat16(builder, *values), mask)
            return context.get_dummy_value()

        numbers = (types.int64, types.int64, types.int64)
        return types.void(out, x, panel, bias, *numbers), emit

    return multiply_block


_multiply_block, _multiply_ordered_block = _bind_block(is_ordered=False), _bind_block(is_ordered=True)


@compiled
def _multiply_panel(
    out: Array, x: Array, panel: Array, bias: Array, width: Int, column: Int, end: Int
) -> None:
    """See `tile_linear.multiply_panel`."""
    start, num_rows = 0, x.shape[0]
    while start < num_rows:
        left = num_rows - start
        # 16 rows are two times 8. The last 4 of 12 and 4 would take as long as 8.
        count = min(left if left <= BLOCK_ROWS else (left + 1) // 2, BLOCK_ROWS)
        stop = start + count
        _multiply_block(out[start:stop], x[start:stop], panel, bias, width, column, end)
        start = stop


@compiled
def _multiply_ordered_panel(
    out: Array,
    blocks: Array,
    panel: Array,
    bias: Array,
    width: Int,
    column: Int,
    end: Int,
    following: Array,
) -> None:
    """See `tile_linear.multiply_tiled_panel`. The next panel in memory is prefetched, if any."""
    for start in range(0, out.shape[0], BLOCK_ROWS):
        rows = out[start : start + BLOCK_ROWS]
        _multiply_ordered_block(rows, blocks[start * width :], panel, bias, width, column, end)


_multiply_items = bind_linear(_multiply_panel, _multiply_ordered_panel)


def pair_linear_worker(job: Job) -> None:
    """See `tile_linear.linear_worker`."""
    _multiply_items(job)
