"""Paged attention on a CPU with AMX, for bfloat16. Decode and prefill take the same steps as in `attention`.

A tile register holds 16 rows of 64 bytes. One instruction adds the product of a tile of 16 x 32 and a tile of 32 x 16
bfloat16 to a tile of 16 x 16 float32. A strip is 16 rows of queries, which are the columns of the products:

    scores [keys, 16] = K [keys, D] Q^T [D, 16]        sums [D, 16] += V^T [D, keys] weights [keys, 16]

So a vector holds one number for each query of a strip, and the softmax needs no sums across a vector. The second factor
of a product has the pairs of its rows side by side: element (2k + i, n) is at place 2n + i of row k.

The instruction adds the even and the odd products of 32 separately, and then both to the sum. Every query takes these
steps, so its result does not depend on the other queries of the step. Keys that a query does not see have the weight 0.
"""

from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import (
    BLOCK_KEYS,
    TILE_ROWS,
)
from slora_kernels.cpu.workers.attention import (
    BLOCK_TABLES,
    BLOCK_TOKENS,
    GROUP,
    HEAD_DIM,
    ITEM_HEADS,
    KV_HEADS,
    LAYER_START,
    OPERANDS,
    OUT,
    PAGES,
    SCALE,
    SCRATCH,
    SIDES,
    SINKS,
    SOFTCAP,
    STARTS,
    TILES,
    WINDOW,
    Q,
    load_block,
    write_row,
)
from slora_kernels.cpu.workers.dots import transpose_vectors
from slora_kernels.cpu.workers.intrinsics import (
    INFINITY_BITS,
    Array,
    Float,
    Int,
    Job,
    as_matrix,
    as_row,
    clear,
    compiled,
    copy_converted,
    count_items,
    fill,
    from_bits,
    intrinsic,
    prefetch,
    read_float,
    read_float_matrix,
    read_int,
    read_int32_matrix,
    read_int64_matrix,
    read_model_matrix,
    read_operand_matrix,
    take_item,
    take_thread_index,
)
from slora_kernels.cpu.workers.softmax import (
    INITIAL_MAX,
    LOG2_E,
    cap_scores,
    multiply,
)
from slora_kernels.cpu.workers.vectors import (
    I32,
    I64,
    IN_ORDER,
    VECTOR,
    Memory,
    exp2_vector,
    exp2_vector_512,
    max_vector,
    multiply_add,
    multiply_add_pairs,
    shuffle,
    splat,
)

# Rows of queries in a strip, which is the number of columns of a tile of float32.
STRIP = 16
# A tile has 16 rows of 32 bfloat16.
_TILE_ROWS, _TILE_BYTES, _PAIRS = 16, 64, 16
TILE_DIMS = 2 * _PAIRS
_NUM_TILES = 8
# Tiles of keys in a block.
_KEY_TILES = BLOCK_KEYS // _TILE_ROWS
# A token's heads share strips of at most this many KV heads, whose queries fit into the scratch of a tile.
_MAX_STRIP_HEADS = 12
# The bits of MXCSR that flush results below 2^-126 to 0 and take such operands as 0.
_FLUSH_MODE = 0x8040
_MAX_STRIPS = TILE_ROWS // STRIP
# Elements of a strip's state. For each row: its kept maximum, sum of weights, whether a score was NaN or infinite,
# position, and the factor of the last step for the earlier sums.
_STATE = 5 * STRIP
_WHOLE_CONTEXT = 1 << 30
# A row keeps its maximum until a score is greater by so much. Weights are then at most 2^8, and the sums are seldom
# rescaled, which took as long as all products of a block.
_GROWTH = 8.0
# Chains of maxima that `weigh_keys` computes side by side, and twice as many as its chains of sums.
_NUM_CHAINS = 4
# The bits of 1 in bfloat16.
_ONE_BITS = 0x3F80
_ZERO, _ONE, _NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_BYTES, _WORDS, _INTS = _I8.as_pointer(), ir.VectorType(_I16, 2 * STRIP), ir.VectorType(I32, STRIP)


def call_instruction(builder: Any, name: str, kinds: list[Any], *args: Any) -> None:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
    builder.call(function, args)


def describe_tiles() -> bytearray:
    """The configuration of all tiles with 16 rows of 64 bytes. From byte 16 on, it has the bytes of a row of each tile,
    and from byte 48 on the number of rows.
    """
    config = bytearray(64)
    config[0] = 1
    for tile in range(_NUM_TILES):
        config[16 + 2 * tile], config[48 + tile] = _TILE_BYTES, _TILE_ROWS
    return config


@intrinsic
def configure_tiles(typing: Any) -> Any:
    """Gives all tiles of this thread 16 rows of 64 bytes, until `release_tiles`.

    Products of tiles take numbers below 2^-126 as 0, so all other instructions of this thread do the same meanwhile.
    Returns the mode of these instructions before.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = cgutils.alloca_once_value(builder, cgutils.make_bytearray(describe_tiles()))
        call_instruction(builder, "llvm.x86.ldtilecfg", [_BYTES], builder.bitcast(place, _BYTES))
        mode = cgutils.alloca_once(builder, I32)
        call_instruction(builder, "llvm.x86.sse.stmxcsr", [_BYTES], builder.bitcast(mode, _BYTES))
        before = builder.load(mode)
        builder.store(builder.or_(before, I32(_FLUSH_MODE)), mode)
        call_instruction(builder, "llvm.x86.sse.ldmxcsr", [_BYTES], builder.bitcast(mode, _BYTES))
        return before

    return types.int32(), emit


@intrinsic
def release_tiles(typing: Any, mode: Int) -> Any:
    """mode: what `configure_tiles` returned."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_instruction(builder, "llvm.x86.tilerelease", [])
        place = cgutils.alloca_once_value(builder, args[0])
        call_instruction(builder, "llvm.x86.sse.ldmxcsr", [_BYTES], builder.bitcast(place, _BYTES))
        return context.get_dummy_value()

    return types.void(types.int32), emit


class Tiles:
    """Emits the instructions for tiles. Addresses and pitches are in bytes."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def clear(self, tile: int) -> None:
        call_instruction(self._builder, "llvm.x86.tilezero", [_I8], _I8(tile))

    def load(self, tile: int, address: Any, pitch: Any) -> None:
        self._move("llvm.x86.tileloadd64", tile, address, pitch)

    def store(self, tile: int, address: Any, pitch: Any) -> None:
        self._move("llvm.x86.tilestored64", tile, address, pitch)

    def multiply(self, total: int, a: int, b: int) -> None:
        call_instruction(
            self._builder, "llvm.x86.tdpbf16ps", [_I8] * 3, *(_I8(tile) for tile in (total, a, b))
        )

    def _move(self, name: str, tile: int, address: Any, pitch: Any) -> None:
        pointer = self._builder.inttoptr(address, _BYTES)
        call_instruction(self._builder, name, [_I8, _BYTES, I64], _I8(tile), pointer, pitch)


def _address(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return builder.ptrtoint(context.make_array(kind)(context, builder, array).data, I64)


@intrinsic
def score_keys(typing: Any, scores: Array, keys: Array, queries: Array, size: Int, count: Int) -> Any:
    """scores [BLOCK_KEYS, 16] = keys [BLOCK_KEYS, size] times a strip's queries [size / 2, 2 * 16].

    Only the first `count` keys count; the scores of the others are any numbers.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles = Tiles(builder)
        target, first_key, first_query = (
            _address(context, builder, kind, value)
            for kind, value in zip(signature.args[:3], args[:3], strict=True)
        )
        pitch = builder.mul(args[3], I64(2))

        def compute(num_tiles: int) -> None:
            shared = num_tiles
            for tile in range(num_tiles):
                tiles.clear(tile)
            whole = builder.udiv(args[3], I64(TILE_DIMS))
            with cgutils.for_range(builder, whole) as loop:
                step = loop.index
                tiles.load(
                    shared,
                    builder.add(first_query, builder.mul(step, I64(_TILE_ROWS * _TILE_BYTES))),
                    I64(64),
                )
                column = builder.add(first_key, builder.mul(step, I64(_TILE_BYTES)))
                for tile in range(num_tiles):
                    own = shared + 1 + tile % (_NUM_TILES - shared - 1)
                    rows = builder.add(column, builder.mul(pitch, I64(tile * _TILE_ROWS)))
                    tiles.load(own, rows, pitch)
                    tiles.multiply(tile, own, shared)
            for tile in range(num_tiles):
                tiles.store(tile, builder.add(target, I64(tile * _TILE_ROWS * 64)), I64(64))

        with builder.if_else(builder.icmp_signed(">", args[4], I64(2 * _TILE_ROWS))) as (many, few):
            with many:
                compute(4)
            with few:
                compute(2)
        return context.get_dummy_value()

    return types.void(scores, keys, queries, types.int64, types.int64), emit


@intrinsic
def score_token_keys(
    typing: Any,
    scores: Array,
    numbers: Array,
    starts: Array,
    queries: Array,
    heads: Int,
    head_elements: Int,
    size: Int,
) -> Any:
    """scores [BLOCK_KEYS, 16] = keys of several heads times the queries of one token.

    numbers: all elements of the pages. starts [4]: where 16 keys of the first head begin; those of the next head begin
    `head_elements` later. queries: for each head [size / 2, 2 * 16], with 0 in the columns of the other heads. A sum
    does not change when 0 is added.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles = Tiles(builder)
        target, first_number, first_query = (
            _address(context, builder, signature.args[k], args[k]) for k in (0, 1, 3)
        )
        place = Memory(context, builder, starts, args[2], I64(0))
        pitch, steps = builder.mul(args[6], I64(2)), builder.udiv(args[6], I64(TILE_DIMS))
        first_keys = [
            builder.add(first_number, builder.mul(place.load_scalar(0, I64(k)), I64(2)))
            for k in range(_KEY_TILES)
        ]
        for tile in range(_KEY_TILES):
            tiles.clear(tile)
        with cgutils.for_range(builder, args[4]) as outer:
            own_keys = builder.mul(outer.index, builder.mul(args[5], I64(2)))
            with cgutils.for_range(builder, steps) as inner:
                number = builder.add(builder.mul(outer.index, steps), inner.index)
                queries_of = builder.add(first_query, builder.mul(number, I64(_TILE_ROWS * _TILE_BYTES)))
                tiles.load(_KEY_TILES, queries_of, I64(64))
                column = builder.add(own_keys, builder.mul(inner.index, I64(_TILE_BYTES)))
                for tile, first in enumerate(first_keys):
                    own = _KEY_TILES + 1 + tile % (_NUM_TILES - _KEY_TILES - 1)
                    tiles.load(own, builder.add(first, column), pitch)
                    tiles.multiply(tile, own, _KEY_TILES)
        for tile in range(_KEY_TILES):
            tiles.store(tile, builder.add(target, I64(tile * _TILE_ROWS * 64)), I64(64))
        return context.get_dummy_value()

    integers = (types.int64, types.int64, types.int64)
    return types.void(scores, numbers, starts, queries, *integers), emit


def _emit_token_values(rows: int, vectors: int) -> Any:
    """Builds a function that adds the values of a block of keys, times the weights of `rows` adjacent rows, to
    `vectors` vectors of the sums of these rows. It adds in the order of `add_values`.
    """

    @intrinsic
    def add_token_values(
        typing: Any,
        sums: Array,
        weights: Array,
        numbers: Array,
        starts: Array,
        row: Int,
        low: Int,
        count: Int,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            totals = Memory(context, builder, sums, args[0])
            factors = Memory(context, builder, weights, args[1], I64(0))
            values = Memory(context, builder, numbers, args[2], I64(0))
            places = Memory(context, builder, starts, args[3], I64(0))
            halves = [
                [[cgutils.alloca_once(builder, VECTOR) for _ in range(2)] for _ in range(vectors)]
                for _ in range(rows)
            ]
            nothing = ir.Constant(VECTOR, None)
            with cgutils.for_range_slice(builder, I64(0), args[6], I64(TILE_DIMS)) as (chunk, _):
                for half in (half for row in halves for column in row for half in column):
                    builder.store(nothing, half)
                begin = builder.select(builder.icmp_signed("<", chunk, args[5]), args[5], chunk)
                last = builder.add(chunk, I64(TILE_DIMS))
                last = builder.select(builder.icmp_signed("<", last, args[6]), last, args[6])
                with cgutils.for_range_slice(builder, begin, last, I64(2)) as (pair, _):
                    for parity in range(2):
                        first = places.load_scalar(0, builder.add(pair, I64(parity)))
                        found = [values.load(0, builder.add(first, I64(v * STRIP))) for v in range(vectors)]
                        for r in range(rows):
                            lane = builder.add(builder.mul(pair, I64(STRIP)), I64(2 * r + parity))
                            lane = builder.add(lane, builder.mul(args[4], I64(2)))
                            factor = splat(builder, factors.load_widened_scalar(0, lane))
                            for v, value in enumerate(found):
                                half = halves[r][v][parity]
                                builder.store(multiply_add(builder, factor, value, builder.load(half)), half)
                for r in range(rows):
                    for v in range(vectors):
                        even, odd = (builder.load(half) for half in halves[r][v])
                        both = builder.fadd(even, odd, flags=IN_ORDER)
                        column = I64(v * STRIP)
                        totals.store(r, column, builder.fadd(totals.load(r, column), both, flags=IN_ORDER))
            return context.get_dummy_value()

        integers = (types.int64, types.int64, types.int64)
        return types.void(sums, weights, numbers, starts, *integers), emit

    return add_token_values


_add_two_rows = _emit_token_values(2, 4)
_add_one_row = _emit_token_values(1, 4)
_add_two_short_rows = _emit_token_values(2, 2)
_add_one_short_row = _emit_token_values(1, 2)


@compiled
def add_token_values(
    sums: Array,
    weights: Array,
    numbers: Array,
    starts: Array,
    first_row: Int,
    num_rows: Int,
    low: Int,
    count: Int,
) -> None:
    """sums [M, D] += weights times the values of a block's keys, for `num_rows` rows that share a KV head.

    weights: see `weigh_keys`. starts: where the value of each key begins in `numbers`. low and count are even.
    """
    size = sums.shape[1]
    for column in range(0, size, 4 * STRIP):
        part, own = sums[:, column:], numbers[column:]
        is_short = column + 4 * STRIP > size
        row, end = first_row, first_row + num_rows
        while row + 1 < end:
            if is_short:
                _add_two_short_rows(part[row:], weights, own, starts, row, low, count)
            else:
                _add_two_rows(part[row:], weights, own, starts, row, low, count)
            row += 2
        if row < end:
            if is_short:
                _add_one_short_row(part[row:], weights, own, starts, row, low, count)
            else:
                _add_one_row(part[row:], weights, own, starts, row, low, count)


@intrinsic
def add_values(typing: Any, sums: Array, values: Array, weights: Array, size: Int, count: Int) -> Any:
    """sums [size, 16] += values [size, BLOCK_KEYS] times weights [BLOCK_KEYS / 2, 2 * 16] of the first `count` keys."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles = Tiles(builder)
        target, first_value, first_weight = (
            _address(context, builder, kind, value)
            for kind, value in zip(signature.args[:3], args[:3], strict=True)
        )
        pitch = I64(2 * BLOCK_KEYS)
        steps = builder.udiv(builder.add(args[4], I64(TILE_DIMS - 1)), I64(TILE_DIMS))
        with cgutils.for_range(builder, builder.udiv(args[3], I64(2 * _TILE_ROWS))) as loop:
            row = builder.mul(loop.index, I64(2 * _TILE_ROWS))
            places = [
                builder.add(target, builder.mul(builder.add(row, I64(k * _TILE_ROWS)), I64(64)))
                for k in range(2)
            ]
            for tile, place in enumerate(places):
                tiles.load(tile, place, I64(64))
            with cgutils.for_range(builder, steps) as inner:
                tiles.load(
                    2,
                    builder.add(first_weight, builder.mul(inner.index, I64(_TILE_ROWS * _TILE_BYTES))),
                    I64(64),
                )
                column = builder.add(first_value, builder.mul(inner.index, I64(_TILE_BYTES)))
                for tile in range(2):
                    own = builder.mul(builder.add(row, I64(tile * _TILE_ROWS)), pitch)
                    tiles.load(3 + tile, builder.add(column, own), pitch)
                    tiles.multiply(tile, 3 + tile, 2)
            for tile, place in enumerate(places):
                tiles.store(tile, place, I64(64))
        return context.get_dummy_value()

    return types.void(sums, values, weights, types.int64, types.int64), emit


def _emit_transpose(of_pairs: bool, words: bool) -> Any:
    """Builds a function that transposes 16 rows of 16 numbers of 32 bits: transpose(target, source, to, pitch).

    to, pitch: distances of the rows of target and source, in elements. words: whether elements have 16 bits, so that a
    number is a pair of them. of_pairs: whether a pair has one element of each of two rows of the source, which thus has
    32 rows.
    """

    @intrinsic
    def transpose(typing: Any, target: Array, source: Array, to: Int, pitch: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results = Memory(context, builder, target, args[0], args[2])
            rows = Memory(context, builder, source, args[1], args[3])
            if of_pairs:
                order = [place for k in range(STRIP) for place in (k, k + STRIP)]
                found = [
                    builder.bitcast(
                        shuffle(
                            builder,
                            rows.load_stored(2 * row, I64(0), STRIP),
                            rows.load_stored(2 * row + 1, I64(0), STRIP),
                            order,
                        ),
                        _INTS,
                    )
                    for row in range(STRIP)
                ]
            else:
                lanes = 2 * STRIP if words else STRIP
                found = [builder.bitcast(rows.load_stored(row, I64(0), lanes), _INTS) for row in range(STRIP)]
            kind = _WORDS if words else VECTOR
            for row, vector in enumerate(transpose_vectors(builder, found)):
                results.store_stored(row, I64(0), builder.bitcast(vector, kind))
            return context.get_dummy_value()

        return types.void(target, source, types.int64, types.int64), emit

    return transpose


transpose_words = _emit_transpose(False, True)
transpose_pairs = _emit_transpose(True, True)
transpose_floats = _emit_transpose(False, False)


def _emit_weigh_keys(*, is_whole: bool) -> Any:
    """Builds `weigh_keys`. is_whole: whether all rows see all keys of the block."""

    @intrinsic
    def weigh(
        typing: Any,
        weights: Array,
        state: Array,
        scores: Array,
        key: Int,
        window: Int,
        factor: Float,
        low: Int,
        count: Int,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, kept, source = (
                Memory(context, builder, kind, value, I64(0))
                for kind, value in zip(signature.args[:3], args[:3], strict=True)
            )
            places = [I64(k * STRIP) for k in range(5)]
            low, count = (I64(0), I64(BLOCK_KEYS)) if is_whole else (args[6], args[7])
            position = builder.load(kept.pointer(0, places[3], _INTS), align=4)
            number_of_first = splat(builder, builder.trunc(args[3], I32))
            end = builder.add(builder.sub(position, number_of_first), ir.Constant(_INTS, [1] * STRIP))
            first = builder.sub(end, splat(builder, builder.trunc(args[4], I32)))
            factor_of = splat(builder, args[5])
            lowest, nothing, ones, minus_infinity = (
                ir.Constant(VECTOR, [number] * STRIP) for number in (float(INITIAL_MAX), 0.0, 1.0, -np.inf)
            )

            def if_visible(key: Any, value: Any, otherwise: Any) -> Any:
                if is_whole:
                    return value
                number = splat(builder, builder.trunc(key, I32))
                sees = builder.and_(
                    builder.icmp_signed("<", number, end), builder.icmp_signed(">=", number, first)
                )
                # The chains go on to the next multiple of their number.
                exists = splat(builder, builder.icmp_signed("<", key, count))
                return builder.select(builder.and_(sees, exists), value, otherwise)

            def min_vector(a: Any, b: Any) -> Any:
                return builder.select(builder.fcmp_ordered("<", a, b), a, b)

            before = kept.load(0, places[0])
            # Chain i has every fourth key, or every second pair of keys, from i on. A single one would be slower.
            starting = builder.and_(low, I64(-_NUM_CHAINS))
            peaks = [cgutils.alloca_once_value(builder, lowest) for _ in range(_NUM_CHAINS)]
            least = [cgutils.alloca_once_value(builder, nothing) for _ in range(_NUM_CHAINS)]
            with cgutils.for_range_slice(builder, starting, count, I64(_NUM_CHAINS)) as (start, _):
                for chain, (peak, low_peak) in enumerate(zip(peaks, least, strict=True)):
                    number = builder.add(start, I64(chain))
                    score = if_visible(number, source.load(0, builder.mul(number, I64(STRIP))), lowest)
                    builder.store(min_vector(builder.load(low_peak), score), low_peak)
                    builder.store(max_vector(builder, builder.load(peak), score), peak)
            highest = reduce(partial(max_vector, builder), map(builder.load, peaks))
            sees_any = builder.fcmp_ordered(">", highest, lowest)
            highest = builder.fmul(highest, factor_of, flags=IN_ORDER)
            limit = builder.fadd(before, ir.Constant(VECTOR, [_GROWTH] * STRIP), flags=IN_ORDER)
            is_greater = builder.and_(sees_any, builder.fcmp_ordered(">", highest, limit))
            now = builder.select(is_greater, highest, before)
            below = builder.fneg(now)
            totals = [cgutils.alloca_once_value(builder, nothing) for _ in range(_NUM_CHAINS // 2)]
            order = [place for k in range(STRIP) for place in (k, k + STRIP)]
            units = ir.Constant(_WORDS, [_ONE_BITS] * 2 * STRIP)
            with cgutils.for_range_slice(builder, starting, count, I64(_NUM_CHAINS)) as (start, _):
                for chain, total in enumerate(totals):
                    pair = builder.add(start, I64(2 * chain))
                    halves = []
                    for k in range(2):
                        number = builder.add(pair, I64(k))
                        score = source.load(0, builder.mul(number, I64(STRIP)))
                        weight = exp2_vector_512(builder, multiply_add(builder, score, factor_of, below))
                        # A row that sees no key of this block has the lowest maximum, too.
                        halves.append(target.narrow(if_visible(number, weight, nothing)))
                    both = shuffle(builder, halves[0], halves[1], order)
                    target.store_stored(0, builder.mul(pair, I64(STRIP)), both)
                    builder.store(multiply_add_pairs(builder, both, units, builder.load(total)), total)
            total = builder.fadd(*map(builder.load, totals), flags=IN_ORDER)
            # The products read whole tiles of keys.
            end_of_chains = builder.and_(builder.add(count, I64(_NUM_CHAINS - 1)), I64(-_NUM_CHAINS))
            for begin, stop in ((I64(0), starting), (end_of_chains, I64(BLOCK_KEYS))):
                with cgutils.for_range_slice(builder, begin, stop, I64(2)) as (pair, _):
                    zeros = ir.Constant(_WORDS, [0] * 2 * STRIP)
                    target.store_stored(0, builder.mul(pair, I64(STRIP)), zeros)
            decay = exp2_vector(builder, builder.fsub(before, now, flags=IN_ORDER))
            earlier = builder.fmul(kept.load(0, places[1]), decay, flags=IN_ORDER)
            kept.store(0, places[0], now)
            kept.store(0, places[1], builder.fadd(earlier, total, flags=IN_ORDER))
            # A score of NaN or infinity makes the sum of weights NaN, but one of minus infinity has the weight 0.
            bits = builder.and_(builder.bitcast(total, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * STRIP))
            infinite = ir.Constant(_INTS, [INFINITY_BITS] * STRIP)
            lowest_seen = reduce(min_vector, map(builder.load, least))
            is_bad = builder.or_(
                builder.icmp_unsigned(">=", bits, infinite),
                builder.fcmp_ordered("==", lowest_seen, minus_infinity),
            )
            kept.store(0, places[2], builder.select(is_bad, ones, kept.load(0, places[2])))
            kept.store(0, places[4], decay)
            changes = builder.bitcast(builder.fcmp_unordered("!=", decay, ones), ir.IntType(STRIP))
            return builder.icmp_unsigned("!=", changes, ir.IntType(STRIP)(0))

        numbers = (types.int64, types.int64, types.float32, types.int64, types.int64)
        return types.boolean(weights, state, scores, *numbers), emit

    return weigh


_weigh_whole_block = _emit_weigh_keys(is_whole=True)
_weigh_block = _emit_weigh_keys(is_whole=False)


@compiled
def weigh_keys(
    weights: Array,
    state: Array,
    scores: Array,
    key: Int,
    window: Int,
    factor: Float,
    first: Int,
    last: Int,
    low: Int,
    count: Int,
) -> Any:
    """One step of the online softmax of a strip. Turns the scores of a block into weights [BLOCK_KEYS / 2, 2 * 16].
    Returns whether the earlier sums of any row must be rescaled. The weight of a key that a row does not see is 0.

    state: see `_STATE`. key: position of the block's first key. first, last: positions of the first and the last row.
    low, count: the rows see only keys from `low`, which is even, to `count - 1`.
    """
    if last - window < key and key + BLOCK_KEYS <= first + 1:
        return _weigh_whole_block(weights, state, scores, key, window, factor, low, count)
    return _weigh_block(weights, state, scores, key, window, factor, low, count)


@compiled
def rescale_columns(sums: Array, state: Array) -> None:
    """Multiplies the sums [D, 16] of a strip by the factors of its last step."""
    for start in range(0, sums.shape[0], STRIP):
        for k in range(STRIP):
            sums[start + k] *= state[4 * STRIP + k]


@compiled
def load_queries(
    queries: Array, rows: Array, q: Array, first_head: Int, group: Int, first_row: Int, num_rows: Int
) -> None:
    """Fills queries [D / 2, 2 * 16] with a strip of q [tokens, heads * D]. Row m is head `first_head + m % group` of
    the token m // group. Rows from `num_rows` on are 0. rows: scratch [16, D].
    """
    size = rows.shape[1]
    for k in range(STRIP):
        m = first_row + k
        if m < num_rows:
            start = (first_head + m % group) * size
            copy_converted(rows[k], q[m // group, start : start + size])
        else:
            clear(rows[k])
    flat = as_row(rows)
    for column in range(0, size, TILE_DIMS):
        transpose_words(queries[column * STRIP :], flat[column:], TILE_DIMS, size)


@compiled
def load_token_queries(
    queries: Array, rows: Array, q: Array, first_head: Int, group: Int, heads: Int
) -> None:
    """Fills queries [heads, D / 2, 2 * 16] with the queries of one token, q [heads * D]: those of KV head h are in the
    columns from h * group on. rows: scratch [16, D].
    """
    size = rows.shape[1]
    flat = as_row(rows)
    clear(flat)
    for head in range(heads):
        for k in range(head * group, (head + 1) * group):
            start = (first_head * group + k) * size
            copy_converted(rows[k], q[start : start + size])
        for column in range(0, size, TILE_DIMS):
            transpose_words(queries[(head * size + column) * STRIP :], flat[column:], TILE_DIMS, size)
        clear(flat[head * group * size : (head + 1) * group * size])


@compiled
def start_rows(state: Array, before: Int, group: Int, first_row: Int, num_rows: Int, sinks: Array) -> None:
    """Initialises the state of a strip. Row m belongs to the token at position `before + m // group`, and has the sink
    `m % group`.
    """
    for k in range(STRIP):
        m = first_row + k
        state[k], state[STRIP + k], state[2 * STRIP + k] = sinks[m % group] * LOG2_E, _ONE, _ZERO
        # A row without a query sees nothing.
        position = before + m // group if m < num_rows else -1
        state[3 * STRIP + k] = from_bits(np.int32(position))


@compiled
def attend_token_strip(
    sums: Array,
    state: Array,
    scores: Array,
    queries: Array,
    weights: Array,
    starts: Array,
    pages: Array,
    table: Array,
    position: Int,
    heads: Int,
    group: Int,
    factor: Float,
    window: Int,
    cap: Float,
    block_tokens: Int,
    start: Int,
    side: Int,
) -> None:
    """Computes attention of one token for several KV heads, whose `group` queries each are the rows of one strip.

    The arguments are those of `attention.attend_token`. Keys and values are read from the pages. A tile of keys lies in
    one page, so `block_tokens` is a multiple of 16. starts: scratch for BLOCK_KEYS + 4 places.
    """
    size, numbers = sums.shape[1], as_row(pages)
    head_elements, key_starts = block_tokens * size, starts[BLOCK_KEYS:]
    first, visible = max(0, position + 1 - window), position + 1
    for key in range(first - first % BLOCK_KEYS, visible, BLOCK_KEYS):
        end, low = min(key + BLOCK_KEYS, visible), max(key, first) - key
        for tile in range(_KEY_TILES):
            # Tiles without a visible key repeat another one. Their scores are not used.
            at = min(max(key + tile * _TILE_ROWS, key + low - low % _TILE_ROWS), visible - 1)
            at -= at % _TILE_ROWS
            page = table[at // block_tokens]
            key_starts[tile] = page * pages.shape[1] + start + at % block_tokens * size
            prefetch(pages[page, start + side : start + side + heads * head_elements])
        if end < visible:
            ahead = pages[table[end // block_tokens]]
            prefetch(ahead[start : start + heads * head_elements])
        even_low, even_count = low & -2, (end - key + 1) & -2
        for k in range(even_low, even_count):
            # A key that is not visible repeats another one and has the weight 0.
            at = key + min(max(k, low), end - key - 1)
            place = table[at // block_tokens] * pages.shape[1] + at % block_tokens * size
            starts[k] = place + start + side
        score_token_keys(scores, numbers, key_starts, queries, heads, head_elements, size)
        scaling = factor
        if cap > _ZERO:
            multiply(scores, factor)
            cap_scores(scores, cap)
            scaling = _ONE
        if weigh_keys(weights, state, scores, key, window, scaling, position, position, even_low, end - key):
            for m in range(heads * group):
                multiply(sums[m], state[4 * STRIP + m])
        for head in range(heads):
            own = numbers[head * head_elements :]
            add_token_values(sums, weights, own, starts, head * group, group, even_low, even_count)


@compiled
def attend_strips(
    sums: Array,
    state: Array,
    scores: Array,
    queries: Array,
    blocks: Array,
    pages: Array,
    table: Array,
    before: Int,
    num_rows: Int,
    group: Int,
    size: Int,
    factor: Float,
    window: Int,
    cap: Float,
    block_tokens: Int,
    start: Int,
    side: Int,
) -> None:
    """Computes attention of one KV head for the strips of a tile. Updates sums and state.

    The arguments are those of `attention.attend_tile`. blocks: scratch for a block of K, V, V transposed, and weights.
    """
    block = BLOCK_KEYS * size
    keys, flat_keys = as_matrix(blocks[:block], size), blocks[:block]
    values = blocks[block : 2 * block]
    weights = blocks[2 * block : 2 * block + BLOCK_KEYS * STRIP]
    first, visible = max(0, before + 1 - window), before + (num_rows - 1) // group + 1
    for key in range(first - first % BLOCK_KEYS, visible, BLOCK_KEYS):
        count, low = min(BLOCK_KEYS, visible - key), max(key, first) - key
        # V comes first, because its copy is needed no more once it is transposed.
        clear(flat_keys[: low * size])
        load_block(keys[low:count], pages, table, key + low, block_tokens, start + side)
        clear(flat_keys[count * size :])
        for half in range(0, count, TILE_DIMS):
            for column in range(0, size, STRIP):
                transpose_pairs(
                    values[column * BLOCK_KEYS + half :], flat_keys[half * size + column :], BLOCK_KEYS, size
                )
        load_block(keys[low:count], pages, table, key + low, block_tokens, start)
        for strip in range((num_rows + STRIP - 1) // STRIP):
            last_row = min(num_rows, (strip + 1) * STRIP) - 1
            seen = min(count, before + last_row // group + 1 - key)
            if seen > 0:
                own = sums[strip * STRIP * size : (strip + 1) * STRIP * size]
                mine = state[strip * _STATE : (strip + 1) * _STATE]
                score_keys(scores, flat_keys, queries[strip * STRIP * size :], size, seen)
                scaling = factor
                if cap > _ZERO:
                    multiply(scores[: seen * STRIP], factor)
                    cap_scores(scores[: seen * STRIP], cap)
                    scaling = _ONE
                first_position = before + strip * STRIP // group
                last_position = before + last_row // group
                if weigh_keys(
                    weights,
                    mine,
                    scores,
                    key,
                    window,
                    scaling,
                    first_position,
                    last_position,
                    low & -2,
                    seen,
                ):
                    rescale_columns(own, mine)
                add_values(own, values, weights, size, seen)


def attend_tiles_worker(job: Job) -> None:
    """Like `attention.attend_worker`, for bfloat16 and a head dimension that is a multiple of `TILE_DIMS`."""
    mode = configure_tiles()
    attend_tile_items(job)
    release_tiles(mode)


@compiled
def attend_tile_items(job: Job) -> None:
    q, out, pages = read_model_matrix(job, Q), read_model_matrix(job, OUT), read_model_matrix(job, PAGES)
    tiles, block_tables = read_int32_matrix(job, TILES), read_int32_matrix(job, BLOCK_TABLES)
    kv_heads, group, size = read_int(job, KV_HEADS), read_int(job, GROUP), read_int(job, HEAD_DIM)
    block_tokens, factor = read_int(job, BLOCK_TOKENS), read_float(job, SCALE) * LOG2_E
    window, cap = min(read_int(job, WINDOW), _WHOLE_CONTEXT), read_float(job, SOFTCAP) * LOG2_E
    item_heads, sinks = read_int(job, ITEM_HEADS), read_float_matrix(job, SINKS)[0]
    head_elements = block_tokens * size if read_int(job, SIDES) > 1 else 0
    side = kv_heads * head_elements
    worker = take_thread_index(job)
    scratch, operands = read_float_matrix(job, SCRATCH)[worker], read_operand_matrix(job, OPERANDS)[worker]
    sums = scratch[: TILE_ROWS * size]
    scores = scratch[TILE_ROWS * size : TILE_ROWS * size + BLOCK_KEYS * STRIP]
    rest = scratch[TILE_ROWS * size + BLOCK_KEYS * STRIP :]
    finished, state = rest[: STRIP * size], rest[STRIP * size : STRIP * size + _MAX_STRIPS * _STATE]
    results = as_matrix(finished, size)
    starts = read_int64_matrix(job, STARTS)[worker]
    queries, blocks = operands[: TILE_ROWS * size], operands[TILE_ROWS * size :]
    query_rows = as_matrix(blocks[: STRIP * size], size)
    item = take_item(job)
    while item < count_items(job):
        tile, head = item * item_heads // kv_heads, item * item_heads % kv_heads
        b, first, tokens, before = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        num_rows, own_q = tokens * group, q[first : first + tokens]
        num_strips = (num_rows + STRIP - 1) // STRIP
        strip_heads = min(_MAX_STRIP_HEADS, STRIP // group)
        is_token = tokens == 1 and strip_heads > 0 and block_tokens % _TILE_ROWS == 0
        for h in range(head, head + item_heads, strip_heads if is_token else 1):
            if is_token:
                heads = min(strip_heads, head + item_heads - h)
                load_token_queries(queries, query_rows, own_q[0], h, group, heads)
                start_rows(state[:_STATE], before, heads * group, 0, heads * group, sinks[h * group :])
                clear(finished)
                attend_token_strip(
                    results,
                    state[:_STATE],
                    scores,
                    queries,
                    blocks,
                    starts,
                    pages,
                    block_tables[b],
                    before,
                    heads,
                    group,
                    factor,
                    window,
                    cap,
                    block_tokens,
                    read_int(job, LAYER_START) + h * head_elements,
                    side,
                )
                for k in range(heads * group):
                    at = (h * group + k) * size
                    write_result(out[first, at : at + size], results[k], state, k)
                continue
            for strip in range(num_strips):
                load_queries(
                    queries[strip * STRIP * size : (strip + 1) * STRIP * size],
                    query_rows,
                    own_q,
                    h * group,
                    group,
                    strip * STRIP,
                    num_rows,
                )
                own = state[strip * _STATE : (strip + 1) * _STATE]
                start_rows(own, before, group, strip * STRIP, num_rows, sinks[h * group :])
            clear(sums[: num_strips * STRIP * size])
            attend_strips(
                sums,
                state,
                scores,
                queries,
                blocks,
                pages,
                block_tables[b],
                before,
                num_rows,
                group,
                size,
                factor,
                window,
                cap,
                block_tokens,
                read_int(job, LAYER_START) + h * head_elements,
                side,
            )
            for strip in range(num_strips):
                own = sums[strip * STRIP * size : (strip + 1) * STRIP * size]
                for column in range(0, size, STRIP):
                    transpose_floats(finished[column:], own[column * STRIP :], size, STRIP)
                for k in range(min(STRIP, num_rows - strip * STRIP)):
                    m = strip * STRIP + k
                    at = (h * group + m % group) * size
                    write_result(
                        out[first + m // group, at : at + size], results[k], state[strip * _STATE :], k
                    )
        item = take_item(job)


@compiled
def write_result(out: Array, sums: Array, state: Array, row: Int) -> None:
    if state[2 * STRIP + row] > _ZERO:
        fill(out, _NAN)
    else:
        write_row(out, sums, _ONE / state[STRIP + row])
