"""Vector code in LLVM IR for the blocks of `dots` and `weighted_sums`.

A block is a piece of code that computes a few tokens together. It reads and widens each weight once for all of them,
and keeps their sums in registers. Code that LLVM vectorises by itself computes one token at a time, and reads and
widens all weights again for each token. Every block adds in the same order, so a token's result is bit-identical alone
and in a batch. numba would mark additions as free to be reordered, and LLVM then reorders them in some blocks. It does
not change instructions that have a mark already, so all arithmetic here has the mark `IN_ORDER`.

Rows of weights are of the model's dtype and lie `pitch` elements apart.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import (
    HAS_AVX2,
    HAS_BFLOAT16_DOT,
    HAS_NEON,
    LANES,
)
from slora_kernels.cpu.workers.intrinsics import (
    CACHE_LINE_BYTES,
    EXP2_TERMS,
    Array,
    compiled,
    emit_prefetch,
    narrow_value,
    widen_value,
)


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks. All other code stores bfloat16 values as 16-bit integers."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
# A mark of LLVM that only concerns divisions.
IN_ORDER = ("arcp",)
# A mark for divisions, which `IN_ORDER` would make inexact. It only concerns the sign of a zero.
EXACT = ("nsz",)


class Memory:
    """Access to rows of elements in memory. `pitch` is the distance between rows."""

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any, pitch: Any = None) -> None:
        made = context.make_array(kind)(context, builder, array)
        self._builder = builder
        self._element = kind.dtype
        self._stored = context.get_data_type(kind.dtype)
        self._size = context.get_abi_sizeof(self._stored)
        self._first = builder.ptrtoint(made.data, I64)
        self._column_bytes, stride = I64(self._size), None
        if kind.ndim == 2:
            stride, self._column_bytes = cgutils.unpack_tuple(builder, made.strides)
        self._stride = builder.mul(pitch, I64(self._size)) if pitch is not None else stride

    def pointer(self, row: int, column: Any, kind: Any) -> Any:
        builder = self._builder
        address = builder.add(self._first, builder.mul(self._stride, I64(row)))
        return builder.inttoptr(
            builder.add(address, builder.mul(column, self._column_bytes)), kind.as_pointer()
        )

    def load(self, row: int, column: Any, mask: Any = None) -> Any:
        """Loads float32 lanes from `column` on. Lanes with a false mask are 0, and their memory is not read."""
        return self.widen(self.load_stored(row, column, LANES, mask))

    def load_stored(self, row: int, column: Any, lanes: int, mask: Any = None) -> Any:
        """Like `load`, but the lanes keep the stored format."""
        builder, kind = self._builder, ir.VectorType(self._stored, lanes)
        pointer = self.pointer(row, column, kind)
        if mask is None:
            return builder.load(pointer, align=self._size)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, [kind.as_pointer(), I32, mask.type, kind]),
            f"llvm.masked.load.{self._suffix(lanes)}.p0",
        )
        return builder.call(function, [pointer, I32(self._size), mask, ir.Constant(kind, None)])

    def load_pairs(self, column: Any) -> tuple[Any, Any]:
        """Loads pairs of bytes as float32 lanes: the first ones of all pairs, and the second ones."""
        builder, words = self._builder, ir.VectorType(_I16, LANES)
        stored = builder.load(self.pointer(0, column, words), align=1)
        if self._element == types.int8:
            ints = ir.VectorType(I32, LANES)
            wide, top = builder.sext(stored, ints), ir.Constant(ints, [24] * LANES)
            second = builder.ashr(wide, ir.Constant(ints, [8] * LANES))
            return tuple(
                builder.sitofp(part, VECTOR) for part in (builder.ashr(builder.shl(wide, top), top), second)
            )
        high = builder.lshr(stored, ir.Constant(words, [8] * LANES))
        first, second = (builder.trunc(part, ir.VectorType(ir.IntType(8), LANES)) for part in (stored, high))
        return self.widen(first), self.widen(second)

    def prefetch(self, row: int, column: Any) -> None:
        """Prefetches the elements around `column`. A prefetch past the end of the array is harmless."""
        emit_prefetch(self._builder, self.pointer(row, column, ir.IntType(8)))

    def lines(self, columns: list[Any]) -> list[Any]:
        """Returns one of `columns` for each cache line. columns: the first columns of adjacent vectors."""
        return columns[:: max(1, CACHE_LINE_BYTES // (LANES * self._size))]

    def load_scalar(self, row: int, column: Any) -> Any:
        return self._builder.load(self.pointer(row, column, self._stored))

    def load_widened_scalar(self, row: int, column: Any) -> Any:
        return widen_value(self._builder, self._element, self.load_scalar(row, column))

    def narrow(self, value: Any) -> Any:
        """Converts float32 lanes to the stored format."""
        if HAS_BFLOAT16_DOT and self._element == types.uint16:
            kind = ir.VectorType(_Bfloat16(), LANES)
            function = cgutils.get_or_insert_function(
                self._builder.module,
                ir.FunctionType(kind, [value.type]),
                "llvm.x86.avx512bf16.cvtneps2bf16.512",
            )
            return self._builder.bitcast(self._builder.call(function, [value]), ir.VectorType(_I16, LANES))
        return narrow_value(self._builder, self._element, value, LANES)

    def widen(self, stored: Any) -> Any:
        return widen_value(self._builder, self._element, stored, LANES)

    def store(self, row: int, column: Any, value: Any, mask: Any = None) -> None:
        """Stores float32 lanes. Lanes with a false mask are not written."""
        self.store_stored(row, column, self.narrow(value), mask)

    def store_stored(self, row: int, column: Any, stored: Any, mask: Any = None) -> None:
        """Like `store`, for lanes in the stored format."""
        builder, pointer = self._builder, self.pointer(row, column, stored.type)
        if mask is None:
            builder.store(stored, pointer, align=self._size)
            return
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [stored.type, pointer.type, I32, mask.type]),
            f"llvm.masked.store.{self._suffix(stored.type.count)}.p0",
        )
        builder.call(function, [stored, pointer, I32(self._size), mask])

    def store_scalar(self, column: Any, number: Any) -> None:
        """Stores one number, in the stored format, in row 0."""
        self._builder.store(number, self.pointer(0, column, self._stored))

    def _suffix(self, lanes: int) -> str:
        return f"v{lanes}" + ("f32" if self._stored == F32 else f"i{8 * self._size}")


def access_operands(context: Any, builder: Any, signature: Any, args: Any) -> tuple[Memory, Memory, Memory]:
    """Returns the first three arrays of an intrinsic as `Memory`: sums, rows of x (or factors) and rows of weights.

    The intrinsic's fourth argument locates the rows of weights: their pitch, or an array with the start of each row.
    """
    sums, x, weights, pitch = signature.args[:4]
    return (
        Memory(context, builder, sums, args[0]),
        Memory(context, builder, x, args[1]),
        Memory(context, builder, weights, args[2], I64(0) if isinstance(pitch, types.Array) else args[3]),
    )


def splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector with `value` in all lanes."""
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, value, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(I32, lanes), None))


def mask_below(builder: Any, end: Any, lanes: int = LANES) -> Any:
    """A mask of the lanes before `end`, which is an int64."""
    indexes = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", indexes, splat(builder, builder.trunc(end, I32), lanes))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once if the CPU has a fused multiply-add."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(function, [a, b, c])


def max_vector(builder: Any, a: Any, b: Any) -> Any:
    """The greater of a and b, lane by lane. The result is b if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


# The immediate operand of an instruction that rounds down.
_FLOOR = 9


def exp2_vector(builder: Any, x: Any, num_terms: int = len(EXP2_TERMS)) -> Any:
    """2^x for lanes with x <= 0. See `intrinsics.exp2`. num_terms: fewer terms are faster and less exact."""

    def fill(number: float | np.float32) -> Any:
        return ir.Constant(VECTOR, [float(number)] * LANES)

    if LANES == 8:
        x = builder.select(builder.fcmp_ordered("<", x, fill(-127.0)), fill(-127.0), x)
    rounding = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.nearbyint.v{LANES}f32"
    )
    whole = builder.call(rounding, [x])
    f = builder.fsub(x, whole, flags=IN_ORDER)
    highest, *others = reversed(EXP2_TERMS[:num_terms])
    series = fill(highest)
    for term in (*others, np.float32(1.0)):
        series = multiply_add(builder, f, series, fill(term))
    if LANES == 16:
        kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR, _I16, I32])
        scaling = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
        current_rounding = I32(4)
        return builder.call(scaling, [series, whole, ir.Constant(VECTOR, None), _I16(-1), current_rounding])
    ints = ir.VectorType(I32, LANES)
    exponent = builder.add(builder.fptosi(whole, ints), ir.Constant(ints, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(ints, [23] * LANES)), VECTOR)
    return builder.fmul(series, power, flags=IN_ORDER)


# 2^x for x in [0, 1] as a polynomial whose greatest relative error is least, 2^-18, and that is 1 for 0.
_UNIT_EXP2_TERMS = (0.6930448, 0.2412802, 0.05224248, 0.01342668)


def exp2_vector_512(builder: Any, x: Any) -> Any:
    """2^x with an error of 2^-18, in fewer instructions than `exp2_vector`. Only for vectors of AVX-512."""
    reducing = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, I32, VECTOR, _I16, I32]),
        "llvm.x86.avx512.mask.reduce.ps.512",
    )
    scaling = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR, _I16, I32]),
        "llvm.x86.avx512.mask.scalef.ps.512",
    )
    nothing, all_lanes, current_rounding = ir.Constant(VECTOR, None), _I16(-1), I32(4)
    # x - floor(x). The scaling multiplies by 2^floor(x).
    f = builder.call(reducing, [x, I32(_FLOOR), nothing, all_lanes, current_rounding])
    highest, *others = (ir.Constant(VECTOR, [term] * LANES) for term in reversed((1.0, *_UNIT_EXP2_TERMS)))
    series = reduce(lambda total, term: multiply_add(builder, f, total, term), others, highest)
    return builder.call(scaling, [series, x, nothing, all_lanes, current_rounding])


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Returns a vector of the lanes of a and b that `lanes` selects. The lanes of b are numbered after those of a."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def look_up(builder: Any, table: Memory, indexes: Any) -> Any:
    """The numbers of a table of 16 float32 at `indexes`, a vector of int32. Only the low 4 bits of an index count."""
    if LANES == 16:
        return permute_lanes(builder, table.load(0, I64(0)), indexes)

    def fill(number: int) -> Any:
        return ir.Constant(indexes.type, [number] * LANES)

    if HAS_AVX2:
        kind = ir.FunctionType(VECTOR, [VECTOR, indexes.type])
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")
        low, high = (builder.call(permute, [table.load(0, I64(k)), indexes]) for k in (0, LANES))
        return builder.select(builder.icmp_signed("==", builder.and_(indexes, fill(8)), fill(0)), low, high)
    if HAS_NEON:
        return _look_up_bytes(builder, table, indexes)
    indexes, found = builder.and_(indexes, fill(15)), ir.Constant(VECTOR, None)
    for lane in range(LANES):
        index = builder.zext(builder.extract_element(indexes, I32(lane)), I64)
        found = builder.insert_element(found, table.load_widened_scalar(0, index), I32(lane))
    return found


def _look_up_bytes(builder: Any, table: Memory, indexes: Any) -> Any:
    """Like `look_up`. An instruction of NEON finds 16 of the 64 bytes of four registers, which hold the table."""

    def fill(number: int) -> Any:
        return ir.Constant(indexes.type, [number] * LANES)

    quarter = ir.VectorType(ir.IntType(8), 16)
    kind = ir.FunctionType(quarter, [quarter] * 5)
    find = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.neon.tbl4.v16i8")
    quarters = [builder.load(table.pointer(0, I64(4 * k), quarter), align=4) for k in range(4)]
    # Number i has the bytes 4 i to 4 i + 3.
    firsts = builder.mul(builder.and_(indexes, fill(15)), fill(0x04040404))
    places = builder.add(firsts, fill(0x03020100))
    found = []
    for first in range(0, LANES, 4):
        own = builder.bitcast(shuffle(builder, places, places, list(range(first, first + 4))), quarter)
        found.append(builder.bitcast(builder.call(find, [*quarters, own]), ir.VectorType(F32, 4)))
    return shuffle(builder, found[0], found[1], list(range(LANES)))


def permute_lanes(builder: Any, numbers: Any, indexes: Any) -> Any:
    """Lane i of the result is lane indexes[i] of 16 numbers. Only the low 4 bits of an index count."""
    kind = ir.FunctionType(VECTOR, [VECTOR, indexes.type])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(permute, [numbers, indexes])


def look_up_words(builder: Any, table: Any, indexes: Any) -> Any:
    """The 16-bit words of a table of 32 at `indexes`, a vector of 32 words. Only the low 5 bits of an index count."""
    kind = ir.FunctionType(table.type, [table.type] * 2)
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    return builder.call(permute, [table, indexes])


def sum_lanes(builder: Any, vectors: list[Any]) -> Any:
    """Returns a vector whose lane i is the sum of all lanes of vectors[i], added pairwise.

    Summing all vectors together takes about as many instructions as summing three of them one by one.
    """
    while len(vectors) & (len(vectors) - 1):
        vectors = [*vectors, ir.Constant(VECTOR, None)]
    part = LANES  # number of lanes that hold each partial sum
    while part > 1:
        part //= 2
        if len(vectors) > 1:
            low = [lane for lane in range(2 * LANES) if lane % (2 * part) < part]
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        else:
            low = [lane for lane in range(vectors[0].type.count) if lane % (2 * part) < part]
            pairs = [(vectors[0], vectors[0])]
        high = [lane + part for lane in low]
        halves = [(shuffle(builder, a, b, low), shuffle(builder, a, b, high)) for a, b in pairs]
        vectors = [builder.fadd(a, b, flags=IN_ORDER) for a, b in halves]
    return vectors[0]


def multiply_add_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Adds products of bfloat16 pairs: lane i of the result is c[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]."""
    kind = ir.VectorType(_Bfloat16(), 2 * LANES)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR, kind, kind]), "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    return builder.call(function, [c, builder.bitcast(a, kind), builder.bitcast(b, kind)])


def multiply_integer_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Adds products of pairs of int16: lane i of the result is c[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(c.type, [c.type] * 3), "llvm.x86.avx512.vpdpwssd.512"
    )
    return builder.call(function, [c, a, b])


def round_to_integers(builder: Any, value: Any) -> Any:
    """Rounds 16 float32 to int32: to nearest, ties to even. NaN and what is too large become -2^31."""
    kind = ir.VectorType(I32, LANES)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [VECTOR, kind, _I16, I32]), "llvm.x86.avx512.mask.cvtps2dq.512"
    )
    current_rounding = I32(4)
    return builder.call(function, [value, ir.Constant(kind, None), _I16(-1), current_rounding])


def join_bfloat16(builder: Any, low: Any, high: Any) -> Any:
    """Rounds two vectors of 16 float32 to one of 32 bfloat16, in order, as 16-bit integers."""
    kind = ir.VectorType(_Bfloat16(), 2 * LANES)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [VECTOR, VECTOR]), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    )
    return builder.bitcast(builder.call(function, [high, low]), ir.VectorType(_I16, 2 * LANES))


# The maximum number of vectors of sums in a block. That many vectors use half of the CPU's registers, also with NEON.
MAX_ACCUMULATORS = 16 if LANES == 16 else 8
MAX_TOKENS = MAX_ACCUMULATORS // 4


def dispatch_by_tokens(emit: Callable[[int], Callable[..., None]]) -> Callable[..., None]:
    """Returns a function that applies blocks to any number of tokens.

    emit(n) builds the block for n tokens. The function's first two arguments have one row per token. Its other
    arguments are passed on to the blocks.
    """
    most, three, two, one = emit(MAX_TOKENS), emit(3), emit(2), emit(1)

    @compiled
    def run(sums: Array, x: Array, *rest: Any) -> None:
        tokens, t = sums.shape[0], 0
        while t + MAX_TOKENS <= tokens:
            most(sums[t:], x[t:], *rest)
            t += MAX_TOKENS
        if tokens - t == 3:
            three(sums[t:], x[t:], *rest)
        elif tokens - t == 2:
            two(sums[t:], x[t:], *rest)
        elif tokens - t == 1:
            one(sums[t:], x[t:], *rest)

    return run
