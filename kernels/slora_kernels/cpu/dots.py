"""Dot products of a few tokens with a few rows of weights at a time."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.intrinsics import Array, Int, intrinsic
from slora_kernels.cpu.vectors import (
    F32,
    HAS_BFLOAT16_DOT,
    I64,
    IN_ORDER,
    LANES,
    VECTOR,
    Memory,
    access_operands,
    dispatch_by_tokens,
    mask_below,
    multiply_add,
    multiply_add_pairs,
    shuffle,
    sum_lanes,
)


def _emit_dots(tokens: int, rows: int) -> Callable[..., None]:
    """Builds the block (see `vectors`) that computes sums [tokens, rows] += x [tokens, count] times rows of weights."""

    @intrinsic
    def dots(typing: Any, sums: Array, x: Array, weights: Array, pitch: Int, count: Int) -> Any:
        in_pairs = HAS_BFLOAT16_DOT and x.dtype == weights.dtype == types.uint16
        lanes, multiply = (2 * LANES, multiply_add_pairs) if in_pairs else (LANES, multiply_add)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, tokens_of, rows_of = access_operands(context, builder, signature, args)
            next_rows = builder.mul(args[3], I64(rows))
            totals = {
                (t, r): cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None))
                for t in range(tokens)
                for r in range(rows)
            }

            def load(memory: Memory, row: int, column: Any, mask: Any) -> Any:
                return (
                    memory.load_stored(row, column, lanes, mask)
                    if in_pairs
                    else memory.load(row, column, mask)
                )

            def step(column: Any, mask: Any = None) -> None:
                for r in range(rows):
                    rows_of.prefetch(r, builder.add(column, next_rows))
                numbers = [load(tokens_of, t, column, mask) for t in range(tokens)]
                for r in range(rows):
                    weight = load(rows_of, r, column, mask)
                    for t in range(tokens):
                        total = totals[t, r]
                        builder.store(multiply(builder, numbers[t], weight, builder.load(total)), total)

            whole = builder.and_(args[4], I64(-lanes))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(lanes)) as (column, _):
                step(column)
            left = builder.sub(args[4], whole)
            with cgutils.if_unlikely(builder, builder.icmp_signed(">", left, I64(0))):
                step(whole, mask_below(builder, left, lanes))
            found = sum_lanes(builder, [builder.load(total) for total in totals.values()])
            row = ir.VectorType(F32, rows)
            for t in range(tokens):
                place = target.pointer(t, I64(0), row)
                mine = shuffle(builder, found, found, list(range(t * rows, (t + 1) * rows)))
                total = builder.fadd(builder.load(place, align=4), mine, flags=IN_ORDER)
                builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(sums, x, weights, types.int64, types.int64), emit

    return dots


# add_four_dots adds the products of x [t, count] and four rows of weights to sums [t, 4]. The first row begins at
# `weights`, and rows are `pitch` elements apart. add_one_dot does the same for one row.
add_four_dots = dispatch_by_tokens(lambda tokens: _emit_dots(tokens, 4))
add_one_dot = dispatch_by_tokens(lambda tokens: _emit_dots(tokens, 1))
