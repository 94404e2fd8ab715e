"""Dot products of a few tokens with a few rows of weights at a time."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import (
    HAS_BFLOAT16_DOT,
    LANES,
)
from slora_kernels.cpu.workers.intrinsics import Array, Int, intrinsic
from slora_kernels.cpu.workers.vectors import (
    F32,
    I32,
    I64,
    IN_ORDER,
    VECTOR,
    Memory,
    access_operands,
    dispatch_by_tokens,
    mask_below,
    multiply_add,
    multiply_add_pairs,
    shuffle,
    splat,
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


def transpose_vectors(builder: Any, vectors: list[Any]) -> list[Any]:
    """Transposes n vectors of n lanes: lane i of vector k becomes lane k of vector i. n is a power of two.

    If the vectors have more lanes, each group of n lanes is transposed separately.
    """
    distance = 1
    while distance < len(vectors):
        moved = list(vectors)
        for k in range(len(vectors)):
            if k & distance == 0:
                a, b = vectors[k], vectors[k + distance]
                lanes = range(a.type.count)
                low = [lane if lane & distance == 0 else lane - distance + len(lanes) for lane in lanes]
                high = [lane + distance if lane & distance == 0 else lane + len(lanes) for lane in lanes]
                moved[k], moved[k + distance] = shuffle(builder, a, b, low), shuffle(builder, a, b, high)
        vectors, distance = moved, 2 * distance
    return vectors


def _emit_key_dots(tokens: int) -> Callable[..., None]:
    """Builds the block (see `vectors`) that computes sums [tokens, n] = x [tokens, count] times n rows, n <= LANES.

    A lane of a vector holds the sum of one row. The products of a row are added one after the other, as in
    `weighted_sums`, and not lane by lane as in `dots`. `count` is a multiple of LANES.
    """

    @intrinsic
    def key_dots(typing: Any, sums: Array, x: Array, rows: Array, pitch: Int, count: Int, n: Int) -> Any:
        in_pairs = HAS_BFLOAT16_DOT and x.dtype == rows.dtype == types.uint16

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, tokens_of, _ = access_operands(context, builder, signature, args)
            last = builder.sub(args[5], I64(1))
            # Rows past the last one repeat it. Their sums are not stored.
            readers = [
                Memory(
                    context,
                    builder,
                    rows,
                    args[2],
                    builder.mul(
                        args[3],
                        builder.select(builder.icmp_signed("<", I64(k), last), I64(k), last),
                    ),
                )
                for k in range(LANES)
            ]
            totals = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for _ in range(tokens)]

            def add(column: Any, weight: Any) -> None:
                for t in range(tokens):
                    if in_pairs:
                        factor = splat(builder, builder.load(tokens_of.pointer(t, column, I32), align=2))
                        multiplied = multiply_add_pairs
                    else:
                        factor = splat(builder, tokens_of.load_widened_scalar(t, column))
                        multiplied = multiply_add
                    builder.store(multiplied(builder, factor, weight, builder.load(totals[t])), totals[t])

            with cgutils.for_range_slice(builder, I64(0), args[4], I64(LANES)) as (column, _):
                if rows.dtype == types.uint16:
                    # The two elements of a 32-bit word stay together.
                    half = LANES // 2
                    words = [
                        builder.bitcast(reader.load_stored(1, column, LANES), ir.VectorType(I32, half))
                        for reader in readers
                    ]
                    joined = [
                        shuffle(builder, a, b, list(range(LANES)))
                        for a, b in zip(words[:half], words[half:], strict=True)
                    ]
                    for k, word in enumerate(transpose_vectors(builder, joined)):
                        first = builder.add(column, I64(2 * k))
                        if in_pairs:
                            add(first, word)
                            continue
                        shift = ir.Constant(word.type, [16] * LANES)
                        upper = ir.Constant(word.type, [0xFFFF0000] * LANES)
                        add(first, builder.bitcast(builder.shl(word, shift), VECTOR))
                        add(
                            builder.add(first, I64(1)),
                            builder.bitcast(builder.and_(word, upper), VECTOR),
                        )
                else:
                    found = [reader.load(1, column) for reader in readers]
                    for k, weight in enumerate(transpose_vectors(builder, found)):
                        add(builder.add(column, I64(k)), weight)
            mask = mask_below(builder, args[5])
            for t in range(tokens):
                target.store(t, I64(0), builder.load(totals[t]), mask)
            return context.get_dummy_value()

        return types.void(sums, x, rows, types.int64, types.int64, types.int64), emit

    return key_dots


# dot_keys computes sums [t, n] = x [t, count] times n rows that are `pitch` elements apart.
dot_keys = dispatch_by_tokens(_emit_key_dots)

# add_four_dots adds the products of x [t, count] and four rows of weights to sums [t, 4]. The first row begins at
# `weights`, and rows are `pitch` elements apart. add_one_dot does the same for one row.
add_four_dots = dispatch_by_tokens(lambda tokens: _emit_dots(tokens, 4))
add_one_dot = dispatch_by_tokens(lambda tokens: _emit_dots(tokens, 1))
