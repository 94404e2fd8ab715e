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


def _sum_lanes(builder: Any, value: Any) -> Any:
    """Halves upon halves, always in this order."""
    width = LANES
    while width > 1:
        width //= 2
        nothing = ir.Constant(value.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(
                value, nothing, ir.Constant(ir.VectorType(_I32, width), list(range(start, start + width)))
            )
            for start in (0, width)
        )
        value = builder.fadd(low, high)
    return builder.extract_element(value, _I32(0))


def _emit_dots(tokens: int, rows: int) -> Callable[..., None]:
    """sums [tokens, rows] += x [tokens, count] times `rows` rows of weights."""

    @emitted
    def dots(typing: Any, sums: Array, x: Array, weights: Array, pitch: Int, count: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            target = _Memory(context, builder, kinds[0], args[0])
            tokens_of = _Memory(context, builder, kinds[1], args[1])
            rows_of = _Memory(context, builder, kinds[2], args[2], args[3])
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
            for (t, r), total in totals.items():
                column = _I64(r)
                before = target.load_one(t, column)
                after = builder.fadd(before, _sum_lanes(builder, builder.load(total)))
                target.store(t, column, after)
            return context.get_dummy_value()

        return types.void(sums, x, weights, types.int64, types.int64), emit

    return dots


def _emit_additions(tokens: int, rows: int) -> Callable[..., None]:
    """sums [tokens, count] += factors [tokens, rows] times `rows` rows of weights; one row after the other."""

    @emitted
    def additions(typing: Any, sums: Array, factors: Array, weights: Array, pitch: Int, count: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            target = _Memory(context, builder, kinds[0], args[0])
            factors_of = _Memory(context, builder, kinds[1], args[1])
            rows_of = _Memory(context, builder, kinds[2], args[2], args[3])
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


# Sums, factors and a row of numbers each fill the registers: 16 of 32, or half of 16.
_FOUR = 4 if LANES == 16 else 2
_dots_wide, _dots_two, _dots_one = _emit_dots(_FOUR, 4), _emit_dots(2, 4), _emit_dots(1, 4)
_dots_wide_row, _dots_two_row, _dots_one_row = _emit_dots(_FOUR, 1), _emit_dots(2, 1), _emit_dots(1, 1)
_add_wide, _add_two, _add_one = _emit_additions(_FOUR, 4), _emit_additions(2, 4), _emit_additions(1, 4)
_add_wide_row, _add_two_row, _add_one_row = (
    _emit_additions(_FOUR, 1),
    _emit_additions(2, 1),
    _emit_additions(1, 1),
)


@compiled
def add_dots_of_four(sums: Array, x: Array, weights: Array, pitch: Int, count: Int) -> None:
    """sums [t, 4] += x [t, count] times the four rows that begin in `weights`, `pitch` apart."""
    tokens, t = sums.shape[0], 0
    while t + _FOUR <= tokens:
        _dots_wide(sums[t:], x[t:], weights, pitch, count)
        t += _FOUR
    if t + 2 <= tokens:
        _dots_two(sums[t:], x[t:], weights, pitch, count)
        t += 2
    if t < tokens:
        _dots_one(sums[t:], x[t:], weights, pitch, count)


@compiled
def add_dots_of_one(sums: Array, x: Array, weights: Array, count: Int) -> None:
    """The same of one row."""
    tokens, t = sums.shape[0], 0
    while t + _FOUR <= tokens:
        _dots_wide_row(sums[t:], x[t:], weights, 0, count)
        t += _FOUR
    if t + 2 <= tokens:
        _dots_two_row(sums[t:], x[t:], weights, 0, count)
        t += 2
    if t < tokens:
        _dots_one_row(sums[t:], x[t:], weights, 0, count)


@compiled
def add_four_weighted(sums: Array, factors: Array, weights: Array, pitch: Int, count: Int) -> None:
    """sums [t, count] += factors [t, 4] times four rows. sums and rows are written and read in whole vectors: beyond
    `count` there must be room for as much."""
    tokens, t = sums.shape[0], 0
    while t + _FOUR <= tokens:
        _add_wide(sums[t:], factors[t:], weights, pitch, count)
        t += _FOUR
    if t + 2 <= tokens:
        _add_two(sums[t:], factors[t:], weights, pitch, count)
        t += 2
    if t < tokens:
        _add_one(sums[t:], factors[t:], weights, pitch, count)


@compiled
def add_one_weighted(sums: Array, factors: Array, weights: Array, count: Int) -> None:
    """The same of one row."""
    tokens, t = sums.shape[0], 0
    while t + _FOUR <= tokens:
        _add_wide_row(sums[t:], factors[t:], weights, 0, count)
        t += _FOUR
    if t + 2 <= tokens:
        _add_two_row(sums[t:], factors[t:], weights, 0, count)
        t += 2
    if t < tokens:
        _add_one_row(sums[t:], factors[t:], weights, 0, count)
