"""Blocks of a product in explicit vectors: a few tokens times a few rows of weights, with the sums in registers.

Left to itself, LLVM makes vectors of the loop for one token, and the next token reads and widens the same weights
again. A block reads and widens each number once for all its tokens. Each sum is formed in the same order whatever
block it is in, lane by lane from the first number on: a token's result is the same to the bit alone and among others.

Rows of weights are of the model's dtype and lie `pitch` numbers apart.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.numba_language import Array, Int, compiled, emitted, widen_value

# Machines with AVX-512 have 32 registers of 16 numbers; a block's sums take 16 of them. Others have 16 of 8.
LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_INDEXES = ir.VectorType(_I32, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


class _Memory:
    """Rows of numbers somewhere: `pitch` from one to the next."""

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any, pitch: Any = None) -> None:
        made = context.make_array(kind)(context, builder, array)
        self._builder = builder
        self._element = kind.dtype
        self._stored = context.get_data_type(kind.dtype)
        self._size = context.get_abi_sizeof(self._stored)
        self._first = builder.ptrtoint(made.data, _I64)
        self._column_bytes, stride = _I64(self._size), None
        if kind.ndim == 2:
            stride, self._column_bytes = cgutils.unpack_tuple(builder, made.strides)
        self._stride = builder.mul(pitch, _I64(self._size)) if pitch is not None else stride

    def pointer(self, row: int, column: Any, kind: Any) -> Any:
        builder = self._builder
        address = builder.add(self._first, builder.mul(self._stride, _I64(row)))
        return builder.inttoptr(
            builder.add(address, builder.mul(column, self._column_bytes)), kind.as_pointer()
        )

    def load(self, row: int, column: Any, mask: Any = None) -> Any:
        """float32 lanes from `column` on; where the mask is false, zeros, and nothing is read."""
        builder, lanes = self._builder, ir.VectorType(self._stored, LANES)
        pointer = self.pointer(row, column, lanes)
        if mask is None:
            raw = builder.load(pointer, align=self._size)
        else:
            suffix = "f32" if self._stored == _F32 else f"i{8 * self._size}"
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(lanes, [lanes.as_pointer(), _I32, _MASK, lanes]),
                f"llvm.masked.load.v{LANES}{suffix}.p0",
            )
            raw = builder.call(function, [pointer, _I32(self._size), mask, ir.Constant(lanes, None)])
        return widen_value(builder, self._element, raw, LANES)

    def load_one(self, row: int, column: Any) -> Any:
        return self._builder.load(self.pointer(row, column, self._stored))

    def store(self, row: int, column: Any, value: Any) -> None:
        kind = value.type
        self._builder.store(value, self.pointer(row, column, kind), align=self._size)


def _operands(context: Any, builder: Any, signature: Any, args: Any) -> tuple[_Memory, _Memory, _Memory]:
    """Of a block's arguments: the sums, what is multiplied, and the rows of weights, `pitch` (the fourth) apart."""
    sums, x, weights = signature.args[:3]
    return (
        _Memory(context, builder, sums, args[0]),
        _Memory(context, builder, x, args[1]),
        _Memory(context, builder, weights, args[2], args[3]),
    )


def _splat(builder: Any, value: Any) -> Any:
    """All lanes the same."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, value, _I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_INDEXES, None))


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the machine can."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(function, [a, b, c])


def _join(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """The lanes of a, and behind them those of b, that are named."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _sum_lanes(builder: Any, vectors: list[Any]) -> Any:
    """One lane for each of the vectors: the sum of its lanes, half upon half. All of them take about as many
    instructions together as three would one by one."""
    while len(vectors) & (len(vectors) - 1):
        vectors = [*vectors, ir.Constant(_VECTOR, None)]
    part = LANES  # lanes that each sum is spread over
    while part > 1:
        part //= 2
        if len(vectors) > 1:
            low = [lane for lane in range(2 * LANES) if lane % (2 * part) < part]
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        else:
            low = [lane for lane in range(vectors[0].type.count) if lane % (2 * part) < part]
            pairs = [(vectors[0], vectors[0])]
        high = [lane + part for lane in low]
        vectors = [builder.fadd(_join(builder, a, b, low), _join(builder, a, b, high)) for a, b in pairs]
    return vectors[0]


def _emit_dots(tokens: int, rows: int) -> Callable[..., None]:
    """sums [tokens, rows] += x [tokens, count] times `rows` rows of weights."""

    @emitted
    def dots(typing: Any, sums: Array, x: Array, weights: Array, pitch: Int, count: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, tokens_of, rows_of = _operands(context, builder, signature, args)
            totals = {
                (t, r): cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None))
                for t in range(tokens)
                for r in range(rows)
            }

            def step(column: Any, mask: Any = None) -> None:
                numbers = [tokens_of.load(t, column, mask) for t in range(tokens)]
                for r in range(rows):
                    weight = rows_of.load(r, column, mask)
                    for t in range(tokens):
                        total = totals[t, r]
                        builder.store(_fused(builder, numbers[t], weight, builder.load(total)), total)

            whole = builder.and_(args[4], _I64(-LANES))
            with cgutils.for_range_slice(builder, _I64(0), whole, _I64(LANES)) as (column, _):
                step(column)
            left = builder.sub(args[4], whole)
            with cgutils.if_unlikely(builder, builder.icmp_signed(">", left, _I64(0))):
                lanes = ir.Constant(_INDEXES, list(range(LANES)))
                step(whole, builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(left, _I32))))
            found = _sum_lanes(builder, [builder.load(total) for total in totals.values()])
            row = ir.VectorType(_F32, rows)
            for t in range(tokens):
                place = target.pointer(t, _I64(0), row)
                mine = _join(builder, found, found, list(range(t * rows, (t + 1) * rows)))
                builder.store(builder.fadd(builder.load(place, align=4), mine), place, align=4)
            return context.get_dummy_value()

        return types.void(sums, x, weights, types.int64, types.int64), emit

    return dots


def _emit_gathers(tokens: int, vectors: int) -> Callable[..., None]:
    """sums [tokens, vectors * LANES] += factors [tokens, count] times `count` rows, one after the other."""

    @emitted
    def gathers(typing: Any, sums: Array, factors: Array, weights: Array, pitch: Int, count: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, factors_of, rows_of = _operands(context, builder, signature, args)
            starts = [_I64(v * LANES) for v in range(vectors)]
            totals = {
                (t, v): cgutils.alloca_once_value(builder, target.load(t, start))
                for t in range(tokens)
                for v, start in enumerate(starts)
            }
            with cgutils.for_range(builder, args[4]) as loop:
                first = builder.mul(loop.index, args[3])
                rows = [rows_of.load(0, builder.add(first, start)) for start in starts]
                for t in range(tokens):
                    factor = _splat(builder, factors_of.load_one(t, loop.index))
                    for v in range(vectors):
                        total = totals[t, v]
                        builder.store(_fused(builder, factor, rows[v], builder.load(total)), total)
            for (t, v), total in totals.items():
                target.store(t, starts[v], builder.load(total))
            return context.get_dummy_value()

        return types.void(sums, factors, weights, types.int64, types.int64), emit

    return gathers


def _emit_additions(tokens: int, rows: int) -> Callable[..., None]:
    """sums [tokens, count] += factors [tokens, rows] times `rows` rows of weights; one row after the other."""

    @emitted
    def additions(typing: Any, sums: Array, factors: Array, weights: Array, pitch: Int, count: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, factors_of, rows_of = _operands(context, builder, signature, args)
            factor = {
                (t, r): _splat(builder, factors_of.load_one(t, _I64(r)))
                for t in range(tokens)
                for r in range(rows)
            }
            with cgutils.for_range_slice(builder, _I64(0), args[4], _I64(LANES)) as (column, _):
                weight = [rows_of.load(r, column) for r in range(rows)]
                for t in range(tokens):
                    total = target.load(t, column)
                    for r in range(rows):
                        total = _fused(builder, factor[t, r], weight[r], total)
                    target.store(t, column, total)
            return context.get_dummy_value()

        return types.void(sums, factors, weights, types.int64, types.int64), emit

    return additions


# Sums take 16 of 32 registers, or half of 16.
_MOST_TOKENS = 4 if LANES == 16 else 2


def _for_tokens(emit: Callable[[int], Callable[..., None]]) -> Callable[..., None]:
    """A function of sums, of what is multiplied, both a row a token, of weights, of their pitch, and of a count."""
    most, three, two, one = emit(_MOST_TOKENS), emit(3), emit(2), emit(1)

    @compiled
    def run(sums: Array, x: Array, weights: Array, pitch: Int, count: Int) -> None:
        tokens, t = sums.shape[0], 0
        while t + _MOST_TOKENS <= tokens:
            most(sums[t:], x[t:], weights, pitch, count)
            t += _MOST_TOKENS
        if tokens - t == 3:
            three(sums[t:], x[t:], weights, pitch, count)
        elif tokens - t == 2:
            two(sums[t:], x[t:], weights, pitch, count)
        elif tokens - t == 1:
            one(sums[t:], x[t:], weights, pitch, count)

    return run


# sums [t, 4] += x [t, count] times the four rows that begin in `weights`, `pitch` apart; the same of one row.
add_four_dots = _for_tokens(lambda tokens: _emit_dots(tokens, 4))
add_one_dot = _for_tokens(lambda tokens: _emit_dots(tokens, 1))
# sums [t, count] += factors [t, 4] times four rows; the same of one row. Both sums and rows are read in whole vectors:
# there must be room for as much beyond `count`, which only sums are spoilt by.
add_four_rows_to_each = _for_tokens(lambda tokens: _emit_additions(tokens, 4))
add_one_row_to_each = _for_tokens(lambda tokens: _emit_additions(tokens, 1))
_gather_four = _for_tokens(lambda tokens: _emit_gathers(tokens, 4))
_gather_one = _for_tokens(lambda tokens: _emit_gathers(tokens, 1))


@compiled
def gather_rows(sums: Array, factors: Array, weights: Array, size: Int, count: Int) -> None:
    """sums [t, size] += factors [t, count] times `count` rows of `size` numbers, one behind the other.

    `size` must be a multiple of LANES.
    """
    column = 0
    while column + 4 * LANES <= size:
        _gather_four(sums[:, column:], factors, weights[column:], size, count)
        column += 4 * LANES
    while column < size:
        _gather_one(sums[:, column:], factors, weights[column:], size, count)
        column += LANES
