"""Products with the base model's weights on a CPU with AMX, for bfloat16.

oneDNN adds the products of a row in an order that depends on the number of rows, so `row_blocks` may call it with few
rows only. Here every row takes the same steps, whatever their number: one tile product for each 32 terms, in order.

A panel has 32 output columns, as pairs of tiles [16 pairs of terms, 16 columns, 2] for each 32 terms. An item of a job
is one panel and as many rows as fit the core's own cache. A thread multiplies 32 rows at a time. If there are more, it
first copies them in the order of tiles, and multiplies several blocks of 32 rows with the same part of a panel, which
stays in the smallest cache.

A tile product adds the even and the odd products of 32 terms one after the other to two sums, and then both to the sum
of the steps before. Where codes or bytes are multiplied with very few rows, vectors take the same steps: tiles would
have to be stored before they could be multiplied, and most of their rows would be empty.

If the codes stand for consecutive integers, x is first rounded to multiples of a power of two, at most 2^-12 of the
largest number of its group. A multiple has at most 8 significant bits, so it still is a number of bfloat16. The sums of
a group are then less than 2^24 such multiples and exact in float32, so very few rows may be multiplied as integers of
16 bits, in a third of the instructions.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import (
    BLOCK_ROWS,
    CHUNK_STEPS,
    COLUMNS,
    FEW_ROWS,
    GROUP_ROWS,
    LANES,
    PANEL_COLUMNS,
    PANEL_ROWS,
    ROWS,
    SPLIT_PARTS,
    TERMS,
    WIDENED_STEPS,
)
from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Float,
    Int,
    Job,
    await_prepared,
    compiled,
    count_items,
    count_prepared,
    emit_prefetch,
    from_bits,
    intrinsic,
    read_byte_matrix,
    read_float_matrix,
    read_int,
    read_model_matrix,
    read_signed_byte_matrix,
    take_item,
    take_shared_item,
    take_thread_index,
)
from slora_kernels.cpu.workers.tile_attention import (
    Tiles,
    call_instruction,
    configure_tiles,
    describe_tiles,
    release_tiles,
)
from slora_kernels.cpu.workers.vectors import (
    F32,
    I32,
    I64,
    IN_ORDER,
    VECTOR,
    Memory,
    join_bfloat16,
    look_up_words,
    mask_below,
    multiply_add,
    multiply_integer_pairs,
    permute_lanes,
    round_to_integers,
    splat,
    sum_lanes,
)

_TILE_BYTES = 1024
# Bytes of the columns of a step, and lines of 64 bytes of its codes.
_STEP_BYTES, _CODE_LINES = 2 * _TILE_BYTES, 8
_ZERO = np.float32(0.0)
# The exponents (as in the bits of a float32) of the largest number of a group that is rounded. A group of smaller
# numbers is 0, so that no product is subnormal. A group of larger numbers is NaN, so that no sum overflows on the way.
_LEAST_EXPONENT, _MOST_EXPONENT, _NAN_BITS = 27, 227, 0x7FC00000
# Codes and bytes are prefetched so many bytes ahead. Without this, int8 took 1.3 times as long as bfloat16 for one row,
# and 0.8 times with it.
_PREFETCH_BYTES = 4096
# Tiles: the sums of two tiles of rows times two of columns, then the rows, then the columns.
_SUMS, _FIRST, _SECOND = ((0, 1), (2, 3)), (4, 5), (6, 7)
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_BYTES, _ELEMENTS = _I8.as_pointer(), ir.VectorType(ir.IntType(16), 2 * LANES)


class _PanelProduct:
    """Emits the product of x [T, width] with a panel of at most 32 columns, plus a bias.

    arrays: out [T, N], x, the panel's weights and the bias [N]. numbers: width, the panel's first column, and N.
    scales: [N], which the products are multiplied with. None: all are 1. is_tiled: whether x has been copied by
    `order_rows`.
    """

    def __init__(
        self,
        context: Any,
        builder: Any,
        kinds: Any,
        arrays: Any,
        numbers: Any,
        scales: Memory | None = None,
        *,
        is_tiled: bool = False,
    ) -> None:
        self._builder, self._tiles = builder, Tiles(builder)
        out, x, panel, _ = (
            context.make_array(kind)(context, builder, array)
            for kind, array in zip(kinds, arrays, strict=True)
        )
        width, self._column, end = numbers
        self._results = Memory(context, builder, kinds[0], arrays[0])
        self.num_rows, self._out_pitch = cgutils.unpack_tuple(builder, out.shape)
        self._first_row, self.weights = builder.ptrtoint(x.data, I64), builder.ptrtoint(panel.data, I64)
        left, columns = builder.sub(end, self._column), [I64(n * COLUMNS) for n in range(2)]
        self._mask = mask_below(builder, left, PANEL_COLUMNS)

        def load_columns(source: Memory) -> list[Any]:
            masks = (mask_below(builder, builder.sub(left, column)) for column in columns)
            places = (builder.add(self._column, column) for column in columns)
            return [source.load(0, place, mask) for place, mask in zip(places, masks, strict=True)]

        self._offsets = load_columns(Memory(context, builder, kinds[3], arrays[3], I64(0)))
        self._factors = None if scales is None else load_columns(scales)
        self.steps = builder.udiv(width, I64(TERMS))
        # Distances in bytes: between the rows of a tile, tiles of a block, steps, and blocks (for one row).
        if is_tiled:
            self._pitch, self._tile_pitch, self._step_pitch = I64(64), I64(_TILE_BYTES), I64(2 * _TILE_BYTES)
            self._row_pitch = builder.mul(self.steps, I64(2 * TERMS))
        else:
            self._pitch, *_ = cgutils.unpack_tuple(builder, x.strides)
            self._tile_pitch, self._step_pitch = builder.mul(self._pitch, I64(ROWS)), I64(2 * TERMS)
            self._row_pitch = self._pitch
        self._sums = self.make_block(GROUP_ROWS if is_tiled else PANEL_ROWS)
        config = cgutils.alloca_once_value(builder, cgutils.make_bytearray(describe_tiles()))
        config.align = 64
        self._config = builder.bitcast(config, _BYTES)

    def make_block(self, num_rows: int = PANEL_ROWS) -> Any:
        """Memory for float32 [num_rows, 32 columns]."""
        scratch = cgutils.alloca_once(self._builder, ir.ArrayType(F32, num_rows * PANEL_COLUMNS))
        scratch.align = 64
        return self._builder.ptrtoint(scratch, I64)

    def emit(self, add_products: Callable[[Any, Any, int], Any]) -> None:
        """Emits the loop over blocks of 32 rows.

        add_products(start, count, n): emits the products of a block of n tiles, whose first row is `start`, and returns
        the memory that has them.
        """
        builder = self._builder
        # The panel before may have ended with fewer rows.
        call_instruction(builder, "llvm.x86.ldtilecfg", [_BYTES], self._config)
        with cgutils.for_range_slice(builder, I64(0), self.num_rows, I64(PANEL_ROWS)) as (start, _):
            left = builder.sub(self.num_rows, start)
            is_whole = builder.icmp_signed(">=", left, I64(PANEL_ROWS))
            count = builder.select(is_whole, I64(PANEL_ROWS), left)
            is_few = builder.icmp_signed("<=", left, I64(ROWS))
            with builder.if_then(builder.not_(is_whole)):
                self._set_heights(left, is_few)
            with builder.if_else(is_few) as (few, many):
                for num_tiles, branch in ((1, few), (2, many)):
                    with branch:
                        self._store_rows(start, count, add_products(start, count, num_tiles))

    def emit_groups(self, following: Any) -> None:
        """Like `emit`, for rows that are tiled. The last tiles may have rows that are not stored.

        following: the address of a panel that is prefetched meanwhile.
        """
        builder, chunk = self._builder, I64(CHUNK_STEPS)
        num_blocks = builder.udiv(builder.add(self.num_rows, I64(PANEL_ROWS - 1)), I64(PANEL_ROWS))
        step_lines = I64(_STEP_BYTES // 64)
        num_lines = builder.udiv(builder.add(step_lines, builder.sub(num_blocks, I64(1))), num_blocks)
        place = cgutils.alloca_once_value(builder, following)

        def prefetch() -> None:
            begin = builder.load(place)
            end = builder.add(begin, builder.mul(num_lines, I64(64)))
            with cgutils.for_range_slice(builder, begin, end, I64(64)) as (line, _):
                emit_prefetch(builder, builder.inttoptr(line, _BYTES))
            builder.store(end, place)

        call_instruction(builder, "llvm.x86.ldtilecfg", [_BYTES], self._config)

        def find_end(first: Any, count: Any, limit: Any) -> Any:
            end = builder.add(first, count)
            return builder.select(builder.icmp_signed("<", end, limit), end, limit)

        with cgutils.for_range_slice(builder, I64(0), self.num_rows, I64(GROUP_ROWS)) as (group, _):
            group_end = find_end(group, I64(GROUP_ROWS), self.num_rows)
            with cgutils.for_range_slice(builder, I64(0), self.steps, chunk) as (first, _):
                end = find_end(first, chunk, self.steps)
                weights = builder.add(self.weights, builder.mul(first, I64(_STEP_BYTES)))
                with cgutils.for_range_slice(builder, group, group_end, I64(PANEL_ROWS)) as (start, _):
                    row = builder.sub(start, group)
                    with builder.if_else(builder.icmp_signed("==", first, I64(0))) as (new, begun):
                        with new:
                            self.clear_sums(2)
                        with begun:
                            self._move_sums(self._tiles.load, 2, row)
                    self.add(start, 2, weights, first, end, beside=prefetch)
                    self._move_sums(self._tiles.store, 2, row)
            self._store_rows(group, builder.sub(group_end, group), self._sums)

    def add_steps(
        self, start: Any, num_tiles: int, weights: Any, first: Any, end: Any, parts: Any = None
    ) -> Any:
        """Emits the products of the steps from `first` to `end`. weights: where the columns of step `first` begin.

        parts: how many tiles follow each other for each tile of columns, whose sum is multiplied. None: one.
        Returns the memory that has the sums.
        """
        self.clear_sums(num_tiles)
        self.add(start, num_tiles, weights, first, end, parts)
        return self.store_sums(num_tiles)

    def clear_sums(self, num_tiles: int) -> None:
        for tile in itertools.chain(*_SUMS[:num_tiles]):
            self._tiles.clear(tile)

    def add(
        self,
        start: Any,
        num_tiles: int,
        weights: Any,
        first: Any,
        end: Any,
        parts: Any = None,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """Like `add_steps`, to the sums in the tiles. beside: emits what is done in each step."""
        builder, tiles = self._builder, self._tiles
        own_rows = builder.add(self._first_row, builder.mul(start, self._row_pitch))
        size = I64(_STEP_BYTES) if parts is None else builder.mul(parts, I64(_STEP_BYTES))

        def multiply(columns: Any) -> None:
            for k, tile in enumerate(_SECOND):
                tiles.load(tile, builder.add(columns, I64(k * _TILE_BYTES)), I64(64))
            for k in range(num_tiles):
                for total, second in zip(_SUMS[k], _SECOND, strict=True):
                    tiles.multiply(total, _FIRST[k], second)

        with cgutils.for_range_slice(builder, first, end, I64(1)) as (step, _):
            columns = builder.add(weights, builder.mul(builder.sub(step, first), size))
            terms = builder.add(own_rows, builder.mul(step, self._step_pitch))
            for k in range(num_tiles):
                place = builder.add(terms, builder.mul(self._tile_pitch, I64(k)))
                tiles.load(_FIRST[k], place, self._pitch)
            beside()
            if parts is None:
                multiply(columns)
            else:
                with cgutils.for_range(builder, parts) as loop:
                    multiply(builder.add(columns, builder.mul(loop.index, I64(_STEP_BYTES))))

    def store_sums(self, num_tiles: int) -> Any:
        """Returns the memory that has the sums."""
        self._move_sums(self._tiles.store, num_tiles, I64(0))
        return self._sums

    def _move_sums(self, move: Callable[[int, Any, Any], None], num_tiles: int, row: Any) -> None:
        """Loads or stores the sums of a block of rows, whose first is a row of the memory."""
        builder = self._builder
        block = builder.add(self._sums, builder.mul(row, I64(4 * PANEL_COLUMNS)))
        for k in range(num_tiles):
            for n, tile in enumerate(_SUMS[k]):
                place = k * ROWS * PANEL_COLUMNS + n * COLUMNS
                move(tile, builder.add(block, I64(4 * place)), I64(4 * PANEL_COLUMNS))

    def _set_heights(self, left: Any, is_few: Any) -> None:
        """The last rows may be fewer than those of two tiles. Memory behind them is not read."""
        builder = self._builder
        upper = builder.select(is_few, left, I64(ROWS))
        lower = builder.select(is_few, I64(ROWS), builder.sub(left, I64(ROWS)))
        for k, height in enumerate((upper, builder.select(is_few, upper, lower))):
            for tile in (*_SUMS[k], _FIRST[k]):
                place = builder.gep(self._config, [I32(48 + tile)])
                builder.store(builder.trunc(height, _I8), place)
        call_instruction(builder, "llvm.x86.ldtilecfg", [_BYTES], self._config)

    def _store_rows(self, start: Any, count: Any, sums: Any) -> None:
        builder = self._builder
        with cgutils.for_range(builder, count) as loop:
            values = []
            for n in range(2):
                value = builder.load(point_at(builder, sums, loop.index, n), align=64)
                if self._factors is not None:
                    value = builder.fmul(value, self._factors[n], flags=IN_ORDER)
                values.append(builder.fadd(value, self._offsets[n], flags=IN_ORDER))
            row = builder.mul(builder.add(start, loop.index), self._out_pitch)
            rounded = join_bfloat16(builder, *values)
            self._results.store_stored(0, builder.add(row, self._column), rounded, self._mask)

    def emit_few(self, compute: Callable[["_FewRows"], Any]) -> None:
        """Emits the products of at most FEW_ROWS rows, which are float32 [T, width] where the panel's weights would be.

        compute: emits the sums of these rows.
        """
        builder = self._builder
        for count in range(1, FEW_ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", self.num_rows, I64(count))):
                rows = _FewRows(builder, self.weights, builder.mul(self.steps, I64(4 * TERMS)), count)
                compute(rows)
                rows.store(self._sums)
                self._store_rows(I64(0), I64(count), self._sums)


class _FewRows:
    """Emits the steps of tile products for a few rows, in vectors. A sum is a vector for each row and tile.

    x: where the rows begin, `pitch` bytes apart.
    """

    def __init__(self, builder: Any, x: Any, pitch: Any, count: int) -> None:
        self._builder, self.count, self.x = builder, count, x
        self._rows = [builder.add(x, builder.mul(pitch, I64(row))) for row in range(count)]
        self.totals = self.make_sums()

    def make_sums(self) -> list[list[Any]]:
        """Places for sums, which are 0."""
        places = [[cgutils.alloca_once(self._builder, VECTOR) for _ in range(2)] for _ in range(self.count)]
        self.clear(places)
        return places

    def clear(self, sums: list[list[Any]]) -> None:
        for place in itertools.chain(*sums):
            self._builder.store(ir.Constant(VECTOR, None), place)

    def add_step(
        self, sums: list[list[Any]], step: Any, load: Callable[[int, int], Sequence[Any]], num_parts: int = 1
    ) -> None:
        """Adds the products of 32 terms.

        load(tile, pair): the numbers of a pair's even term, and of its odd one; then the same for each further part.
        """
        builder, zero = self._builder, ir.Constant(VECTOR, None)
        chains = [[[zero] * (2 * num_parts) for _ in range(2)] for _ in range(self.count)]
        first = builder.mul(step, I64(4 * TERMS))
        for pair, tile in itertools.product(range(TERMS // 2), range(2)):
            numbers = load(tile, pair)
            for (row, address), odd in itertools.product(enumerate(self._rows), range(2)):
                place = builder.add(address, builder.add(first, I64(4 * (2 * pair + odd))))
                term = splat(builder, builder.load(builder.inttoptr(place, F32.as_pointer())))
                own = chains[row][tile]
                for chain in range(odd, 2 * num_parts, 2):
                    own[chain] = multiply_add(builder, term, numbers[chain], own[chain])
        for (row, places), tile in itertools.product(enumerate(sums), range(2)):
            total = builder.load(places[tile])
            for chain in range(0, 2 * num_parts, 2):
                both = builder.fadd(*chains[row][tile][chain : chain + 2], flags=IN_ORDER)
                total = builder.fadd(total, both, flags=IN_ORDER)
            builder.store(total, places[tile])

    def store(self, block: Any) -> None:
        """Stores the totals in a block of float32 [..., 32]."""
        for (row, places), tile in itertools.product(enumerate(self.totals), range(2)):
            value = self._builder.load(places[tile])
            self._builder.store(value, point_at(self._builder, block, I64(row), tile), align=64)


def point_at(builder: Any, block: Any, row: Any, n: int) -> Any:
    """The address of tile n's columns in a row of a block of float32 [..., 32]."""
    place = builder.add(builder.mul(row, I64(PANEL_COLUMNS)), I64(n * COLUMNS))
    return builder.inttoptr(builder.add(block, builder.mul(place, I64(4))), VECTOR.as_pointer())


@intrinsic
def multiply_panel(
    typing: Any, out: Array, x: Array, panel: Array, bias: Array, width: Int, column: Int, end: Int
) -> Any:
    """out [T, column to end - 1] = x [T, width] times a panel, plus a bias. There are at most 32 such columns."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = _PanelProduct(context, builder, signature.args[:4], args[:4], args[4:])
        product.emit(
            lambda start, count, num_tiles: product.add_steps(
                start, num_tiles, product.weights, I64(0), product.steps
            )
        )
        return context.get_dummy_value()

    numbers = (types.int64, types.int64, types.int64)
    return types.void(out, x, panel, bias, *numbers), emit


@intrinsic
def multiply_tiled_panel(
    typing: Any,
    out: Array,
    tiles: Array,
    panel: Array,
    bias: Array,
    width: Int,
    column: Int,
    end: Int,
    following: Array,
) -> Any:
    """Like `multiply_panel`, with the rows in the order of `order_rows`. following: a panel that is prefetched."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = _PanelProduct(context, builder, signature.args[:4], args[:4], args[4:7], is_tiled=True)
        product.emit_groups(
            builder.ptrtoint(context.make_array(following)(context, builder, args[7]).data, I64)
        )
        return context.get_dummy_value()

    numbers = (types.int64, types.int64, types.int64)
    return types.void(out, tiles, panel, bias, *numbers, following), emit


@intrinsic
def order_rows(typing: Any, target: Array, x: Array, width: Int) -> Any:
    """Copies x [T, width] in blocks of rows, as [T / BLOCK_ROWS, width / 32, BLOCK_ROWS, 32].

    With AMX, that is the order of tiles. Rows behind the last are not written.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = context.make_array(x)(context, builder, args[1])
        num_rows, _ = cgutils.unpack_tuple(builder, rows.shape)
        pitch, _ = cgutils.unpack_tuple(builder, rows.strides)
        tiles = context.make_array(target)(context, builder, args[0])
        first_row, first_tile = builder.ptrtoint(rows.data, I64), builder.ptrtoint(tiles.data, I64)
        block_bytes = builder.mul(args[2], I64(2 * BLOCK_ROWS))
        with cgutils.for_range(builder, num_rows) as outer:
            block = builder.udiv(outer.index, I64(BLOCK_ROWS))
            own = builder.mul(builder.urem(outer.index, I64(BLOCK_ROWS)), I64(2 * TERMS))
            own = builder.add(builder.add(first_tile, own), builder.mul(block, block_bytes))
            row = builder.add(first_row, builder.mul(outer.index, pitch))
            with cgutils.for_range(builder, builder.udiv(args[2], I64(TERMS))) as inner:
                source = builder.add(row, builder.mul(inner.index, I64(2 * TERMS)))
                terms = builder.load(builder.inttoptr(source, _ELEMENTS.as_pointer()), align=2)
                place = builder.add(own, builder.mul(inner.index, I64(2 * TERMS * BLOCK_ROWS)))
                builder.store(terms, builder.inttoptr(place, _ELEMENTS.as_pointer()), align=64)
        return context.get_dummy_value()

    return types.void(target, x, types.int64), emit


@intrinsic
def multiply_byte_panel(
    typing: Any,
    out: Array,
    x: Array,
    scratch: Array,
    bias: Array,
    width: Int,
    column: Int,
    end: Int,
    numbers: Array,
    scales: Array,
) -> Any:
    """Like `multiply_panel`, for int8 or float8 numbers, which are widened into scratch [32 * width].

    For few rows, scratch has these rows, see `widen_few`. scales: [N], which the sums are multiplied with.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factors = Memory(context, builder, scales, args[8], I64(0))
        product = _PanelProduct(context, builder, signature.args[:4], args[:4], args[4:7], factors)
        source = Memory(context, builder, numbers, args[7], I64(0))
        weights, steps, chunk = product.weights, product.steps, I64(WIDENED_STEPS)

        def widen_steps(target: Any, first: Any, last: Any) -> None:
            begin, stop = (builder.mul(step, I64(_STEP_BYTES // 64)) for step in (first, last))
            with cgutils.for_range_slice(builder, begin, stop, I64(1)) as (row, _):
                place = builder.mul(row, I64(2 * LANES))
                source.prefetch(0, builder.add(place, I64(_PREFETCH_BYTES)))
                low, high = (source.load(0, builder.add(place, I64(k * LANES))) for k in range(2))
                own = builder.add(target, builder.mul(builder.sub(row, begin), I64(64)))
                pointer = builder.inttoptr(own, _ELEMENTS.as_pointer())
                builder.store(join_bfloat16(builder, low, high), pointer, align=64)

        def find_end(first: Any) -> Any:
            last = builder.add(first, chunk)
            return builder.select(builder.icmp_signed("<", last, steps), last, steps)

        def find_weights(first: Any) -> Any:
            place = builder.urem(first, I64(2 * WIDENED_STEPS))
            return builder.add(weights, builder.mul(place, I64(_STEP_BYTES)))

        def widen_and_add(start: Any, count: Any, num_tiles: int) -> Any:
            product.clear_sums(num_tiles)
            widen_steps(weights, I64(0), find_end(I64(0)))
            with cgutils.for_range_slice(builder, I64(0), steps, chunk) as (first, _):
                # Tiles that were stored just before take long to load.
                following = find_end(first)
                widen_steps(find_weights(following), following, find_end(following))
                product.add(start, num_tiles, find_weights(first), first, following)
            return product.store_sums(num_tiles)

        def multiply_few(rows: _FewRows) -> None:
            with cgutils.for_range(builder, steps) as loop:

                def load(tile: int, pair: int) -> Sequence[Any]:
                    place = builder.add(
                        builder.mul(loop.index, I64(_STEP_BYTES // 2)),
                        I64(TERMS * (tile * TERMS // 2 + pair)),
                    )
                    if pair % 2 == 0:
                        source.prefetch(0, builder.add(place, I64(_PREFETCH_BYTES)))
                    return source.load_pairs(place)

                rows.add_step(rows.totals, loop.index, load)

        product.emit_few(multiply_few)
        with builder.if_then(builder.icmp_signed(">", product.num_rows, I64(FEW_ROWS))):
            is_few = builder.icmp_signed("<=", product.num_rows, I64(PANEL_ROWS))
            with builder.if_else(is_few) as (few, many):
                with few:
                    product.emit(widen_and_add)
                with many:
                    widen_steps(weights, I64(0), steps)
                    product.emit(
                        lambda start, count, num_tiles: product.add_steps(
                            start, num_tiles, weights, I64(0), steps
                        )
                    )
        return context.get_dummy_value()

    integers = (types.int64, types.int64, types.int64)
    return types.void(out, x, scratch, bias, *integers, numbers, scales), emit


class _PanelCodes:
    """Emits what a panel of codes needs beside the products.

    A number of the table is the sum of its parts, which are bfloat16, so the tiles multiply it as it is. The sums of
    each group of terms are multiplied with its scales in float32. A minimum is multiplied with the sum of x over the
    group.

    arrays: codes, table [parts, 32], scales, minimums, and the sums of x [T, groups].
    """

    def __init__(
        self,
        context: Any,
        builder: Any,
        kinds: Any,
        arrays: Any,
        num_groups: Any,
        is_half: Any,
        has_minimums: Any,
    ) -> None:
        self._builder, self.num_groups = builder, num_groups
        self._is_half, self._has_minimums = is_half, has_minimums
        codes, table, scales, minimums = (
            context.make_array(kind)(context, builder, array)
            for kind, array in zip(kinds[:4], arrays[:4], strict=True)
        )
        self._codes, self._table, self._scales, self._minimums = (
            builder.ptrtoint(part.data, I64) for part in (codes, table, scales, minimums)
        )
        self.num_parts, _ = cgutils.unpack_tuple(builder, table.shape)
        self._floats = Memory(context, builder, kinds[1], arrays[1])
        self._group_sums = Memory(context, builder, kinds[4], arrays[4], I64(0))

    def decode(self, target: Any, first: Any, end: Any) -> None:
        """Decodes the steps from `first` to `end` into tiles as those of `TileWeight`, from `target` on.

        A tile's 64 bytes number k hold 4 of its rows: bits 4r to 4r + 3 of word i are the code of element i of row r.
        The parts of a step follow each other.
        """
        builder = self._builder
        with (
            cgutils.for_range_slice(builder, first, end, I64(1)) as (step, _),
            cgutils.for_range(builder, self.num_parts) as parts,
        ):
            own = builder.add(self._table, builder.mul(parts.index, I64(4 * LANES)))
            table = builder.load(builder.inttoptr(own, _ELEMENTS.as_pointer()), align=2)
            place = builder.add(self._codes, builder.mul(step, I64(64 * _CODE_LINES)))
            tiles = builder.mul(builder.sub(step, first), self.num_parts)
            tiles = builder.add(target, builder.mul(builder.add(tiles, parts.index), I64(_STEP_BYTES)))
            for line in range(_CODE_LINES):
                codes = builder.add(place, I64(64 * line))
                emit_prefetch(builder, builder.inttoptr(builder.add(codes, I64(_PREFETCH_BYTES)), _BYTES))
                words = builder.load(builder.inttoptr(codes, _ELEMENTS.as_pointer()), align=64)
                for row in range(4):
                    shifted = builder.lshr(words, ir.Constant(_ELEMENTS, [4 * row] * 2 * LANES))
                    numbers = look_up_words(builder, table, shifted)
                    at = builder.add(tiles, I64(64 * (4 * line + row)))
                    builder.store(numbers, builder.inttoptr(at, _ELEMENTS.as_pointer()), align=64)

    def clear(self, totals: Any, count: Any) -> None:
        with cgutils.for_range(self._builder, count) as loop:
            for n in range(2):
                pointer = point_at(self._builder, totals, loop.index, n)
                self._builder.store(ir.Constant(VECTOR, None), pointer, align=64)

    def add_group(self, totals: Any, sums: Any, group: Any, start: Any, count: Any) -> None:
        """Adds scales * sums to `count` rows of totals, and minimums times the sums of x if there are minimums.

        start: the first of these rows in x.
        """
        builder = self._builder
        scales = self._load_columns(self._scales, group)
        with builder.if_else(self._has_minimums) as branches:
            for has_minimums, branch in zip((True, False), branches, strict=True):
                with branch:
                    minimums = self._load_columns(self._minimums, group) if has_minimums else None
                    self._add_rows(totals, sums, scales, minimums, group, start, count)

    def _add_rows(
        self, totals: Any, sums: Any, scales: Any, minimums: Any, group: Any, start: Any, count: Any
    ) -> None:
        builder = self._builder
        with cgutils.for_range(builder, count) as loop:
            if minimums is not None:
                place = builder.mul(builder.add(start, loop.index), self.num_groups)
                own = splat(builder, self._group_sums.load_scalar(0, builder.add(place, group)))
            for n in range(2):
                pointer = point_at(builder, totals, loop.index, n)
                value = builder.load(point_at(builder, sums, loop.index, n), align=64)
                total = multiply_add(builder, scales[n], value, builder.load(pointer, align=64))
                if minimums is not None:
                    total = multiply_add(builder, minimums[n], own, total)
                builder.store(total, pointer, align=64)

    def multiply_few(self, rows: _FewRows, group_steps: Any, is_rounded: Any) -> None:
        """Emits the products of few rows with the panel. is_rounded: whether `round_few` has rounded them."""
        builder = self._builder
        with builder.if_else(is_rounded) as (rounded, plain):
            with rounded:
                self._multiply_integers(rows, group_steps)
            with plain:
                for num_parts in (1, SPLIT_PARTS):
                    with builder.if_then(builder.icmp_signed("==", self.num_parts, I64(num_parts))):
                        self._multiply_few(rows, group_steps, num_parts)

    def _multiply_integers(self, rows: _FewRows, group_steps: Any) -> None:
        """Multiplies codes with the integers of few rows, int16 [T, width]."""
        builder, kind = self._builder, ir.VectorType(I32, LANES)
        places = [(row, tile) for row in range(rows.count) for tile in range(2)]
        # The upper codes of bytes count 16 times as much as the lower ones.
        sums = {(place, k): cgutils.alloca_once(builder, kind) for place in places for k in range(2)}
        width = builder.mul(builder.mul(self.num_groups, group_steps), I64(TERMS))
        with cgutils.for_range(builder, self.num_groups) as groups:
            group = groups.index
            for place in sums.values():
                builder.store(ir.Constant(kind, None), place)
            with cgutils.for_range(builder, group_steps) as steps:
                step = builder.add(builder.mul(group, group_steps), steps.index)
                for tile, line in itertools.product(range(2), range(_CODE_LINES // 2)):
                    place = I64(64 * (tile * _CODE_LINES // 2 + line))
                    place = builder.add(
                        builder.add(self._codes, place), builder.mul(step, I64(64 * _CODE_LINES))
                    )
                    emit_prefetch(builder, builder.inttoptr(builder.add(place, I64(_PREFETCH_BYTES)), _BYTES))
                    for half, k in itertools.product(range(2), range(2)):
                        own = builder.inttoptr(builder.add(place, I64(half)), kind.as_pointer())
                        mask = ir.Constant(kind, [0x000F000F << 4 * k] * LANES)
                        codes = builder.and_(builder.load(own, align=1), mask)
                        term = I64(2 * (4 * line + 2 * half + k))
                        for row in range(rows.count):
                            at = builder.add(builder.mul(width, I64(row)), builder.mul(step, I64(TERMS)))
                            at = builder.add(rows.x, builder.mul(builder.add(at, term), I64(2)))
                            pair = splat(
                                builder, builder.load(builder.inttoptr(at, I32.as_pointer()), align=4)
                            )
                            total = sums[(row, tile), k]
                            builder.store(
                                multiply_integer_pairs(builder, codes, pair, builder.load(total)), total
                            )
            values = {}
            for row, tile in places:
                lower, upper = (builder.load(sums[(row, tile), k]) for k in range(2))
                number = builder.add(lower, builder.ashr(upper, ir.Constant(kind, [4] * LANES)))
                unit, offset = (self._load_sum(rows.count, part, row, group) for part in (1, 2))
                values[row, tile] = multiply_add(builder, builder.sitofp(number, VECTOR), unit, offset)
            self._add_to_totals(rows, values, group)

    def _load_sum(self, num_rows: int, part: int, row: int, group: Any) -> Any:
        """A vector of one of the numbers of a group of x, see `round_few`. The sums are part 0."""
        place = self._builder.mul(self.num_groups, I64(part * num_rows + row))
        return splat(self._builder, self._group_sums.load_scalar(0, self._builder.add(place, group)))

    def _add_to_totals(self, rows: _FewRows, values: dict[tuple[int, int], Any], group: Any) -> None:
        """Adds scales * values, and minimums times the sums of x if there are minimums. values: by row and tile."""
        builder, scales = self._builder, self._load_columns(self._scales, group)
        for (row, tile), value in values.items():
            place = rows.totals[row][tile]
            builder.store(multiply_add(builder, scales[tile], value, builder.load(place)), place)
        with builder.if_then(self._has_minimums):
            minimums = self._load_columns(self._minimums, group)
            for row, tile in values:
                place, own = rows.totals[row][tile], self._load_sum(rows.count, 0, row, group)
                builder.store(multiply_add(builder, minimums[tile], own, builder.load(place)), place)

    def _multiply_few(self, rows: _FewRows, group_steps: Any, num_parts: int) -> None:
        builder = self._builder
        tables = [self._floats.load(part, I64(0)) for part in range(num_parts)]
        with cgutils.for_range(builder, self.num_groups) as groups:
            sums, group = rows.make_sums(), groups.index
            with cgutils.for_range(builder, group_steps) as steps:
                step = builder.add(builder.mul(group, group_steps), steps.index)
                rows.add_step(sums, step, self._bind_step(step, tables), num_parts)
            values = {
                (row, tile): builder.load(sums[row][tile]) for row in range(rows.count) for tile in range(2)
            }
            self._add_to_totals(rows, values, group)

    def _bind_step(self, step: Any, tables: Sequence[Any]) -> Callable[[int, int], Sequence[Any]]:
        """Returns the function that loads numbers of a step for `_FewRows.add_step`.

        A lane of 32 bits has a column's codes of four pairs: first those of the even terms, then those of the odd ones.
        """
        builder, kind = self._builder, ir.VectorType(I32, LANES)
        first = builder.add(self._codes, builder.mul(step, I64(64 * _CODE_LINES)))

        def load(tile: int, pair: int) -> Sequence[Any]:
            line, code = divmod(pair, 4)
            place = builder.add(first, I64(64 * (tile * _CODE_LINES // 2 + line)))
            if code == 0:
                emit_prefetch(builder, builder.inttoptr(builder.add(place, I64(_PREFETCH_BYTES)), _BYTES))
            indexes = []
            for odd in range(2):
                # Loading from another byte shifts the lanes by 8 bits, and leaves the ports of arithmetic free.
                own = builder.add(place, I64(2 * odd + code // 2))
                codes = builder.load(builder.inttoptr(own, kind.as_pointer()), align=1)
                indexes.append(builder.lshr(codes, ir.Constant(kind, [4 * (code % 2)] * LANES)))
            return [permute_lanes(builder, table, index) for table in tables for index in indexes]

        return load

    def _load_columns(self, numbers: Any, group: Any) -> list[Any]:
        """A vector with a number of each column, for each tile."""
        builder, places = self._builder, []
        for _ in range(2):
            places.append(cgutils.alloca_once(builder, VECTOR))
        with builder.if_else(self._is_half) as branches:
            for kind, size, branch in zip((ir.HalfType(), F32), (2, 4), branches, strict=True):
                with branch:
                    first = builder.add(numbers, builder.mul(group, I64(size * PANEL_COLUMNS)))
                    for n, place in enumerate(places):
                        at = builder.add(first, I64(n * size * LANES))
                        vector = ir.VectorType(kind, LANES)
                        value = builder.load(builder.inttoptr(at, vector.as_pointer()), align=size)
                        builder.store(value if kind == F32 else builder.fpext(value, VECTOR), place)
        return [builder.load(place) for place in places]


@intrinsic
def multiply_coded_panel(
    typing: Any,
    out: Array,
    x: Array,
    scratch: Array,
    bias: Array,
    width: Int,
    column: Int,
    end: Int,
    codes: Array,
    table: Array,
    scales: Array,
    minimums: Array,
    group_sums: Array,
    group_steps: Int,
    is_half: Int,
    has_minimums: Int,
    is_rounded: Int,
) -> Any:
    """Like `multiply_panel`, for a panel of codes, which is decoded into scratch [parts * 32 * width].

    For few rows, scratch has these rows, see `widen_few` and `round_few`. codes, scales, minimums: bytes of the panel.
    table: bfloat16 [parts, 32], the parts of the numbers of the codes, twice. group_sums [T, groups]: the sums of x.
    group_steps: number of steps of 32 terms in a group. is_half: whether scales and minimums are float16. is_rounded:
    whether few rows are integers.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = _PanelProduct(context, builder, signature.args[:4], args[:4], args[4:7])
        totals, weights = product.make_block(), product.weights
        steps, group_steps = product.steps, args[12]
        *flags, is_rounded = (builder.icmp_signed("!=", flag, I64(0)) for flag in args[13:16])
        num_groups = builder.udiv(steps, group_steps)
        panel = _PanelCodes(context, builder, signature.args[7:12], args[7:12], num_groups, *flags)

        def add_groups(start: Any, count: Any, num_tiles: int, *, is_decoded: bool) -> Any:
            def find_weights(first: Any) -> Any:
                place = first if is_decoded else builder.urem(first, builder.mul(group_steps, I64(2)))
                place = builder.mul(place, panel.num_parts)
                return builder.add(weights, builder.mul(place, I64(_STEP_BYTES)))

            def find_end(first: Any) -> Any:
                end = builder.add(first, group_steps)
                return builder.select(builder.icmp_signed("<", end, steps), end, steps)

            panel.clear(totals, count)
            if not is_decoded:
                panel.decode(weights, I64(0), group_steps)
            with cgutils.for_range(builder, num_groups) as groups:
                first = builder.mul(groups.index, group_steps)
                following = builder.add(first, group_steps)
                if not is_decoded:
                    # Tiles that were stored just before take long to load.
                    panel.decode(find_weights(following), following, find_end(following))
                own = find_weights(first)
                sums = product.add_steps(start, num_tiles, own, first, following, panel.num_parts)
                panel.add_group(totals, sums, groups.index, start, count)
            return totals

        product.emit_few(lambda rows: panel.multiply_few(rows, group_steps, is_rounded))
        with builder.if_then(builder.icmp_signed(">", product.num_rows, I64(FEW_ROWS))):
            is_few = builder.icmp_signed("<=", product.num_rows, I64(PANEL_ROWS))
            with builder.if_else(is_few) as (few, many):
                with few:
                    product.emit(partial(add_groups, is_decoded=False))
                with many:
                    panel.decode(weights, I64(0), product.steps)
                    product.emit(partial(add_groups, is_decoded=True))
        return context.get_dummy_value()

    integers = (types.int64, types.int64, types.int64)
    coded = (codes, table, scales, minimums, group_sums, *integers, types.int64)
    return types.void(out, x, scratch, bias, *integers, *coded), emit


@intrinsic
def sum_columns(typing: Any, x: Array, first: Int, end: Int) -> Any:
    """The sum of x from column `first` to `end` - 1, a multiple of 32 columns."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = Memory(context, builder, x, args[0], I64(0))
        totals = [cgutils.alloca_once(builder, VECTOR) for _ in range(TERMS // LANES)]
        for place in totals:
            builder.store(ir.Constant(VECTOR, None), place)
        with cgutils.for_range_slice(builder, args[1], args[2], I64(TERMS)) as (column, _):
            for k, place in enumerate(totals):
                own = numbers.load(0, builder.add(column, I64(k * LANES)))
                builder.store(builder.fadd(builder.load(place), own, flags=IN_ORDER), place)
        total = builder.fadd(*map(builder.load, totals), flags=IN_ORDER)
        return builder.extract_element(sum_lanes(builder, [total]), I32(0))

    return types.float32(x, types.int64, types.int64), emit


@compiled
def sum_groups(sums: Array, x: Array, width: Int) -> None:
    """sums [T * groups] = the sums of each row of x [T, width] over groups of adjacent columns."""
    num_groups = sums.shape[0] // x.shape[0]
    group = width // num_groups
    for t in range(x.shape[0]):
        row = x[t]
        for g in range(num_groups):
            sums[t * num_groups + g] = sum_columns(row, g * group, (g + 1) * group)


@compiled
def widen_few(target: Array, x: Array, width: Int) -> None:
    """Stores few rows x [T, width] as float32. target: 16-bit words."""
    if x.shape[0] > FEW_ROWS:
        return
    for t in range(x.shape[0]):
        row, words = x[t], target[2 * t * width : 2 * (t + 1) * width]
        for k in range(width):
            words[2 * k], words[2 * k + 1] = 0, row[k]


def _bind_rounding(*, stores_integers: bool) -> Callable[..., Any]:
    """Makes an intrinsic that rounds x to multiples of a unit. It stores them as bfloat16 or their factors as int16."""

    @intrinsic
    def round_part(typing: Any, target: Array, x: Array, unit: Float, inverse: Float) -> Any:
        """Returns the sum of the factors. inverse: 1 / unit. x: whole vectors. target: 16-bit words."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results, numbers = (
                Memory(context, builder, signature.args[k], args[k], I64(0)) for k in range(2)
            )
            (size,) = cgutils.unpack_tuple(builder, context.make_array(x)(context, builder, args[1]).shape)
            step, factor = splat(builder, args[2]), splat(builder, args[3])
            kind = ir.VectorType(I32, LANES)
            total = cgutils.alloca_once(builder, kind)
            builder.store(ir.Constant(kind, None), total)
            with cgutils.for_range_slice(builder, I64(0), size, I64(LANES)) as (column, _):
                scaled = builder.fmul(numbers.load(0, column), factor, flags=IN_ORDER)
                factors = round_to_integers(builder, scaled)
                builder.store(builder.add(builder.load(total), factors), total)
                if stores_integers:
                    results.store_stored(0, column, builder.trunc(factors, ir.VectorType(_I16, LANES)))
                else:
                    multiples = builder.fmul(builder.sitofp(factors, VECTOR), step, flags=IN_ORDER)
                    results.store(0, column, multiples)
            reduce = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(I32, [kind]), "llvm.vector.reduce.add.v16i32"
            )
            return builder.sitofp(builder.call(reduce, [builder.load(total)]), F32)

        return types.float32(target, x, types.float32, types.float32), emit

    return round_part


store_factors, store_multiples = _bind_rounding(stores_integers=True), _bind_rounding(stores_integers=False)


@intrinsic
def find_exponent(typing: Any, x: Array) -> Any:
    """The largest exponent of the bfloat16 numbers x, in steps of 32 numbers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = Memory(context, builder, x, args[0], I64(0))
        (size,) = cgutils.unpack_tuple(builder, context.make_array(x)(context, builder, args[0]).shape)
        largest = cgutils.alloca_once(builder, _ELEMENTS)
        builder.store(ir.Constant(_ELEMENTS, None), largest)
        with cgutils.for_range_slice(builder, I64(0), size, I64(TERMS)) as (column, _):
            magnitude = ir.Constant(_ELEMENTS, [0x7FFF] * TERMS)
            own, before = (
                builder.and_(numbers.load_stored(0, column, TERMS), magnitude),
                builder.load(largest),
            )
            builder.store(builder.select(builder.icmp_signed(">", own, before), own, before), largest)
        kind = ir.FunctionType(_I16, [_ELEMENTS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.smax.v32i16")
        return builder.zext(builder.lshr(builder.call(reduce, [builder.load(largest)]), _I16(7)), I32)

    return types.int32(x), emit


@compiled
def find_unit(x: Array, num_bits: Int) -> tuple[Int, Int]:
    """The bits of the float32 unit that a group of x is rounded to multiples of, and those of its inverse.

    num_bits: the multiples have at most so many bits.
    """
    exponent, shift = find_exponent(x), np.int32(num_bits - 1)
    if exponent > _MOST_EXPONENT:
        return np.int32(_NAN_BITS), np.int32(0)
    if exponent < _LEAST_EXPONENT:
        return np.int32(0), np.int32(0)
    return np.int32((exponent - shift) << 23), np.int32((254 - exponent + shift) << 23)


@compiled
def round_few(
    target: Array, numbers: Array, x: Array, width: Int, group: Int, num_bits: Int, lowest: Int
) -> None:
    """Rounds few rows x [T, width] to integers times the unit of each group, as 16-bit words of `target`.

    numbers: float32 [3, T, groups]: the sums, the units, and the sums times the number of the code 0, `lowest`.
    """
    num_groups = width // group
    count = x.shape[0] * num_groups
    for t in range(x.shape[0]):
        row, words = x[t], target[t * width : (t + 1) * width]
        for g in range(num_groups):
            part = row[g * group : (g + 1) * group]
            unit_bits, inverse_bits = find_unit(part, num_bits)
            unit, place = from_bits(unit_bits), t * num_groups + g
            total = unit * store_factors(words[g * group :], part, unit, from_bits(inverse_bits))
            numbers[place], numbers[count + place] = total, unit
            numbers[2 * count + place] = total * np.float32(lowest)


@compiled
def round_row(target: Array, x: Array, group: Int, num_bits: Int) -> None:
    """Rounds a row x as `round_few` does. target [width]: the multiples as bfloat16."""
    for first in range(0, target.shape[0], group):
        part = x[first : first + group]
        unit_bits, inverse_bits = find_unit(part, num_bits)
        store_multiples(target[first:], part, from_bits(unit_bits), from_bits(inverse_bits))


# Fields of a job. ITEM_SIZE: the rows of an item, or in jobs with codes or bytes its panels. In these jobs PANELS are
# scratch. Other jobs have TILED_ROWS after ITEM_SIZE, scratch of each thread or absent, and no further fields.
(
    X, PANELS, OUT, BIAS, WIDTH, OUT_WIDTH, ITEM_SIZE,
    CODES, TABLE, SCALES, MINIMUMS, GROUP_SUMS, GROUP_STEPS, IS_HALF, HAS_MINIMUMS,
    NUM_BITS, LOWEST, NUM_ROUNDED, ROUNDED,
) = range(19)  # fmt: skip
TILED_ROWS = CODES


def bind_linear(
    multiply: Callable[..., None], multiply_ordered: Callable[..., None]
) -> Callable[[Job], None]:
    """Returns a function that multiplies rows with panels, and adds a bias. Each item of its job is a panel for one
    block of rows.

    multiply, multiply_ordered: like `multiply_panel` and `multiply_tiled_panel`.
    """

    @compiled
    def multiply_items(job: Job) -> None:
        x, out, panels = (
            read_model_matrix(job, X),
            read_model_matrix(job, OUT),
            read_model_matrix(job, PANELS),
        )
        bias, width, out_width = read_float_matrix(job, BIAS), read_int(job, WIDTH), read_int(job, OUT_WIDTH)
        size, scratch, ordered = read_int(job, ITEM_SIZE), read_model_matrix(job, TILED_ROWS), -1
        thread, num_threads = take_thread_index(job), scratch.shape[0]
        item, share = take_shared_item(job, thread)
        while item < count_items(job):
            # Adjacent items have the same rows, which stay in the cache.
            first, panel = item // panels.shape[0] * size, item % panels.shape[0]
            last = min(first + size, x.shape[0])
            column = panel * PANEL_COLUMNS
            if num_threads and last - first > BLOCK_ROWS:
                blocks = scratch[thread]
                if first != ordered:
                    order_rows(blocks, x[first:last], width)
                    ordered = first
                following = panels[min(panel + num_threads, panels.shape[0] - 1)]
                multiply_ordered(
                    out[first:last], blocks, panels[panel], bias, width, column, out_width, following
                )
            else:
                multiply(out[first:last], x[first:last], panels[panel], bias, width, column, out_width)
            item, share = take_shared_item(job, share)

    return multiply_items


_multiply_items = bind_linear(multiply_panel, multiply_tiled_panel)


def linear_worker(job: Job) -> None:
    """Multiplies rows with panels in tiles. See `bind_linear`."""
    mode = configure_tiles()
    _multiply_items(job)
    release_tiles(mode)


def coded_linear_worker(job: Job) -> None:
    """Multiplies rows with panels of codes. Each item of the job is some adjacent panels, for all rows.

    If many rows are to be rounded, the first items are a row each. Each thread rounds fewer rows for itself, because
    reading them from another core's cache takes longer.
    """
    mode = configure_tiles()
    x, out = read_model_matrix(job, X), read_model_matrix(job, OUT)
    thread = take_thread_index(job)
    scratch, sums = read_model_matrix(job, PANELS)[thread], read_float_matrix(job, GROUP_SUMS)[thread]
    bias, width, out_width = read_float_matrix(job, BIAS), read_int(job, WIDTH), read_int(job, OUT_WIDTH)
    codes, table = read_byte_matrix(job, CODES), read_model_matrix(job, TABLE)
    scales, minimums = read_byte_matrix(job, SCALES), read_byte_matrix(job, MINIMUMS)
    steps, is_half, has_minimums = (
        read_int(job, GROUP_STEPS),
        read_int(job, IS_HALF),
        read_int(job, HAS_MINIMUMS),
    )
    size, num_bits, num_rounded = (
        read_int(job, ITEM_SIZE),
        read_int(job, NUM_BITS),
        read_int(job, NUM_ROUNDED),
    )
    item = take_item(job)
    num_rows, rounded = x.shape[0], read_model_matrix(job, ROUNDED)
    if num_rounded:
        while item < num_rounded:
            round_row(rounded[item], x[item], steps * TERMS, num_bits)
            count_prepared(job)
            item = take_item(job)
        await_prepared(job, num_rounded)
        x = rounded
    elif num_bits and num_rows > FEW_ROWS:
        own = rounded[thread * num_rows : (thread + 1) * num_rows]
        for t in range(num_rows):
            round_row(own[t], x[t], steps * TERMS, num_bits)
        x = own
    if num_bits and num_rows <= FEW_ROWS:
        round_few(scratch, sums, x, width, steps * TERMS, num_bits, read_int(job, LOWEST))
    else:
        widen_few(scratch, x, width)
        if has_minimums:
            sum_groups(sums, x, width)
    while item < count_items(job):
        first = (item - num_rounded) * size
        for panel in range(first, min(first + size, codes.shape[0])):
            column, own_scales, own_codes = panel * PANEL_COLUMNS, scales[panel], codes[panel]
            own_minimums = minimums[panel] if has_minimums else own_scales
            multiply_coded_panel(
                out, x, scratch, bias, width, column, out_width,
                own_codes, table, own_scales, own_minimums, sums, steps, is_half, has_minimums, num_bits,
            )  # fmt: skip
        item = take_item(job)
    release_tiles(mode)


def int8_linear_worker(job: Job) -> None:
    """Like `coded_linear_worker`, for panels of int8."""
    multiply_byte_panels(job, read_signed_byte_matrix(job, CODES))


def float8_linear_worker(job: Job) -> None:
    """Like `coded_linear_worker`, for panels of float8_e4m3fn without NaN."""
    multiply_byte_panels(job, read_byte_matrix(job, CODES))


@compiled
def multiply_byte_panels(job: Job, numbers: Array) -> None:
    mode = configure_tiles()
    x, out = read_model_matrix(job, X), read_model_matrix(job, OUT)
    scratch, scales = read_model_matrix(job, PANELS)[take_thread_index(job)], read_float_matrix(job, SCALES)
    bias, width, out_width = read_float_matrix(job, BIAS), read_int(job, WIDTH), read_int(job, OUT_WIDTH)
    widen_few(scratch, x, width)
    size, item = read_int(job, ITEM_SIZE), take_item(job)
    while item < count_items(job):
        for panel in range(item * size, min((item + 1) * size, numbers.shape[0])):
            column, own = panel * PANEL_COLUMNS, numbers[panel]
            multiply_byte_panel(out, x, scratch, bias, width, column, out_width, own, scales)
        item = take_item(job)
    release_tiles(mode)
