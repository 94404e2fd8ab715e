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
from numba import config, types
from numba.core import cgutils

from slora_kernels.numba_language import (
    CACHE_LINE_BYTES,
    Array,
    Float,
    Int,
    compiled,
    emitted,
    narrow_value,
    widen_value,
)


def _has(feature: str) -> bool:
    """Of the machine that numba compiles for: this one, unless its NUMBA_CPU_NAME or NUMBA_CPU_FEATURES say another."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return config.CPU_NAME is None and bool(llvmlite.binding.get_host_cpu_features().get(feature))


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's own, which llvmlite does not know; carried as 16 bits everywhere else."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


# Machines with AVX-512 have 32 registers of 16 numbers; a block's sums take 16 of them. Others have 16 of 8.
LANES = 16 if _has("avx512f") else 8
# Two products of bfloat16 and their sum for each lane, in one instruction, as exact as float32.
_PAIRS = LANES == 16 and _has("avx512bf16")
_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_F32, LANES)
_INDEXES = ir.VectorType(_I32, LANES)
# Rows of attention and of adapters are too short for the machine to see the next one coming.
_PREFETCH = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])


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
        return widen_value(self._builder, self._element, self.load_stored(row, column, LANES, mask), LANES)

    def load_stored(self, row: int, column: Any, lanes: int, mask: Any = None) -> Any:
        """The same, as they are stored."""
        builder, kind = self._builder, ir.VectorType(self._stored, lanes)
        pointer = self.pointer(row, column, kind)
        if mask is None:
            return builder.load(pointer, align=self._size)
        suffix = "f32" if self._stored == _F32 else f"i{8 * self._size}"
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, [kind.as_pointer(), _I32, mask.type, kind]),
            f"llvm.masked.load.v{lanes}{suffix}.p0",
        )
        return builder.call(function, [pointer, _I32(self._size), mask, ir.Constant(kind, None)])

    def prefetch(self, row: int, column: Any) -> None:
        """Asks for the numbers around `column`, wherever that is: behind the last one, nothing comes of it."""
        function = cgutils.get_or_insert_function(self._builder.module, _PREFETCH, "llvm.prefetch.p0")
        arguments = [self.pointer(row, column, ir.IntType(8)), _I32(0), _I32(3), _I32(1)]
        self._builder.call(function, arguments)

    def lines(self, columns: list[Any]) -> list[Any]:
        """Of vectors that begin at `columns`, side by side, those where a cache line begins."""
        return columns[:: max(1, CACHE_LINE_BYTES // (LANES * self._size))]

    def load_one(self, row: int, column: Any) -> Any:
        return self._builder.load(self.pointer(row, column, self._stored))

    def store(self, row: int, column: Any, value: Any) -> None:
        """value: float32 lanes."""
        narrow = narrow_value(self._builder, self._element, value, LANES)
        self._builder.store(narrow, self.pointer(row, column, narrow.type), align=self._size)


def _operands(context: Any, builder: Any, signature: Any, args: Any) -> tuple[_Memory, _Memory, _Memory]:
    """Of a block's arguments: the sums, what is multiplied, and the rows of weights, `pitch` (the fourth) apart."""
    sums, x, weights = signature.args[:3]
    return (
        _Memory(context, builder, sums, args[0]),
        _Memory(context, builder, x, args[1]),
        _Memory(context, builder, weights, args[2], args[3]),
    )


def _splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """All lanes the same."""
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, value, _I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_I32, lanes), None))


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


def _pair_products(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of bfloat16 a and b in pairs: lane i of the sums takes in numbers 2i and 2i + 1."""
    kind = ir.VectorType(_Bfloat16(), 2 * LANES)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR, kind, kind]), "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    return builder.call(function, [c, builder.bitcast(a, kind), builder.bitcast(b, kind)])


def _emit_dots(tokens: int, rows: int) -> Callable[..., None]:
    """sums [tokens, rows] += x [tokens, count] times `rows` rows of weights."""

    @emitted
    def dots(typing: Any, sums: Array, x: Array, weights: Array, pitch: Int, count: Int) -> Any:
        in_pairs = _PAIRS and x.dtype == weights.dtype == types.uint16
        lanes, multiply = (2 * LANES, _pair_products) if in_pairs else (LANES, _fused)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, tokens_of, rows_of = _operands(context, builder, signature, args)
            next_rows = builder.mul(args[3], _I64(rows))
            totals = {
                (t, r): cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None))
                for t in range(tokens)
                for r in range(rows)
            }

            def load(memory: _Memory, row: int, column: Any, mask: Any) -> Any:
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

            whole = builder.and_(args[4], _I64(-lanes))
            with cgutils.for_range_slice(builder, _I64(0), whole, _I64(lanes)) as (column, _):
                step(column)
            left = builder.sub(args[4], whole)
            with cgutils.if_unlikely(builder, builder.icmp_signed(">", left, _I64(0))):
                indexes = ir.Constant(ir.VectorType(_I32, lanes), list(range(lanes)))
                end = _splat(builder, builder.trunc(left, _I32), lanes)
                step(whole, builder.icmp_signed("<", indexes, end))
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
    """target [tokens, vectors * LANES] += scale * factors [tokens, count] times `count` rows."""

    @emitted
    def gathers(
        typing: Any,
        target: Array,
        factors: Array,
        weights: Array,
        pitch: Int,
        ahead: Int,
        scale: Float,
        count: Int,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results, factors_of, rows_of = _operands(context, builder, signature, args)
            starts = [_I64(v * LANES) for v in range(vectors)]
            totals = {
                (t, v): cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None))
                for t in range(tokens)
                for v in range(vectors)
            }
            with cgutils.for_range(builder, args[6]) as loop:
                first = builder.mul(loop.index, args[3])
                for start in rows_of.lines(starts):
                    rows_of.prefetch(0, builder.add(builder.add(first, start), args[4]))
                rows = [rows_of.load(0, builder.add(first, start)) for start in starts]
                for t in range(tokens):
                    factor = _splat(builder, factors_of.load_one(t, loop.index))
                    for v in range(vectors):
                        total = totals[t, v]
                        builder.store(_fused(builder, factor, rows[v], builder.load(total)), total)
            scale = _splat(builder, args[5])
            for (t, v), total in totals.items():
                before = results.load(t, starts[v])
                results.store(t, starts[v], _fused(builder, scale, builder.load(total), before))
            return context.get_dummy_value()

        return types.void(
            target, factors, weights, types.int64, types.int64, types.float32, types.int64
        ), emit

    return gathers


# Sums take 16 of 32 registers, or half of 16.
_MOST_SUMS = 16 if LANES == 16 else 8
_MOST_TOKENS = _MOST_SUMS // 4


def _for_tokens(emit: Callable[[int], Callable[..., None]]) -> Callable[..., None]:
    """A function of sums and of what is multiplied, both a row a token, then of a block's other arguments."""
    most, three, two, one = emit(_MOST_TOKENS), emit(3), emit(2), emit(1)

    @compiled
    def run(sums: Array, x: Array, *rest: Any) -> None:
        tokens, t = sums.shape[0], 0
        while t + _MOST_TOKENS <= tokens:
            most(sums[t:], x[t:], *rest)
            t += _MOST_TOKENS
        if tokens - t == 3:
            three(sums[t:], x[t:], *rest)
        elif tokens - t == 2:
            two(sums[t:], x[t:], *rest)
        elif tokens - t == 1:
            one(sums[t:], x[t:], *rest)

    return run


# sums [t, 4] += x [t, count] times the four rows that begin in `weights`, `pitch` apart; the same of one row.
add_four_dots = _for_tokens(lambda tokens: _emit_dots(tokens, 4))
add_one_dot = _for_tokens(lambda tokens: _emit_dots(tokens, 1))
_gather_sixteen, _gather_eight = _emit_gathers(1, _MOST_SUMS), _emit_gathers(2, _MOST_SUMS // 2)
_gather_four = _for_tokens(lambda tokens: _emit_gathers(tokens, 4))
_gather_one = _for_tokens(lambda tokens: _emit_gathers(tokens, 1))


@compiled
def gather_rows(
    target: Array,
    factors: Array,
    weights: Array,
    pitch: Int,
    ahead: Int,
    scale: Float,
    size: Int,
    count: Int,
) -> None:
    """target [t, size] += scale * factors [t, count] times `count` rows of `size` numbers, `pitch` apart.

    Both target and rows are read, and target is written, in whole vectors: there must be room for as much beyond
    `size`. What lies `ahead` numbers from what is read is asked for.
    """
    column = 0
    if target.shape[0] == 1:
        while column + _MOST_SUMS * LANES <= size:
            _gather_sixteen(target[:, column:], factors, weights[column:], pitch, ahead, scale, count)
            column += _MOST_SUMS * LANES
    elif target.shape[0] == 2:
        while column + _MOST_SUMS // 2 * LANES <= size:
            _gather_eight(target[:, column:], factors, weights[column:], pitch, ahead, scale, count)
            column += _MOST_SUMS // 2 * LANES
    while column + 4 * LANES <= size:
        _gather_four(target[:, column:], factors, weights[column:], pitch, ahead, scale, count)
        column += 4 * LANES
    while column < size:
        _gather_one(target[:, column:], factors, weights[column:], pitch, ahead, scale, count)
        column += LANES
