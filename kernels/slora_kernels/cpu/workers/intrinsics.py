"""The intrinsics of the CPU kernels: reading the fields of a job, converting elements, loops over rows.

numba lacks some dtypes, so the element type of an array stands for a dtype. One source thus serves all model dtypes:

    float32 is float32;  bfloat16 is uint16 (its bits are the upper half of a float32's);  float16 is int16

K and V in fp8 are uint8. They are e4m3 without NaN, because NaN is stored in their bfloat16 scale. Weights in fp8 are
uint8, too, and weights in int8 are int8.

A job is an array of 64-bit words: the next thread's number, the number of items, the number of finished items that
others wait for, the number of shares, the number of taken items of each share, and then the fields. A field has three
words. They hold either one number, or the address, number of rows and pitch of a tensor with contiguous rows. The job
pointer's element type is that of the model. All arithmetic is float32.

A thread takes items in order. With shares, each thread begins with a part of the items of its own, and helps with the
others afterwards. Its rows are then still in its core's cache from the job before: a prompt of 1,024 tokens took 0.80
of the time.

Slice a row before the loop that runs over it. Indexing a matrix inside the loop keeps LLVM from vectorising it (8 times
slower, measured).
"""

import platform
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import config, extending, njit, types
from numba.core import cgutils
from numba.np.arrayobj import populate_array

from slora_kernels.cpu.worker_sizes import (
    FIELD_WORDS,
    MAX_SHARES,
    NEXT_ITEM,
    NEXT_WORKER,
    NUM_ITEMS,
    NUM_PREPARED,
    NUM_SHARES,
    NUM_WORDS,
)
from slora_kernels.cpu_isa import CPU_ISAS, find_cpu_isa

_isa = CPU_ISAS.get(find_cpu_isa() or "")
if _isa is not None and _isa.machine == platform.machine():
    # Wherever the workers are compiled, they are those of the wheel. On another kind of CPU, numba knows best.
    config.CPU_NAME, config.CPU_FEATURES = _isa.llvm_name, _isa.llvm_features

Array = Any
Job = Any
Int = Any
Float = Any
Function = TypeVar("Function", bound=Callable[..., Any])

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_BYTE_POINTER = ir.IntType(8).as_pointer()
_PREFETCH_TYPE = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
FIRST_CACHE, _SECOND_CACHE = 3, 2
CACHE_LINE_BYTES = 64
# Bits of an infinite float32.
INFINITY_BITS = 0x7F800000
# fastmath lets the compiler reorder sums. The order is fixed when a kernel is compiled, so results are the same in
# every call.
#
# _nrt=False turns off numba's run-time and its reference counts. Jobs own no memory, so they need no counts.
# Counting took a third of the time of short rows. Without the run-time, a function must not return an array.
OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "_nrt": False}


def compiled(function: Function) -> Function:
    """numba's njit with the options that all kernels share. Only workers can call the function, and Python cannot."""
    njit_ = njit(nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
    return cast(Function, njit_(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """numba's `intrinsic`. Callers of the decorated function do not pass its first argument, `typing`."""
    return cast(Callable[..., Any], extending.intrinsic(function))


def _point(builder: Any, job: Any, index: Any, word: Any) -> Any:
    return builder.gep(builder.bitcast(job, word.as_pointer()), [index])


@intrinsic
def _add_one(typing: Any, job: Job, word: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _point(builder, args[0], args[1], _I64), _I64(1), "monotonic")

    return types.int64(job, types.int64), emit


@intrinsic
def count_prepared(typing: Any, job: Job) -> Any:
    """Counts an item that prepares others as done, for `await_prepared`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _point(builder, args[0], _I64(NUM_PREPARED), _I64)
        builder.atomic_rmw("add", place, _I64(1), "release")
        return context.get_dummy_value()

    return types.void(job), emit


@intrinsic
def _load_prepared(typing: Any, job: Job) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_point(builder, args[0], _I64(NUM_PREPARED), _I64), "acquire", 8)

    return types.int64(job), emit


@intrinsic
def increment_count(typing: Any, counts: Array, index: int) -> Any:
    """Atomically adds 1 to an element of an int64 array. Returns the count before.

    A thread that sees the new count in `await_count` also sees all earlier writes of this thread.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(counts)(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), _I64(1), "acq_rel")

    return types.int64(counts, types.int64), emit


@intrinsic
def _load_acquire(typing: Any, counts: Array, index: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(counts)(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(counts, types.int64), emit


@intrinsic
def _yield_core(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])

    return types.int32(), emit


@intrinsic
def call_worker(typing: Any, worker: int, job: int) -> Any:
    """Runs a worker. worker, job: their addresses."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], _BYTE_POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_count(typing: Any, function: int) -> Any:
    """Calls `int function(void)`. function: its address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), _I64)

    return types.int64(types.int64), emit


@intrinsic
def reset_job(typing: Any, job: int) -> Any:
    """Lets a job, of which all items are done, begin again. job: its address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.inttoptr(args[0], _I64.as_pointer())
        for word in (NEXT_WORKER, NUM_PREPARED, *range(NEXT_ITEM, NEXT_ITEM + MAX_SHARES)):
            builder.store(_I64(0), builder.gep(words, [_I64(word)]))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _read_word(typing: Any, job: Job, word: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_point(builder, args[0], args[1], _I64))

    return types.int64(job, types.int64), emit


@intrinsic
def _read_double(typing: Any, job: Job, word: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_point(builder, args[0], args[1], _F64))

    return types.float64(job, types.int64), emit


def _emit_matrix(job: Any, element: Any) -> Any:
    """Emits an array [rows, pitch] that is a view of a field's tensor."""
    matrix = types.Array(element, 2, "C")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.add(builder.mul(args[1], _I64(FIELD_WORDS)), _I64(NUM_WORDS))
        address, rows, pitch = (
            builder.load(_point(builder, args[0], builder.add(first, _I64(k)), _I64)) for k in range(3)
        )
        made = context.make_array(matrix)(context, builder)
        size = _I64(context.get_abi_sizeof(context.get_data_type(element)))
        populate_array(
            made,
            data=builder.inttoptr(address, made.data.type),
            shape=[rows, pitch],
            strides=[builder.mul(pitch, size), size],
            itemsize=size,
            meminfo=None,
        )
        return made._getvalue()

    return matrix(job, types.int64), emit


@intrinsic
def read_model_matrix(typing: Any, job: Job, field: int) -> Any:
    """Returns the tensor of a job's field as an array [rows, pitch] of the model's dtype."""
    return _emit_matrix(job, job.dtype)


@intrinsic
def read_float_matrix(typing: Any, job: Job, field: int) -> Any:
    return _emit_matrix(job, types.float32)


@intrinsic
def read_operand_matrix(typing: Any, job: Job, field: int) -> Any:
    """Like `read_model_matrix`, for elements of the dtype that `job_fields.operand_dtype` returns."""
    return _emit_matrix(job, job.dtype if job.dtype == types.uint16 else types.float32)


@intrinsic
def read_byte_matrix(typing: Any, job: Job, field: int) -> Any:
    return _emit_matrix(job, types.uint8)


@intrinsic
def read_signed_byte_matrix(typing: Any, job: Job, field: int) -> Any:
    return _emit_matrix(job, types.int8)


@intrinsic
def read_bfloat16_matrix(typing: Any, job: Job, field: int) -> Any:
    return _emit_matrix(job, types.uint16)


@intrinsic
def read_half_matrix(typing: Any, job: Job, field: int) -> Any:
    """For tensors of float16."""
    return _emit_matrix(job, types.int16)


@intrinsic
def read_int32_matrix(typing: Any, job: Job, field: int) -> Any:
    return _emit_matrix(job, types.int32)


@intrinsic
def read_int64_matrix(typing: Any, job: Job, field: int) -> Any:
    return _emit_matrix(job, types.int64)


def _emit_view(array: Any, view: Any, shape: Callable[[Any, Any, Any], list[Any]]) -> Any:
    """Emits a contiguous view of an array whose elements are contiguous. `shape` gets the builder, the number of
    elements and the argument of the intrinsic.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made, own = (
            context.make_array(view)(context, builder),
            context.make_array(array)(context, builder, args[0]),
        )
        count = _I64(1)
        for length in cgutils.unpack_tuple(builder, own.shape):
            count = builder.mul(count, length)
        lengths = shape(builder, count, args[-1])
        strides = [own.itemsize]
        for length in reversed(lengths[1:]):
            strides.insert(0, builder.mul(strides[0], length))
        populate_array(
            made, data=own.data, shape=lengths, strides=strides, itemsize=own.itemsize, meminfo=None
        )
        return made._getvalue()

    return emit


@intrinsic
def as_row(typing: Any, array: Array) -> Any:
    """The elements of an array as one row. They must be contiguous, which is not checked.

    numba's `reshape` would check it, in a function of numba that the machine code in the wheel could not call.
    """
    row = types.Array(array.dtype, 1, "C")
    return row(array), _emit_view(array, row, lambda builder, count, _: [count])


@intrinsic
def as_matrix(typing: Any, array: Array, columns: int) -> Any:
    """Like `as_row`, as rows of `columns` elements."""
    matrix = types.Array(array.dtype, 2, "C")
    emit = _emit_view(array, matrix, lambda builder, count, width: [builder.sdiv(count, width), width])
    return matrix(array, types.int64), emit


@intrinsic
def count_between(typing: Any, origin: Array, array: Array) -> Any:
    """Number of elements from the start of `origin` to the start of `array`. The arrays may be separate allocations."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second = (
            builder.ptrtoint(context.make_array(kind)(context, builder, value).data, _I64)
            for kind, value in zip(signature.args, args, strict=True)
        )
        size = _I64(context.get_abi_sizeof(context.get_data_type(origin.dtype)))
        return builder.sdiv(builder.sub(second, first), size)

    return types.int64(origin, array), emit


@compiled
def take_item(job: Job) -> Int:
    """Takes the next item of the job. The result is NUM_ITEMS or more if all items are taken."""
    return _add_one(job, NEXT_ITEM)


@compiled
def take_shared_item(job: Job, share: Int) -> tuple[Int, Int]:
    """Takes the next item of a share, or of the next share that has one. Returns the item and its share.

    The item is NUM_ITEMS if all items are taken.
    """
    num_items, num_shares = count_items(job), _read_word(job, NUM_SHARES)
    for _ in range(num_shares):
        share %= num_shares
        item = share * num_items // num_shares + _add_one(job, NEXT_ITEM + share)
        if item < (share + 1) * num_items // num_shares:
            return item, share
        share += 1
    return num_items, share


@compiled
def await_count(counts: Array, index: Int, count: Int) -> None:
    """Waits until counts[index] reaches `count`. Yields the core to other threads meanwhile.

    Deadlocks if an item that increments the count has not been taken yet. Call it only when all such items are taken.
    """
    while _load_acquire(counts, index) < count:
        _yield_core()


@compiled
def await_prepared(job: Job, count: Int) -> None:
    """Waits until `count` items that prepare others are done. See `await_count`."""
    while _load_prepared(job) < count:
        _yield_core()


@compiled
def take_thread_index(job: Job) -> Int:
    """The number of this thread, counted from 0."""
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


def widen_value(builder: Any, element: Any, value: Any, lanes: int = 1) -> Any:
    """Converts an element, or a vector of `lanes` elements, to float32."""

    def of(kind: Any) -> Any:
        return kind if lanes == 1 else ir.VectorType(kind, lanes)

    if element == types.uint16:
        bits = builder.shl(builder.zext(value, of(_I32)), _fill(of(_I32), 16))
        return builder.bitcast(bits, of(_F32))
    if element == types.int16:
        return builder.fpext(builder.bitcast(value, of(ir.HalfType())), of(_F32))
    if element == types.int8:
        return builder.sitofp(value, of(_F32))
    if element == types.uint8:
        # Move exponent and mantissa to their place in a float16. The factor 256 corrects the exponent bias, which is 7
        # in e4m3 and 15 in float16.
        bits = builder.and_(
            builder.shl(builder.sext(value, of(_I16)), _fill(of(_I16), 7)), _fill(of(_I16), 0xBFFF)
        )
        half = builder.fpext(builder.bitcast(bits, of(ir.HalfType())), of(_F32))
        return builder.fmul(half, _fill(of(_F32), 256.0))
    return value


def _fill(kind: Any, number: float) -> Any:
    """A constant of type `kind`. In a vector type, all lanes hold `number`."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _round_bfloat16(builder: Any, value: Any, of: Callable[[Any], Any]) -> Any:
    """Rounds to nearest, ties to even. NaN is handled separately, because the carry would change its bits."""

    def constant(number: int) -> Any:
        return _fill(of(_I32), number)

    bits = builder.bitcast(value, of(_I32))
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), constant(0x7FFF)), constant(16))
    magnitude = builder.and_(bits, constant(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
    return builder.trunc(builder.select(is_nan, constant(0x7FC0), rounded), of(_I16))


def _round_e4m3(builder: Any, value: Any, of: Callable[[Any], Any]) -> Any:
    """Rounds values of at most 448 to nearest, ties to even. `e4m3.encode_elements` explains the steps."""

    def constant(number: int) -> Any:
        return _fill(of(_I32), number)

    bits = builder.bitcast(value, of(_I32))
    size = builder.and_(bits, constant(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, constant(20)), constant(1))
    cut = builder.lshr(builder.add(builder.add(size, odd), constant(0x7FFFF)), constant(20))
    normal = builder.sub(cut, constant(120 << 3))
    shifted = builder.fadd(builder.bitcast(size, of(_F32)), _fill(of(_F32), 16384.0))
    small = builder.sub(builder.bitcast(shifted, of(_I32)), constant(0x46800000))
    is_small = builder.icmp_unsigned("<", size, constant(0x3C800000))
    sign = builder.and_(builder.lshr(bits, constant(24)), constant(0x80))
    return builder.trunc(builder.or_(builder.select(is_small, small, normal), sign), of(_I8))


def narrow_value(builder: Any, element: Any, value: Any, lanes: int = 1) -> Any:
    """Rounds a float32, or a vector of `lanes` float32, to the type `element`: to nearest, ties to even."""

    def of(kind: Any) -> Any:
        return kind if lanes == 1 else ir.VectorType(kind, lanes)

    if element == types.uint16:
        return _round_bfloat16(builder, value, of)
    if element == types.int16:
        return builder.bitcast(builder.fptrunc(value, of(ir.HalfType())), of(_I16))
    if element == types.uint8:
        return _round_e4m3(builder, value, of)
    return value


@intrinsic
def widen(typing: Any, value: Any) -> Any:
    """Converts an element of any array to float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return widen_value(builder, value, args[0])

    return types.float32(value), emit


def _emit_magnitude(builder: Any, element: Any, value: Any) -> tuple[Any, Any]:
    """Emits two values: the bits of an element without the sign bit (int32), and whether the element is negative."""
    bits = builder.bitcast(value, _I32) if element == types.float32 else builder.sext(value, _I32)
    mask = 0x7FFFFFFF if element == types.float32 else 0x7FFF
    return builder.and_(bits, _I32(mask)), builder.icmp_signed("<", bits, _I32(0))


@intrinsic
def magnitude(typing: Any, value: Any) -> Any:
    """Maps an element of the model's dtype to an int32 that grows with the element's magnitude."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_magnitude(builder, value, args[0])[0]

    return types.int32(value), emit


@compiled
def find_largest_magnitude(row: Array) -> Int:
    """The greatest magnitude as the bits of a float32.

    It is `INFINITY_BITS` or more if any element is infinite or NaN.
    """
    largest = np.int32(0)
    for i in range(row.shape[0]):
        largest = max(largest, magnitude(widen(row[i])))
    return largest


@intrinsic
def sortable_int(typing: Any, value: Any) -> Any:
    """Maps an element of the model's dtype to an int32 that sorts like the element.

    NaN sorts beyond the infinity with the same sign.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size, is_negative = _emit_magnitude(builder, value, args[0])
        return builder.select(is_negative, builder.neg(size), size)

    return types.int32(value), emit


@intrinsic
def is_nan_magnitude(typing: Any, size: Int, array: Array) -> Any:
    """Whether an element of `array` is NaN. size: the `magnitude` of the element."""
    infinite = {types.uint16: 0x7F80, types.int16: 0x7C00, types.float32: 0x7F800000}[array.dtype]

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.icmp_signed(">", args[0], _I32(infinite))

    return types.boolean(types.int32, array), emit


@intrinsic
def narrow(typing: Any, value: Float, array: Array) -> Any:
    """Rounds a float32 to the element type of `array`: to nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return narrow_value(builder, array.dtype, args[0])

    return array.dtype(types.float32, array), emit


@intrinsic
def convert(typing: Any, value: Any, array: Array) -> Any:
    """Converts an element of any array to the element type of `array`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == array.dtype:
            return args[0]
        return narrow_value(builder, array.dtype, widen_value(builder, value, args[0]))

    return array.dtype(value, array), emit


def emit_prefetch(builder: Any, pointer: Any, cache: int = _SECOND_CACHE) -> None:
    """Prefetches the cache line at `pointer`, a byte pointer, into the L2 cache, or into another one.

    A core can have only about 24 pending fetches into L1. For 32 adapters with two tokens each, LoRA took 0.70 of the
    time of the base matmuls with prefetch into L1, and 0.60 with prefetch into L2 (EPYC, Zen 5).
    """
    function = cgutils.get_or_insert_function(builder.module, _PREFETCH_TYPE, "llvm.prefetch.p0")
    builder.call(function, [pointer, _I32(0), _I32(cache), _I32(1)])


@intrinsic
def _prefetch(typing: Any, array: Array, index: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        emit_prefetch(builder, builder.bitcast(builder.gep(data, [args[1]]), _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


@compiled
def prefetch(array: Array) -> None:
    """Prefetches a row that will be read soon. Rows are too short for the hardware prefetcher."""
    for i in range(0, array.shape[0], CACHE_LINE_BYTES // array.itemsize):
        _prefetch(array, i)


@intrinsic
def to_bits(typing: Any, value: Float) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), emit


@intrinsic
def from_bits(typing: Any, bits: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), emit


# Taylor coefficients of 2^f for |f| <= 0.5. The first omitted term is 5e-9.
EXP2_TERMS = tuple(np.float32(np.log(2.0) ** k / np.prod(np.arange(1.0, k + 1))) for k in range(1, 8))
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = EXP2_TERMS
_HALF, _ONE, _ZERO, _LOWEST = np.float32(0.5), np.float32(1.0), np.float32(0.0), np.float32(-126.0)


@compiled
def exp2(x: Float) -> Float:
    """2^x for x <= 0, and 0 below -126. It calls no other function, so a loop that calls it can be vectorised."""
    clamped = max(x, _LOWEST)
    whole = np.int32(clamped - _HALF)
    f = clamped - np.float32(whole)
    series = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7))))))
    power = from_bits((whole + np.int32(127)) << np.int32(23))
    return series * power if x >= _LOWEST else _ZERO


@compiled
def copy_converted(target: Array, source: Array) -> None:
    """target = source, rounded to the element type of `target`."""
    for i in range(source.shape[0]):
        target[i] = convert(source[i], target)


@compiled
def multiply_columns(rows: Array, factors: Array) -> None:
    """rows [M, n] *= factors [n]."""
    for m in range(rows.shape[0]):
        row = rows[m]
        for n in range(factors.shape[0]):
            row[n] = narrow(widen(row[n]) * widen(factors[n]), row)


@compiled
def fill(row: Array, number: Float) -> None:
    """Sets all elements of the row to `number`, rounded to the row's element type."""
    for i in range(row.shape[0]):
        row[i] = narrow(number, row)


@compiled
def clear(array: Array) -> None:
    for i in range(array.shape[0]):
        array[i] = _ZERO
