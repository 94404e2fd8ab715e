"""LoRA shrink and expand on a CPU with AMX, for bfloat16. Jobs and items are those of `lora`.

All sums of a token are products of tiles (see `tile_attention`), 32 terms at a time and in order:

    sums [tokens, rank] = x [tokens, in] A^T [in, rank]        sums [tokens, out] = shrunk [tokens, rank] B [rank, out]

The second factors are packed into scratch, with the pairs of their rows side by side. The first factors are read where
they are. For a few tokens, packing A would take longer than multiplying it. So A is the first factor then, and each
token a second factor of one column, which needs no packing. Packing B would take longer, too, so vectors add its rows.
The order of the sums is the same in all cases, so the bits of a token's row do not depend on the number of tokens.
"""

import itertools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import (
    LANES,
    NUM_SUMS,
    PACKED_COLUMNS,
    PACKED_PITCH,
    ROWS,
    SUM_COLUMNS,
    SUM_ROWS,
    TAIL_COLUMNS,
    TERMS,
    TILE_TOKENS,
)
from slora_kernels.cpu.workers.intrinsics import (
    FIRST_CACHE,
    Array,
    Float,
    Int,
    Job,
    as_matrix,
    as_row,
    await_count,
    clear,
    compiled,
    count_between,
    count_items,
    emit_prefetch,
    increment_count,
    intrinsic,
    read_float_matrix,
    read_int,
    read_int32_matrix,
    read_int64_matrix,
    read_model_matrix,
    take_item,
    take_thread_index,
)
from slora_kernels.cpu.workers.lora import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMN_BLOCKS,
    COUNT_BEFORE,
    DONE,
    FIRST_MODULE,
    GROUP,
    GROUPS,
    IS_WHOLE,
    MODULES,
    NUM_SHRINK_ITEMS,
    OUT,
    PACKED,
    PAGE_TABLE,
    PAGES,
    PREFETCH_ELEMENTS,
    SCALES,
    SEGMENT_SIZE,
    SHRUNK,
    STARTS,
    SUMS,
    TILES,
    WEIGHTS,
    WIDTH,
    WIDTHS,
    X,
    copy_narrowed,
    find_rows,
    find_segment,
    pack_row,
    split_item,
)
from slora_kernels.cpu.workers.tile_attention import (
    Tiles,
    call_instruction,
    configure_tiles,
    describe_tiles,
    release_tiles,
    transpose_words,
)
from slora_kernels.cpu.workers.vectors import (
    I32,
    I64,
    IN_ORDER,
    VECTOR,
    Memory,
    join_bfloat16,
    mask_below,
    multiply_add,
    shuffle,
    splat,
)

_TILE_ELEMENTS = ROWS * TERMS
_MAX_STRIPS = 4
# Up to this many tokens, A is the first factor.
FEW_TOKENS, PART_TOKENS = 4, 2
# Elements of A that are packed before they are multiplied: columns of one tile of rows, or half as many of two.
_SHRINK_ELEMENTS = 512 * ROWS
# A is prefetched this many tiles before it is read.
_PREFETCH_TILES = 8
# Tiles: sums of four strips, of which the last may have fewer rows; the second factor; rows of the first factor.
_LAST_SUMS, _SHARED, _STRIPS, _LAST_STRIP = 3, 4, (5, 6), 7
# The same for two strips and two second factors.
_PAIR_SUMS, _SECOND, _PAIR = ((0, 1), (2, 3)), (4, 5), (6, 7)
_I8 = ir.IntType(8)
_BYTES = _I8.as_pointer()


def _emit_shapes(first: tuple[int, ...], second: tuple[int, ...], narrow: tuple[int, ...]) -> Any:
    """Builds a function that configures the tiles. Those in `first` and `second` get as many rows as its two arguments
    say, and those in `narrow` get rows of four bytes. All others have 16 rows of 64 bytes.
    """

    @intrinsic
    def shape_tiles(typing: Any, num_first: Int, num_second: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            config = describe_tiles()
            for tile in narrow:
                config[16 + 2 * tile] = 4
            place = cgutils.alloca_once_value(builder, cgutils.make_bytearray(config))
            pointer = builder.bitcast(place, _BYTES)
            for group, rows in zip((first, second), args, strict=True):
                for tile in group:
                    builder.store(builder.trunc(rows, _I8), builder.gep(pointer, [I32(48 + tile)]))
            call_instruction(builder, "llvm.x86.ldtilecfg", [_BYTES], pointer)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return shape_tiles


_shape_strips = _emit_shapes((_LAST_SUMS, _LAST_STRIP), (), ())
_shape_pairs = _emit_shapes((*_PAIR_SUMS[1], _PAIR[1]), (), ())
_shape_rows = _emit_shapes((0, 1, 2, 3, 4), (), (0, 1, 2, 3, 5, 6, 7))
_shape_parts = _emit_shapes((0, 1, 4), (2, 3, 5), (0, 1, 2, 3, 6, 7))


def _find(context: Any, builder: Any, kind: Any, array: Any) -> tuple[Any, Any, Any]:
    """Returns the address of an array, the bytes between its rows, and the number of its rows."""
    made = context.make_array(kind)(context, builder, array)
    rows, *_ = cgutils.unpack_tuple(builder, made.shape)
    pitch, *_ = cgutils.unpack_tuple(builder, made.strides)
    return builder.ptrtoint(made.data, I64), pitch, rows


def _for_each_count(builder: Any, count: Any, numbers: range, compute: Callable[[int], None]) -> None:
    """Runs compute(n) for the n in `numbers` that equals `count`."""
    for n in numbers:
        with builder.if_then(builder.icmp_signed("==", count, I64(n))):
            compute(n)


@intrinsic
def multiply_strips(
    typing: Any, sums: Array, first: Array, second: Array, distance: Int, steps: Int, adds: bool
) -> Any:
    """sums [t, 16] = first [t, 32 * steps] times tiles of second factors, added to `sums` if `adds`.

    distance: elements between the tiles of `second`. `_shape_strips` was called with the rows of the last strip.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles = Tiles(builder)
        target, target_pitch, num_rows = _find(context, builder, sums, args[0])
        rows, pitch, _ = _find(context, builder, first, args[1])
        columns, *_ = _find(context, builder, second, args[2])
        step_bytes = builder.mul(args[3], I64(2))

        def compute(full: int) -> None:
            strips = [*(((s, _STRIPS[s % 2], s)) for s in range(full)), (_LAST_SUMS, _LAST_STRIP, full)]

            def place(start: Any, strip: int, distance: Any) -> Any:
                return builder.add(start, builder.mul(distance, I64(strip * ROWS)))

            with builder.if_else(args[5]) as (more, none):
                with more:
                    for total, _, strip in strips:
                        tiles.load(total, place(target, strip, target_pitch), target_pitch)
                with none:
                    for total, _, _ in strips:
                        tiles.clear(total)
            with cgutils.for_range(builder, args[4]) as loop:
                tiles.load(_SHARED, builder.add(columns, builder.mul(loop.index, step_bytes)), I64(64))
                terms = builder.add(rows, builder.mul(loop.index, I64(2 * TERMS)))
                for total, own, strip in strips:
                    tiles.load(own, place(terms, strip, pitch), pitch)
                    tiles.multiply(total, own, _SHARED)
            for total, _, strip in strips:
                tiles.store(total, place(target, strip, target_pitch), target_pitch)

        _for_each_count(
            builder,
            builder.sdiv(builder.sub(num_rows, I64(1)), I64(ROWS)),
            range(_MAX_STRIPS),
            compute,
        )
        return context.get_dummy_value()

    return types.void(sums, first, second, types.int64, types.int64, types.boolean), emit


@intrinsic
def multiply_pairs(
    typing: Any, sums: Array, first: Array, second: Array, distance: Int, beside: Int, steps: Int, adds: bool
) -> Any:
    """Like `multiply_strips`, for sums [t, 32] of at most 32 rows. beside: elements between the second factors of the
    two tiles of columns. `_shape_pairs` was called with the rows of the last strip.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles = Tiles(builder)
        target, target_pitch, num_rows = _find(context, builder, sums, args[0])
        rows, pitch, _ = _find(context, builder, first, args[1])
        columns, *_ = _find(context, builder, second, args[2])
        step_bytes, beside = builder.mul(args[3], I64(2)), builder.mul(args[4], I64(2))
        target_bytes, strip_bytes = builder.mul(target_pitch, I64(ROWS)), builder.mul(pitch, I64(ROWS))

        def compute(first_strip: int) -> None:
            own = range(first_strip, 2)
            places = [
                (tile, builder.add(start, I64(64 * column)))
                for strip, start in zip(own, (target, builder.add(target, target_bytes)), strict=False)
                for column, tile in enumerate(_PAIR_SUMS[strip])
            ]
            with builder.if_else(args[6]) as (more, none):
                with more:
                    for tile, place in places:
                        tiles.load(tile, place, target_pitch)
                with none:
                    for tile, _ in places:
                        tiles.clear(tile)
            with cgutils.for_range(builder, args[5]) as loop:
                packed = builder.add(columns, builder.mul(loop.index, step_bytes))
                for tile, place in zip(_SECOND, (packed, builder.add(packed, beside)), strict=True):
                    tiles.load(tile, place, I64(64))
                terms = builder.add(rows, builder.mul(loop.index, I64(2 * TERMS)))
                for strip, place in zip(own, (terms, builder.add(terms, strip_bytes)), strict=False):
                    tiles.load(_PAIR[strip], place, pitch)
                    for tile, factor in zip(_PAIR_SUMS[strip], _SECOND, strict=True):
                        tiles.multiply(tile, _PAIR[strip], factor)
            for tile, place in places:
                tiles.store(tile, place, target_pitch)

        with builder.if_else(builder.icmp_signed(">", num_rows, I64(ROWS))) as (two, one):
            with two:
                compute(0)
            with one:
                compute(1)
        return context.get_dummy_value()

    numbers = (types.int64, types.int64, types.int64, types.boolean)
    return types.void(sums, first, second, *numbers), emit


def _emit_multiply_rows(num_parts: int) -> Any:
    """Builds a function for sums [t, rows] = x [t, 32 * steps] times rows of weights, added to `sums` if `adds`.

    The first `num_first` rows begin at `first`, and the others at `second` if there are two parts. There are at most
    FEW_TOKENS tokens, or PART_TOKENS if there are two parts.
    """
    most = FEW_TOKENS if num_parts == 1 else PART_TOKENS
    totals = [[part * most + t for t in range(most)] for part in range(num_parts)]
    weights = [4, 5][:num_parts]
    tokens_of = [5, 6, 7] if num_parts == 1 else [6, 7]

    @intrinsic
    def multiply_rows(
        typing: Any,
        sums: Array,
        x: Array,
        first: Array,
        second: Array,
        pitch: Int,
        num_first: Int,
        steps: Int,
        adds: bool,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            tiles = Tiles(builder)
            target, target_pitch, num_tokens = _find(context, builder, sums, args[0])
            tokens, token_pitch, _ = _find(context, builder, x, args[1])
            starts = [_find(context, builder, signature.args[k], args[k])[0] for k in (2, 3)]
            pitch = builder.mul(args[4], I64(2))
            targets = [target, builder.add(target, builder.mul(args[5], I64(4)))]
            last_steps = builder.sub(args[6], I64(_PREFETCH_TILES))
            to_next = builder.sub(builder.mul(args[5], pitch), builder.mul(last_steps, I64(2 * TERMS)))

            def place(start: Any, token: int, distance: Any) -> Any:
                return builder.add(start, builder.mul(distance, I64(token)))

            def compute(number: int) -> None:
                own = [
                    (total, place(start, t, target_pitch))
                    for start, part in zip(targets[:num_parts], totals, strict=True)
                    for t, total in enumerate(part[:number])
                ]
                with builder.if_else(args[7]) as (more, none):
                    with more:
                        for total, address in own:
                            tiles.load(total, address, I64(4))
                    with none:
                        for total, _ in own:
                            tiles.clear(total)
                with cgutils.for_range(builder, args[6]) as loop:
                    terms = builder.mul(loop.index, I64(2 * TERMS))
                    ahead = I64(_PREFETCH_TILES * 2 * TERMS)
                    if num_parts == 1:
                        # After the last tile of these rows, those of the next rows follow.
                        is_last = builder.icmp_signed(">=", loop.index, last_steps)
                        ahead = builder.select(is_last, to_next, ahead)
                    lines = [builder.add(builder.add(start, terms), ahead) for start in starts]
                    lines[1] = builder.sub(lines[1], builder.mul(args[5], pitch))
                    for row in range(ROWS):
                        is_first = builder.icmp_signed("<", I64(row), args[5])
                        line = lines[0] if num_parts == 1 else builder.select(is_first, *lines)
                        emit_prefetch(builder, builder.inttoptr(line, _BYTES), FIRST_CACHE)
                        lines = [builder.add(line, pitch) for line in lines]
                    for tile, start in zip(weights, starts, strict=False):
                        tiles.load(tile, builder.add(start, terms), pitch)
                    for t in range(number):
                        token = tokens_of[t % len(tokens_of)]
                        tiles.load(token, builder.add(place(tokens, t, token_pitch), terms), I64(4))
                        for part, tile in zip(totals, weights, strict=True):
                            tiles.multiply(part[t], tile, token)
                for total, address in own:
                    tiles.store(total, address, I64(4))

            _for_each_count(builder, num_tokens, range(1, most + 1), compute)
            return context.get_dummy_value()

        numbers = (types.int64, types.int64, types.int64, types.boolean)
        return types.void(sums, x, first, second, *numbers), emit

    return multiply_rows


_multiply_rows, _multiply_parts = _emit_multiply_rows(1), _emit_multiply_rows(2)


@intrinsic
def interleave_rows(
    typing: Any, target: Array, numbers: Array, first: Int, second: Int, is_pair: bool, size: Int
) -> Any:
    """Writes the pairs of two rows of `size` elements to the same row of adjacent tiles. Of each 32 columns, the even
    ones are in one tile and the odd ones in the next.

    first, second: where the rows begin in `numbers`. The second row counts as 0 unless `is_pair`. The rows are read in
    whole vectors of 32 elements.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        results = Memory(context, builder, target, args[0], I64(0))
        rows = Memory(context, builder, numbers, args[1], I64(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(16), 2 * LANES), None)
        halves = [
            [place for k in range(start, 2 * LANES, 2) for place in (k, k + 2 * LANES)] for start in (0, 1)
        ]
        with cgutils.for_range_slice(builder, I64(0), args[5], I64(2 * LANES)) as (column, _):
            places = [builder.add(row, column) for row in args[2:4]]
            for place in places:
                rows.prefetch(0, builder.add(place, I64(PREFETCH_ELEMENTS)))
            a, b = (rows.load_stored(0, place, 2 * LANES) for place in places)
            b = builder.select(args[4], b, zeros)
            place = builder.mul(column, I64(TERMS))
            for k, half in enumerate(halves):
                pairs = shuffle(builder, a, b, half)
                results.store_stored(0, builder.add(place, I64(k * _TILE_ELEMENTS)), pairs)
        return context.get_dummy_value()

    numbers_of = (types.int64, types.int64, types.boolean, types.int64)
    return types.void(target, numbers, *numbers_of), emit


@intrinsic
def add_scaled(typing: Any, out: Array, sums: Array, scale: Float, size: Int, ahead: Int) -> Any:
    """out [t, size] += scale * sums [t, size]. size is at most SUM_COLUMNS. Of each 32 columns of `out`, `sums` has the
    even ones first.

    ahead: elements from a row of `out` to the row that the next call begins with, which is prefetched.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, out_pitch, num_rows = _find(context, builder, out, args[0])
        _, sum_pitch, _ = _find(context, builder, sums, args[1])
        results, totals = Memory(context, builder, out, args[0]), Memory(context, builder, sums, args[1])
        out_pitch, sum_pitch = builder.udiv(out_pitch, I64(2)), builder.udiv(sum_pitch, I64(4))
        factor = splat(builder, args[2])
        columns = [I64(start) for start in range(0, SUM_COLUMNS, 2 * LANES)]
        ints, words = ir.VectorType(I32, LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
        in_order = [place for k in range(LANES) for place in (k, k + LANES)]

        def add(masks: list[Any]) -> None:
            with cgutils.for_range(builder, num_rows) as loop:
                row = builder.mul(loop.index, out_pitch)
                for column in columns:
                    following = builder.add(builder.add(row, args[4]), column)
                    emit_prefetch(builder, results.pointer(0, following, _I8), FIRST_CACHE)
                for column, mask in zip(columns, masks, strict=True):
                    place = builder.add(row, column)
                    own = builder.add(builder.mul(loop.index, sum_pitch), column)
                    pairs = builder.bitcast(results.load_stored(0, place, 2 * LANES, mask), ints)
                    even = builder.shl(pairs, ir.Constant(ints, [16] * LANES))
                    odd = builder.and_(pairs, ir.Constant(ints, [0xFFFF0000] * LANES))
                    both = [
                        multiply_add(builder, factor, totals.load(0, start), builder.bitcast(before, VECTOR))
                        for start, before in ((own, even), (builder.add(own, I64(LANES)), odd))
                    ]
                    joined = builder.bitcast(join_bfloat16(builder, *both), words)
                    results.store_stored(0, place, shuffle(builder, joined, joined, in_order), mask)

        with builder.if_else(builder.icmp_signed("==", args[3], I64(SUM_COLUMNS))) as (whole, part):
            with whole:
                add([None] * len(columns))
            with part:
                add([mask_below(builder, builder.sub(args[3], column), 2 * LANES) for column in columns])
        return context.get_dummy_value()

    return types.void(out, sums, types.float32, types.int64, types.int64), emit


@intrinsic
def copy_padded(typing: Any, target: Array, source: Array) -> Any:
    """Copies rows of bfloat16 to target [t, n], and fills the other columns with 0. n is a multiple of 32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made, given = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args, args, strict=True)
        )
        num_rows, width = cgutils.unpack_tuple(builder, given.shape)
        _, padded_width = cgutils.unpack_tuple(builder, made.shape)
        pitches = [
            builder.udiv(cgutils.unpack_tuple(builder, array.strides)[0], I64(2)) for array in (made, given)
        ]
        results, rows = (
            Memory(context, builder, kind, value, I64(0))
            for kind, value in zip(signature.args, args, strict=True)
        )
        with cgutils.for_range_slice(builder, I64(0), padded_width, I64(TERMS)) as (column, _):
            mask = mask_below(builder, builder.sub(width, column), TERMS)
            with cgutils.for_range(builder, num_rows) as loop:
                places = [builder.add(builder.mul(loop.index, pitch), column) for pitch in pitches]
                found = rows.load_stored(0, places[1], TERMS, mask)
                results.store_stored(0, places[0], found)
        return context.get_dummy_value()

    return types.void(target, source), emit


@compiled
def shrink_tokens(
    sums: Array, x: Array, pages: Array, table: Array, segment: Int, segment_size: Int, pitch: Int, rows: Int
) -> bool:
    """sums [t, rows] = x [t, n] times the first n columns of `rows` rows of A, for a few tokens.

    The first row begins at `segment`, and n is a multiple of 32. If the rows cross a page boundary, they have two
    parts. The row that crosses it belongs to the first part up to the boundary, and to the second part from there on.
    Returns False if the rows are in more than two pages.
    """
    page, start = find_segment(pages, table, segment, segment_size)
    width, size = x.shape[1], pages.shape[1] - start
    above = min(size // pitch, rows - 1)
    cut = min(size - above * pitch, pitch)
    upper = lower = pages[page, start:]
    if size < rows * pitch:
        page, _ = find_segment(pages, table, segment + size // segment_size, segment_size)
        lower = pages[page, 0:]
        if rows * pitch - size > lower.shape[0]:
            return False
    for part in range(2):
        if part == 0:
            first, end, num_first, second = 0, min(cut, width), above + 1, pitch - cut
        else:
            first, end, num_first, second = cut, width, above, 0
        steps, own, weights = (end - first) // TERMS, x[:, first:], upper[first:]
        if num_first == 0:
            num_first, weights = rows, lower
        if steps > 0 and num_first == rows:
            _shape_rows(rows, 0)
            _multiply_rows(sums, own, weights, weights, pitch, rows, steps, first > 0)
        elif steps > 0:
            _shape_parts(num_first, rows - num_first)
            for t in range(0, x.shape[0], PART_TOKENS):
                _multiply_parts(
                    sums[t : t + PART_TOKENS],
                    own[t : t + PART_TOKENS],
                    weights,
                    lower[second:],
                    pitch,
                    num_first,
                    steps,
                    first > 0,
                )
    return True


@compiled
def shrink_rows(
    sums: Array,
    x: Array,
    pages: Array,
    table: Array,
    segment: Int,
    segment_size: Int,
    width: Int,
    rows: Int,
    copies: Array,
    packed: Array,
    tails: Array,
) -> None:
    """sums [t, rows] = x [t, width] times `rows` consecutive rows of A. The first row begins at `segment`. There are at
    most 16 rows if there are at most FEW_TOKENS tokens, and at most 32 otherwise.

    Rows are read where they are if one page holds them all, or two pages if there are few tokens. Otherwise they are
    copied to copies [rows, PACKED_PITCH], PACKED_COLUMNS at a time. If `width` is no multiple of 32, the last segment
    of each row of x and A is copied and padded with 0, because memory behind the row may hold NaN. packed and tails
    [t, TAIL_COLUMNS] are scratch, too.
    """
    tokens, row_segments = x.shape[0], (width + segment_size - 1) // segment_size
    whole, pitch = (
        width if width % TERMS == 0 else width // segment_size * segment_size,
        row_segments * segment_size,
    )
    is_few, column, num_tiles = tokens <= FEW_TOKENS, 0, (rows + ROWS - 1) // ROWS
    page, start = find_segment(pages, table, segment, segment_size)
    # A packed tile always has 16 rows. Sums of other rows are not used.
    is_direct = not is_few and start + num_tiles * ROWS * pitch <= pages.shape[1]
    if is_few and shrink_tokens(sums, x[:, :whole], pages, table, segment, segment_size, pitch, rows):
        column = whole
    if column == width:
        return
    if is_few:
        _shape_rows(rows, 0)
    if whole < width:
        copy_padded(tails[:tokens], x[:, whole:width])
    while column < width:
        if is_direct and column < whole:
            size, distance, weights = whole, pitch, pages[page, start:]
        else:
            size = min(PACKED_COLUMNS, (whole if column < whole else width) - column)
            distance, weights = PACKED_PITCH, as_row(copies)
            for r in range(rows):
                at = segment + r * row_segments + column // segment_size
                pack_row(copies[r], pages, table, at, segment_size, pitch, size)
                clear(copies[r, size : (size + TERMS - 1) // TERMS * TERMS])
        own = x[:, column:] if column < whole else tails[:tokens, :TAIL_COLUMNS]
        steps = (size + TERMS - 1) // TERMS
        if is_few:
            _multiply_rows(sums, own, weights, weights, distance, rows, steps, column > 0)
        else:
            part = _SHRINK_ELEMENTS // (num_tiles * ROWS)
            for first in range(0, steps * TERMS, part):
                end = min(first + part, steps * TERMS)
                for tile in range(num_tiles):
                    target, below = packed[tile * part * ROWS :], weights[tile * ROWS * distance :]
                    for k in range(first, end, TERMS):
                        transpose_words(target[(k - first) * ROWS :], below[k:], TERMS, distance)
                multiply_packed(
                    sums, own[:, first:], packed, num_tiles, part, (end - first) // TERMS, column + first > 0
                )
        column += size


@compiled
def multiply_packed(
    sums: Array, own: Array, packed: Array, num_tiles: Int, part: Int, steps: Int, adds: bool
) -> None:
    """sums [t, 16 * num_tiles] = own [t, 32 * steps] times packed rows of A, added to `sums` if `adds`.

    There are one or two tiles of rows, in packed [num_tiles, part / 32, 16, 32].
    """
    tokens = sums.shape[0]
    block = _MAX_STRIPS // num_tiles * ROWS
    for t in range(0, tokens, block):
        count = min(block, tokens - t)
        # The shape of the block before is that of a whole block.
        changes, last_rows = t == 0 or count < block, (count - 1) % ROWS + 1
        if num_tiles > 1:
            if changes:
                _shape_pairs(last_rows, 0)
            multiply_pairs(sums[t : t + count], own[t:], packed, _TILE_ELEMENTS, part * ROWS, steps, adds)
        else:
            if changes:
                _shape_strips(last_rows, 0)
            multiply_strips(sums[t : t + count], own[t:], packed, _TILE_ELEMENTS, steps, adds)


def _emit_token_columns(tokens: int, groups: int) -> Callable[..., None]:
    """Builds a function that adds to 32 * groups columns of `tokens` tokens without tiles, in the order of tiles. If
    `groups` is 1, there may be fewer columns.
    """

    @intrinsic
    def add_columns(
        typing: Any, out: Array, factors: Array, numbers: Array, starts: Array, scale: Float, size: Int
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results, factors_of = (
                Memory(context, builder, kind, value)
                for kind, value in zip(signature.args[:2], args[:2], strict=True)
            )
            rows = Memory(context, builder, numbers, args[2], I64(0))
            places = Memory(context, builder, starts, args[3], I64(0))
            rank, *_ = cgutils.unpack_tuple(
                builder, context.make_array(starts)(context, builder, args[3]).shape
            )
            zero, ints = ir.Constant(VECTOR, None), ir.VectorType(I32, LANES)

            def reserve() -> list[list[Any]]:
                """A vector for the even and one for the odd columns of each group."""
                return [
                    [cgutils.alloca_once(builder, VECTOR) for _ in range(2 * groups)] for _ in range(tokens)
                ]

            totals, even, odd = reserve(), reserve(), reserve()

            def each(*vectors: list[list[Any]]) -> list[tuple[Any, ...]]:
                return list(zip(*(itertools.chain(*own) for own in vectors), strict=True))

            for (total,) in each(totals):
                builder.store(zero, total)

            def add(row: Any, sums: list[list[Any]]) -> None:
                first, found = places.load_scalar(0, row), []
                for group in range(groups):
                    start = builder.add(first, I64(group * 2 * LANES))
                    rows.prefetch(0, builder.add(start, I64(PREFETCH_ELEMENTS)))
                    both = builder.bitcast(rows.load_stored(0, start, 2 * LANES), ints)
                    lower = builder.shl(both, ir.Constant(ints, [16] * LANES))
                    upper = builder.and_(both, ir.Constant(ints, [0xFFFF0000] * LANES))
                    found += [builder.bitcast(lower, VECTOR), builder.bitcast(upper, VECTOR)]
                for t in range(tokens):
                    factor = splat(builder, factors_of.load_widened_scalar(t, row))
                    for total, value in zip(sums[t], found, strict=True):
                        builder.store(multiply_add(builder, factor, value, builder.load(total)), total)

            with cgutils.for_range_slice(builder, I64(0), rank, I64(TERMS)) as (chunk, _):
                for pair in each(even, odd):
                    for half in pair:
                        builder.store(zero, half)
                end = builder.add(chunk, I64(TERMS))
                end = builder.select(builder.icmp_signed("<", end, rank), end, rank)
                whole = builder.and_(end, I64(-2))
                with cgutils.for_range_slice(builder, chunk, whole, I64(2)) as (row, _):
                    add(row, even)
                    add(builder.add(row, I64(1)), odd)
                with builder.if_then(builder.icmp_signed("<", whole, end)):
                    add(whole, even)
                for total, *halves in each(totals, even, odd):
                    both = builder.fadd(*(builder.load(half) for half in halves), flags=IN_ORDER)
                    builder.store(builder.fadd(builder.load(total), both, flags=IN_ORDER), total)
            scale = splat(builder, args[4])
            orders = [
                [place for k in range(start, start + LANES // 2) for place in (k, k + LANES)]
                for start in (0, LANES // 2)
            ]
            for half, order in enumerate(orders * groups):
                column = I64(half * LANES)
                mask = mask_below(builder, builder.sub(args[5], column)) if groups == 1 else None
                for t in range(tokens):
                    columns = totals[t][half // 2 * 2 :]
                    total = shuffle(builder, builder.load(columns[0]), builder.load(columns[1]), order)
                    before = results.load(t, column, mask)
                    results.store(t, column, multiply_add(builder, scale, total, before), mask)
            return context.get_dummy_value()

        return types.void(out, factors, numbers, starts, types.float32, types.int64), emit

    return add_columns


_add_one_token, _add_one_token_narrow = _emit_token_columns(1, 4), _emit_token_columns(1, 1)
_add_two_tokens, _add_two_tokens_narrow = _emit_token_columns(2, 2), _emit_token_columns(2, 1)


@compiled
def expand_tokens(
    out: Array, factors: Array, scale: Float, numbers: Array, starts: Array, first: Int, size: Int
) -> None:
    """out [t, first to first + size - 1] += scale * factors [t, rank] times rows of B that begin at starts [rank]."""
    for t in range(0, out.shape[0], 2):
        column, is_pair = 0, t + 1 < out.shape[0]
        while column < size:
            own, weights, left = out[t:, first + column :], numbers[column:], size - column
            if is_pair and left >= 4 * LANES:
                _add_two_tokens(own, factors[t:], weights, starts, scale, left)
                column += 4 * LANES
            elif is_pair:
                _add_two_tokens_narrow(own, factors[t:], weights, starts, scale, left)
                column += 2 * LANES
            elif left >= 8 * LANES:
                _add_one_token(own, factors[t:], weights, starts, scale, left)
                column += 8 * LANES
            else:
                _add_one_token_narrow(own, factors[t:], weights, starts, scale, left)
                column += 2 * LANES


@compiled
def expand_columns(
    out: Array,
    shrunk: Array,
    scale: Float,
    pages: Array,
    table: Array,
    segment: Int,
    row_segments: Int,
    segment_size: Int,
    size: Int,
    starts: Array,
    copies: Array,
    factors: Array,
    packed: Array,
    sums: Array,
) -> None:
    """out [t, size] += scale * shrunk [t, rank] times `size` columns of `rank` rows of B.

    The other arguments are those of `lora.expand_columns`. factors, packed and sums are scratch, too.
    """
    tokens, rank, numbers = out.shape[0], shrunk.shape[1], as_row(pages)
    is_few, steps = tokens <= FEW_TOKENS, (rank + TERMS - 1) // TERMS
    # Tiles of the second factor: [steps, block_tiles, 16 pairs, 32].
    block_tiles = PACKED_COLUMNS // ROWS
    pitch = block_tiles * _TILE_ELEMENTS
    strips = (tokens + ROWS - 1) // ROWS
    # Rows behind the last token have any content. Their sums are not used.
    padded = as_matrix(factors[: strips * ROWS * steps * TERMS], steps * TERMS)
    out_pitch = count_between(out, out[1:])
    if not is_few:
        copy_padded(padded[:tokens], shrunk)
        used_pairs = (rank + 1) // 2 - (steps - 1) * ROWS
        for tile in range(block_tiles):
            first = (steps - 1) * pitch + tile * _TILE_ELEMENTS
            clear(packed[first + used_pairs * TERMS : first + _TILE_ELEMENTS])
        _shape_pairs(ROWS, 0)
    for block in range(0, size, PACKED_COLUMNS):
        width, at = min(PACKED_COLUMNS, size - block), segment + block // segment_size
        find_rows(starts, copies, pages, table, at, row_segments, segment_size, width, False)
        if is_few:
            expand_tokens(out, shrunk, scale, numbers, starts, block, width)
            continue
        for r in range(0, rank, 2):
            second = starts[min(r + 1, rank - 1)]
            target = packed[r // TERMS * pitch + r % TERMS * ROWS :]
            interleave_rows(target, numbers, starts[r], second, r + 1 < rank, width)
        for column in range(0, width, SUM_COLUMNS):
            count = min(SUM_COLUMNS, width - column)
            for t in range(0, tokens, SUM_ROWS):
                rows, following = padded[t : t + SUM_ROWS], SUM_ROWS * out_pitch
                if t + SUM_ROWS >= tokens:
                    following = SUM_COLUMNS - t * out_pitch
                for start in range(0, count, 2 * ROWS):
                    own = packed[(column + start) * TERMS :]
                    multiply_pairs(
                        sums[: rows.shape[0], start:], rows, own, pitch, _TILE_ELEMENTS, steps, False
                    )
                add_scaled(out[t : t + SUM_ROWS, block + column :], sums, scale, count, following)


def lora_tiles_worker(job: Job) -> None:
    """Like `lora.lora_worker`, for bfloat16."""
    mode = configure_tiles()
    run_tile_items(job)
    release_tiles(mode)


@compiled
def run_tile_items(job: Job) -> None:
    x, out, pages = read_model_matrix(job, X), read_model_matrix(job, OUT), read_model_matrix(job, PAGES)
    shrunk = read_model_matrix(job, SHRUNK)
    tiles, page_table = read_int32_matrix(job, TILES), read_int32_matrix(job, PAGE_TABLE)
    weights, scales = read_float_matrix(job, WEIGHTS), read_float_matrix(job, SCALES)
    groups, modules = read_int32_matrix(job, GROUPS), read_int32_matrix(job, MODULES)
    column_blocks, widths = read_int32_matrix(job, COLUMN_BLOCKS), read_int32_matrix(job, WIDTHS)
    group, width, first_module = read_int(job, GROUP), read_int(job, WIDTH), read_int(job, FIRST_MODULE)
    num_shrink_items, blocks = read_int(job, NUM_SHRINK_ITEMS), read_int(job, BLOCKS)
    block_rows, segment_size = read_int(job, BLOCK_ROWS), read_int(job, SEGMENT_SIZE)
    done, awaited = read_int64_matrix(job, DONE)[0], read_int(job, COUNT_BEFORE) + blocks
    worker, is_whole = take_thread_index(job), read_int(job, IS_WHOLE)
    row_segments = (width + segment_size - 1) // segment_size
    numbers = read_float_matrix(job, SUMS)[worker, :NUM_SUMS]
    shrink_sums, sums = as_matrix(numbers, 2 * ROWS), as_matrix(numbers, SUM_COLUMNS)
    starts, scratch = read_int64_matrix(job, STARTS)[worker], read_model_matrix(job, PACKED)[worker]
    tails, rest = scratch[: TILE_TOKENS * TAIL_COLUMNS], scratch[TILE_TOKENS * TAIL_COLUMNS :]
    tail_rows = as_matrix(tails, TAIL_COLUMNS)
    item = take_item(job)
    while item < count_items(job):
        tile, first_row, end_row, first_block, end_block = split_item(
            item, is_whole, num_shrink_items, blocks, block_rows, column_blocks.shape[0]
        )
        slot, first, tokens = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        rank, segment = groups[slot, 2 * group], groups[slot, 2 * group + 1]
        if tokens == 0:
            end_row, first_block = 0, end_block
        end_row, most = min(end_row, rank), ROWS if tokens <= FEW_TOKENS else 2 * ROWS
        for row in range(first_row, end_row, most):
            rows, at = min(most, end_row - row), segment + row * row_segments
            shrink_rows(
                shrink_sums[:tokens],
                x[first : first + tokens],
                pages,
                page_table[slot],
                at,
                segment_size,
                width,
                rows,
                as_matrix(rest[: 2 * ROWS * PACKED_PITCH], PACKED_PITCH),
                rest[2 * ROWS * PACKED_PITCH :],
                tail_rows,
            )
            for t in range(tokens):
                copy_narrowed(shrunk[first + t, row : row + rows], shrink_sums[t, :rows])
        if end_block == 0:
            increment_count(done, tile)
        for block in range(first_block, end_block):
            member, out_column, column, size = column_blocks[block]
            module = first_module + member
            rank, row = modules[slot, 3 * module], modules[slot, 3 * module + 1]
            if rank > 0:
                if num_shrink_items > 0 and not is_whole:
                    await_count(done, tile, awaited)
                copies = rest[TILE_TOKENS * ((rank + TERMS - 1) // TERMS * TERMS) :]
                expand_columns(
                    out[first : first + tokens, out_column:],
                    shrunk[first : first + tokens, row : row + rank],
                    weights[0, tile] * scales[slot, module],
                    pages,
                    page_table[slot],
                    modules[slot, 3 * module + 2] + column // segment_size,
                    (widths[0, member] + segment_size - 1) // segment_size,
                    segment_size,
                    size,
                    starts[:rank],
                    as_matrix(copies[: rank * PACKED_PITCH], PACKED_PITCH),
                    rest,
                    copies[rank * PACKED_PITCH :],
                    sums,
                )
        item = take_item(job)
