"""Weighted sums of rows for a few tokens at a time. Each token has a factor of its own for each row."""

from collections.abc import Callable
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import (
    HAS_BFLOAT16_DOT,
    LANES,
)
from slora_kernels.cpu.workers.intrinsics import Array, Float, Int, compiled, intrinsic
from slora_kernels.cpu.workers.vectors import (
    I32,
    I64,
    MAX_ACCUMULATORS,
    MAX_TOKENS,
    VECTOR,
    Memory,
    access_operands,
    dispatch_by_tokens,
    mask_below,
    multiply_add,
    multiply_add_pairs,
    shuffle,
    splat,
)


class _SingleRows:
    """Reads one row at a time and multiplies in float32."""

    step = 1
    multiply = staticmethod(multiply_add)

    def __init__(
        self, builder: Any, factors: Memory, rows: Memory, first: Callable[[Any], Any], vectors: int
    ) -> None:
        """first: returns the index of a row's first element."""
        self._builder, self._factors, self._rows, self._first = builder, factors, rows, first
        self._starts = [I64(v * LANES) for v in range(vectors)]

    def prefetch(self, row: Any, ahead: Any) -> None:
        first = self._builder.add(self._first(row), ahead)
        for start in self._rows.lines(self._starts):
            self._rows.prefetch(0, self._builder.add(first, start))

    def weights(self, row: Any) -> list[Any]:
        first = self._first(row)
        return [self._rows.load(0, self._builder.add(first, start)) for start in self._starts]

    def factor(self, token: int, row: Any) -> Any:
        return splat(self._builder, self._factors.load_widened_scalar(token, row))

    def in_order(self, totals: list[Any]) -> list[Any]:
        """Returns the sums in the order of their columns."""
        return totals


class _PairedRows(_SingleRows):
    """Reads two bfloat16 rows at a time, with the two elements of a column next to each other.

    The CPU interleaves fastest within groups of 16 bytes. This changes the order of the columns, and `in_order`
    restores it.
    """

    step = 2
    multiply = staticmethod(multiply_add_pairs)
    _LOW: ClassVar = [
        place
        for lane in range(0, 2 * LANES, 8)
        for k in range(lane, lane + 4)
        for place in (k, k + 2 * LANES)
    ]
    _HIGH: ClassVar = [place + 4 for place in _LOW]
    # The sums of 2 * LANES columns are in two vectors. _FRONT selects the sums of the first LANES columns, and _BACK
    # selects the sums of the last LANES columns.
    _FRONT: ClassVar = [
        place
        for k in range(0, LANES // 2, 4)
        for half in (0, LANES)
        for place in range(half + k, half + k + 4)
    ]
    _BACK: ClassVar = [place + LANES // 2 for place in _FRONT]

    def weights(self, row: Any, *, alone: bool = False) -> list[Any]:
        builder, found = self._builder, []
        pair = (self._first(row), None if alone else self._first(builder.add(row, I64(1))))
        wide = len(self._starts) // 2 * 2
        for start in self._starts[:wide:2]:
            a, b = self._load_two(pair, start, 2 * LANES)
            found += [shuffle(builder, a, b, self._LOW), shuffle(builder, a, b, self._HIGH)]
        for start in self._starts[wide:]:
            a, b = self._load_two(pair, start, LANES)
            found.append(shuffle(builder, a, b, [place for k in range(LANES) for place in (k, k + LANES)]))
        return found

    def factor(self, token: int, row: Any, *, alone: bool = False) -> Any:
        builder = self._builder
        if alone:  # the row is the last one, so there is no second factor to read
            both = builder.zext(self._factors.load_scalar(token, row), I32)
        else:
            both = builder.load(self._factors.pointer(token, row, I32), align=2)
        return splat(builder, both)

    def in_order(self, totals: list[Any]) -> list[Any]:
        builder, ordered = self._builder, []
        wide = len(totals) // 2 * 2
        for low, high in zip(totals[:wide:2], totals[1:wide:2], strict=True):
            ordered += [shuffle(builder, low, high, self._FRONT), shuffle(builder, low, high, self._BACK)]
        return ordered + totals[wide:]

    def _load_two(self, pair: tuple[Any, Any], column: Any, lanes: int) -> tuple[Any, Any]:
        first, second = pair
        a = self._rows.load_stored(0, self._builder.add(first, column), lanes)
        if second is None:
            return a, ir.Constant(a.type, None)
        return a, self._rows.load_stored(0, self._builder.add(second, column), lanes)


def _emit_weighted_sums(tokens: int, vectors: int) -> Callable[..., None]:
    """Builds the block (see `vectors`) for target [tokens, size] += scale * factors [tokens, count] times `count` rows.

    The block computes vectors * LANES columns, or `size` columns if that is less and `vectors` is 1.
    """

    @intrinsic
    def weighted_sums(
        typing: Any,
        target: Array,
        factors: Array,
        weights: Array,
        pitch: Array | Int,
        ahead: Int,
        scale: Float,
        count: Int,
        size: Int,
    ) -> Any:
        in_pairs = HAS_BFLOAT16_DOT and factors.dtype == weights.dtype == types.uint16
        starts = pitch if isinstance(pitch, types.Array) else None

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results, factors_of, rows_of = access_operands(context, builder, signature, args)
            kind = _PairedRows if in_pairs else _SingleRows

            def first(row: Any) -> Any:
                if starts is None:
                    return builder.mul(row, args[3])
                return Memory(context, builder, starts, args[3], I64(0)).load_scalar(0, row)

            rows = kind(builder, factors_of, rows_of, first, vectors)
            zero = ir.Constant(VECTOR, None)
            totals = [
                [cgutils.alloca_once_value(builder, zero) for _ in range(vectors)] for _ in range(tokens)
            ]

            def step(row: Any, **named: bool) -> None:
                for k in range(rows.step):
                    rows.prefetch(builder.add(row, I64(k)), args[4])
                found = rows.weights(row, **named)
                for t in range(tokens):
                    factor = rows.factor(t, row, **named)
                    for total, weight in zip(totals[t], found, strict=True):
                        builder.store(rows.multiply(builder, factor, weight, builder.load(total)), total)

            whole = builder.and_(args[6], I64(-rows.step))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(rows.step)) as (row, _):
                step(row)
            if rows.step > 1:
                with cgutils.if_unlikely(builder, builder.icmp_signed("<", whole, args[6])):
                    step(whole, alone=True)
            scale = splat(builder, args[5])
            mask = mask_below(builder, args[7]) if vectors == 1 else None
            for t in range(tokens):
                sums = rows.in_order([builder.load(total) for total in totals[t]])
                for v, total in enumerate(sums):
                    before = results.load(t, I64(v * LANES), mask)
                    results.store(t, I64(v * LANES), multiply_add(builder, scale, total, before), mask)
            return context.get_dummy_value()

        numbers = (starts or types.int64, types.int64, types.float32, types.int64, types.int64)
        return types.void(target, factors, weights, *numbers), emit

    return weighted_sums


_add_sixteen_vectors, _add_eight_vectors = (
    _emit_weighted_sums(1, MAX_ACCUMULATORS),
    _emit_weighted_sums(2, MAX_ACCUMULATORS // 2),
)
_add_four_vectors = dispatch_by_tokens(lambda tokens: _emit_weighted_sums(tokens, 4))
_add_one_vector = dispatch_by_tokens(lambda tokens: _emit_weighted_sums(tokens, 1))


@compiled
def add_weighted_rows(
    target: Array,
    factors: Array,
    weights: Array,
    pitch: Array | Int,
    ahead: Int,
    scale: Float,
    size: Int,
    count: Int,
) -> None:
    """target [t, size] += scale * factors [t, count] times `count` rows of `size` elements.

    pitch: distance between rows in elements, or an int64 array with the start of each row.
    ahead: how many elements ahead of the reads to prefetch.

    Rows are read in whole vectors, so memory after the last row must be readable up to a whole vector.
    """
    for t in range(0, target.shape[0], MAX_TOKENS):
        sums, own, column = target[t : t + MAX_TOKENS], factors[t : t + MAX_TOKENS], 0
        if sums.shape[0] == 1:
            while column + MAX_ACCUMULATORS * LANES <= size:
                part, rows = sums[:, column:], weights[column:]
                _add_sixteen_vectors(part, own, rows, pitch, ahead, scale, count, size - column)
                column += MAX_ACCUMULATORS * LANES
        elif sums.shape[0] == 2:
            while column + MAX_ACCUMULATORS // 2 * LANES <= size:
                part, rows = sums[:, column:], weights[column:]
                _add_eight_vectors(part, own, rows, pitch, ahead, scale, count, size - column)
                column += MAX_ACCUMULATORS // 2 * LANES
        while column + 4 * LANES <= size:
            part, rows = sums[:, column:], weights[column:]
            _add_four_vectors(part, own, rows, pitch, ahead, scale, count, size - column)
            column += 4 * LANES
        while column < size:
            part, rows = sums[:, column:], weights[column:]
            _add_one_vector(part, own, rows, pitch, ahead, scale, count, size - column)
            column += LANES
