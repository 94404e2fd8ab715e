"""The few words in which the CPU kernels are written: a job's fields, number formats, loops over rows.

The dtype of the model is carried by an array's element type, so one source serves all three:

    float32 as float32;  bfloat16 as uint16 (its bits are the upper half of a float32's);  float16 as int16

A job is a block of 64-bit words: the next item to take, the next worker's number, the number of items, then three
words a field: address, rows and pitch of a tensor seen as a matrix of contiguous rows, or one number. The element
type of the job's own pointer is that of the model. Arithmetic is float32 throughout.

Rows are sliced before the loop that runs over them: indexing a matrix inside it keeps LLVM from vectorising (8
times slower, measured). numba's cache looks at the file of a worker alone: after editing this file, `touch` theirs.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

Array = Any
Job = Any
Int = Any
Float = Any
Function = TypeVar("Function", bound=Callable[..., Any])

NEXT_ITEM, NEXT_WORKER, NUM_ITEMS, NUM_WORDS = 0, 1, 2, 3
FIELD_WORDS = 3

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()
# Everything that lets sums be vectorised. What it allows is decided when compiling, so results stay the same from
# call to call.
_OPTIONS = {"fastmath": True, "error_model": "numpy", "nogil": True}


def compiled(function: Function) -> Function:
    """numba's njit with the options that all kernels share."""
    return cast(Function, njit(**_OPTIONS)(function))


def _emitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """numba's intrinsic, whose first argument its callers do not pass."""
    return cast(Callable[..., Any], intrinsic(function))


def _point(builder: Any, job: Any, index: Any, word: Any) -> Any:
    return builder.gep(builder.bitcast(job, word.as_pointer()), [index])


@_emitted
def _add_one(typing: Any, job: Job, word: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _point(builder, args[0], args[1], _I64), _I64(1), "monotonic")

    return types.int64(job, types.int64), emit


@_emitted
def _read_word(typing: Any, job: Job, word: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_point(builder, args[0], args[1], _I64))

    return types.int64(job, types.int64), emit


@_emitted
def _read_double(typing: Any, job: Job, word: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_point(builder, args[0], args[1], _F64))

    return types.float64(job, types.int64), emit


def _emit_pointer(job: Any, element: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.load(_point(builder, args[0], args[1], _I64))
        return builder.inttoptr(address, context.get_value_type(signature.return_type))

    return types.CPointer(element)(job, types.int64), emit


@_emitted
def _model_pointer(typing: Any, job: Job, word: int) -> Any:
    return _emit_pointer(job, job.dtype)


@_emitted
def _float_pointer(typing: Any, job: Job, word: int) -> Any:
    return _emit_pointer(job, types.float32)


@_emitted
def _int32_pointer(typing: Any, job: Job, word: int) -> Any:
    return _emit_pointer(job, types.int32)


@_emitted
def _int64_pointer(typing: Any, job: Job, word: int) -> Any:
    return _emit_pointer(job, types.int64)


@compiled
def take_item(job: Job) -> Int:
    """The next item that nobody has taken; past the last one, NUM_ITEMS or more."""
    return _add_one(job, NEXT_ITEM)


@compiled
def take_worker(job: Job) -> Int:
    """This thread's number, counted from 0."""
    return _add_one(job, NEXT_WORKER)


@compiled
def count_items(job: Job) -> Int:
    return _read_word(job, NUM_ITEMS)


@compiled
def read_int(job: Job, field: int) -> Int:
    return _read_word(job, NUM_WORDS + field * FIELD_WORDS)


@compiled
def read_float(job: Job, field: int) -> Float:
    return np.float32(_read_double(job, NUM_WORDS + field * FIELD_WORDS))


@compiled
def _read_shape(job: Job, field: int) -> tuple[Int, Int]:
    word = NUM_WORDS + field * FIELD_WORDS
    return _read_word(job, word + 1), _read_word(job, word + 2)


@compiled
def read_model_matrix(job: Job, field: int) -> Array:
    """A tensor of the model's dtype, [rows, pitch]."""
    return carray(_model_pointer(job, NUM_WORDS + field * FIELD_WORDS), _read_shape(job, field))


@compiled
def read_float_matrix(job: Job, field: int) -> Array:
    return carray(_float_pointer(job, NUM_WORDS + field * FIELD_WORDS), _read_shape(job, field))


@compiled
def read_int32_matrix(job: Job, field: int) -> Array:
    return carray(_int32_pointer(job, NUM_WORDS + field * FIELD_WORDS), _read_shape(job, field))


@compiled
def read_int64_matrix(job: Job, field: int) -> Array:
    return carray(_int64_pointer(job, NUM_WORDS + field * FIELD_WORDS), _read_shape(job, field))


def _widen(builder: Any, element: Any, value: Any) -> Any:
    if element == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)
    if element == types.int16:
        return builder.fpext(builder.bitcast(value, ir.HalfType()), _F32)
    return value


def _round_bfloat16(builder: Any, value: Any) -> Any:
    """To nearest, ties to even; NaN stays NaN although a carry would run through its bits."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), _I32(0x7FFF)), _I32(16))
    magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, _I32(0x7F800000))
    return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)


def _narrow(builder: Any, element: Any, value: Any) -> Any:
    if element == types.uint16:
        return _round_bfloat16(builder, value)
    if element == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), _I16)
    return value


@_emitted
def widen(typing: Any, value: Any) -> Any:
    """An element of the model's dtype as float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widen(builder, value, args[0])

    return types.float32(value), emit


@_emitted
def narrow(typing: Any, value: Float, array: Array) -> Any:
    """A float32 as an element of `array`, rounded to nearest even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _narrow(builder, array.dtype, args[0])

    return array.dtype(types.float32, array), emit


@_emitted
def _from_bits(typing: Any, bits: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), emit


# Taylor terms of 2^f for f within half a unit of 0: the first one left out is 5e-9.
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (
    np.float32(np.log(2.0) ** k / np.prod(np.arange(1.0, k + 1))) for k in range(1, 8)
)
_HALF, _ONE, _ZERO, _LOWEST = np.float32(0.5), np.float32(1.0), np.float32(0.0), np.float32(-126.0)


@compiled
def exp2(x: Float) -> Float:
    """2^x for x <= 0, without a call, so that loops over it become vectors; 0 below -126."""
    clamped = max(x, _LOWEST)
    whole = np.int32(clamped - _HALF)
    f = clamped - np.float32(whole)
    series = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7))))))
    power = _from_bits((whole + np.int32(127)) << np.int32(23))
    return series * power if x >= _LOWEST else _ZERO


@compiled
def dot(a: Array, b: Array) -> Float:
    total = _ZERO
    for i in range(b.shape[0]):
        total += widen(a[i]) * widen(b[i])
    return total


@compiled
def add_row(target: Array, weight: Float, row: Array) -> None:
    """target += weight * row, target float32."""
    for i in range(row.shape[0]):
        target[i] += weight * widen(row[i])


@compiled
def add_four_rows(target: Array, weights: Array, a: Array, b: Array, c: Array, d: Array) -> None:
    """target += weights[0] * a + ... + weights[3] * d: one pass over target, in L1, for four products."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for i in range(target.shape[0]):
        target[i] += (w0 * widen(a[i]) + w1 * widen(b[i])) + (w2 * widen(c[i]) + w3 * widen(d[i]))


@compiled
def add_rows(target: Array, weights: Array, rows: Array) -> None:
    """target += weights [n] times rows [n, size]; the order of the sums depends on n alone."""
    n = weights.shape[0]
    whole = n - n % 4
    for r in range(0, whole, 4):
        add_four_rows(target, weights[r : r + 4], rows[r], rows[r + 1], rows[r + 2], rows[r + 3])
    for r in range(whole, n):
        add_row(target, weights[r], rows[r])


@compiled
def clear(array: Array) -> None:
    for i in range(array.shape[0]):
        array[i] = _ZERO
