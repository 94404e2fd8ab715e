"""Norm, activation and rotation on a CPU: one pass over each row, read in the model's dtype, computed in float32.

The loops over a row are vector code, because LLVM does not vectorise a loop that writes what it reads, such as a
rotation in place. Such loops took up to ten times as long.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import LANES
from slora_kernels.cpu.workers.intrinsics import (
    INFINITY_BITS,
    Array,
    Float,
    Int,
    Job,
    compiled,
    count_items,
    exp2,
    fill,
    find_largest_magnitude,
    from_bits,
    intrinsic,
    narrow,
    read_bfloat16_matrix,
    read_byte_matrix,
    read_float,
    read_float_matrix,
    read_int,
    read_int64_matrix,
    read_model_matrix,
    take_shared_item,
    take_thread_index,
    to_bits,
    widen,
)
from slora_kernels.cpu.workers.vectors import (
    EXACT,
    I32,
    I64,
    IN_ORDER,
    VECTOR,
    Memory,
    exp2_vector,
    mask_below,
    max_vector,
    multiply_add,
    splat,
    sum_lanes,
)
from slora_kernels.layout import LARGEST_E4M3

_ZERO, _ONE, _NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
_LOG2_E, _ROOT_HALF, _LOWEST = np.float32(np.log2(np.e)), np.float32(np.sqrt(0.5)), np.float32(-126.0)
_GELU_SCALE, _GELU_CUBE = np.float32(np.sqrt(8.0 / np.pi)), np.float32(0.044715)
# The Chebyshev fit of erfc from Numerical Recipes (2nd edition, section 6.2, erfcc), with a relative error below
# 1.2e-7.
_ERFC_TERMS = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)
# Sums that a row adds side by side.
_NUM_SUMS = 4


def emit_columns(builder: Any, size: Any, emit: Callable[[int, Any, Any], None], num_chains: int = 1) -> None:
    """Emits code for all columns of a row. size: the number of columns, an int64.

    emit(chain, column, mask) emits the code for LANES columns. mask: the lanes before `size`; None if all are. The code
    of neighbouring columns is emitted with different chains.
    """
    step = num_chains * LANES
    done = I64(0)
    if num_chains > 1:
        done = builder.mul(builder.sdiv(size, I64(step)), I64(step))
        with cgutils.for_range_slice(builder, I64(0), done, I64(step)) as (column, _):
            for chain in range(num_chains):
                emit(chain, builder.add(column, I64(chain * LANES)), None)
    whole = builder.mul(builder.sdiv(size, I64(LANES)), I64(LANES))
    with cgutils.for_range_slice(builder, done, whole, I64(LANES)) as (column, _):
        emit(0, column, None)
    with builder.if_then(builder.icmp_signed("<", whole, size)):
        emit(0, whole, mask_below(builder, builder.sub(size, whole)))


def _access_rows(context: Any, builder: Any, signature: Any, args: Any) -> tuple[Memory, Memory, Memory]:
    """Returns the first three arrays of an intrinsic, which are single rows, as `Memory`."""
    first, second, third = (
        Memory(context, builder, kind, value, I64(0))
        for kind, value in zip(signature.args[:3], args[:3], strict=True)
    )
    return first, second, third


def _emit_squares(context: Any, builder: Any, size: Any, find: Callable[[Any, Any], Any]) -> Any:
    """Emits the sum of the squares of a row. find(column, mask) emits LANES numbers of the row."""
    sums = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for _ in range(_NUM_SUMS)]

    def emit(chain: int, column: Any, mask: Any) -> None:
        numbers = find(column, mask)
        builder.store(multiply_add(builder, numbers, numbers, builder.load(sums[chain])), sums[chain])

    emit_columns(builder, size, emit, _NUM_SUMS)
    low, high, *rest = map(builder.load, sums)
    total = builder.fadd(low, high, flags=IN_ORDER)
    total = builder.fadd(total, builder.fadd(*rest, flags=IN_ORDER), flags=IN_ORDER)
    return builder.extract_element(sum_lanes(builder, [total]), I32(0))


@intrinsic
def sum_squares(typing: Any, row: Array, size: Int) -> Any:
    """The sum of the squares of the first `size` numbers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = Memory(context, builder, row, args[0], I64(0))
        return _emit_squares(context, builder, args[1], lambda column, mask: source.load(0, column, mask))

    return types.float32(row, types.int64), emit


@intrinsic
def add_row(typing: Any, residual: Array, x: Array, size: Int) -> Any:
    """residual += x. Returns the sum of the squares of the result, which is rounded to the dtype of `residual`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = Memory(context, builder, residual, args[0], I64(0))
        source = Memory(context, builder, x, args[1], I64(0))

        def add(column: Any, mask: Any) -> Any:
            numbers = target.load(0, column, mask), source.load(0, column, mask)
            stored = target.narrow(builder.fadd(*numbers, flags=IN_ORDER))
            target.store_stored(0, column, stored, mask)
            return target.widen(stored)

        return _emit_squares(context, builder, args[2], add)

    return types.float32(residual, x, types.int64), emit


@intrinsic
def scale_row(typing: Any, out: Array, x: Array, weight: Array, scale: Float, size: Int) -> Any:
    """out = x * scale * weight."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, gains = _access_rows(context, builder, signature, args)
        factor = splat(builder, args[3])

        def multiply(_chain: int, column: Any, mask: Any) -> None:
            scaled = builder.fmul(source.load(0, column, mask), factor, flags=IN_ORDER)
            product = builder.fmul(scaled, gains.load(0, column, mask), flags=IN_ORDER)
            target.store(0, column, product, mask)

        emit_columns(builder, args[4], multiply)
        return context.get_dummy_value()

    return types.void(out, x, weight, types.float32, types.int64), emit


@compiled
def invert_rms(squares: Float, size: Int, eps: Float) -> Float:
    """1 / sqrt(mean + eps), of the mean of `size` squares."""
    return _ONE / np.sqrt(squares / np.float32(size) + eps)


# Fields of a norm job. ADDS: whether X is added to RESIDUAL first. If not, X and RESIDUAL are the same tensor.
# WIDE: whether the weight is float32.
X, RESIDUAL, WEIGHT, OUT, EPS, ADDS, WIDE = range(7)


def rms_norm_worker(job: Job) -> None:
    """RMS norm of each row, after an optional residual add. Each item of the job is one row."""
    x, residual, out = (
        read_model_matrix(job, X),
        read_model_matrix(job, RESIDUAL),
        read_model_matrix(job, OUT),
    )
    weight, wide_weight = read_model_matrix(job, WEIGHT)[0], read_float_matrix(job, WEIGHT)[0]
    eps, adds, is_wide, size = read_float(job, EPS), read_int(job, ADDS), read_int(job, WIDE), out.shape[1]
    row, share = take_shared_item(job, take_thread_index(job))
    while row < count_items(job):
        own = residual[row]
        squares = add_row(own, x[row], size) if adds else sum_squares(own, size)
        scale = invert_rms(squares, size, eps)
        if is_wide:
            scale_row(out[row], own, wide_weight, scale, size)
        else:
            scale_row(out[row], own, weight, scale, size)
        row, share = take_shared_item(job, share)


@compiled
def sigmoid(value: Float) -> Float:
    small = exp2(-abs(value) * _LOG2_E)
    return (_ONE if value >= _ZERO else small) / (_ONE + small)


def _number(number: float | np.floating[Any]) -> Any:
    return ir.Constant(VECTOR, [float(number)] * LANES)


def _magnitude(builder: Any, value: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.fabs.v{LANES}f32"
    )
    return builder.call(function, [value])


def _emit_power(builder: Any, x: Any) -> Any:
    """2^x for lanes with x <= 0, which may be infinite, and 0 below -126: products with smaller powers take ten times
    as long.
    """
    power = exp2_vector(builder, max_vector(builder, _number(_LOWEST), x))
    is_lower = builder.fcmp_ordered("<", x, _number(_LOWEST))
    return builder.select(is_lower, _number(0.0), power)


def _emit_sigmoid(builder: Any, value: Any) -> Any:
    slope = builder.fmul(_magnitude(builder, value), _number(-_LOG2_E), flags=IN_ORDER)
    small = _emit_power(builder, slope)
    is_negative = builder.fcmp_ordered("<", value, _number(0.0))
    numerator = builder.select(is_negative, small, _number(1.0))
    return builder.fdiv(numerator, builder.fadd(_number(1.0), small, flags=IN_ORDER), flags=EXACT)


def _emit_normal_cdf(builder: Any, value: Any) -> Any:
    """The normal distribution's CDF: erfc(-value / sqrt(2)) / 2."""
    z = builder.fmul(_magnitude(builder, value), _number(_ROOT_HALF), flags=IN_ORDER)
    halved = multiply_add(builder, z, _number(0.5), _number(1.0))
    t = builder.fdiv(_number(1.0), halved, flags=EXACT)
    highest, *others = reversed(_ERFC_TERMS)
    series = _number(highest)
    for term in others:
        series = multiply_add(builder, t, series, _number(term))
    exponent = multiply_add(builder, builder.fneg(z), z, series)
    power = _emit_power(builder, builder.fmul(exponent, _number(_LOG2_E), flags=IN_ORDER))
    tail = builder.fmul(builder.fmul(t, _number(0.5), flags=IN_ORDER), power, flags=IN_ORDER)
    is_negative = builder.fcmp_ordered("<", value, _number(0.0))
    return builder.select(is_negative, tail, builder.fsub(_number(1.0), tail, flags=IN_ORDER))


def _emit_tanh_factor(builder: Any, value: Any) -> Any:
    """(1 + tanh(y)) / 2, which is sigmoid(2 y)."""
    square = builder.fmul(value, value, flags=IN_ORDER)
    slope = multiply_add(builder, square, _number(_GELU_CUBE * _GELU_SCALE), _number(_GELU_SCALE))
    return _emit_sigmoid(builder, builder.fmul(value, slope, flags=IN_ORDER))


def _emit_activation(emit_factor: Callable[[Any, Any], Any]) -> Any:
    """Builds a function that computes out = gate * factor(gate) * up. emit_factor(builder, gate) emits the factor."""

    @intrinsic
    def activate(typing: Any, out: Array, gate: Array, up: Array, size: Int) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, gates, ups = _access_rows(context, builder, signature, args)

            def multiply(_chain: int, column: Any, mask: Any) -> None:
                value = gates.load(0, column, mask)
                activated = builder.fmul(value, emit_factor(builder, value), flags=IN_ORDER)
                product = builder.fmul(activated, ups.load(0, column, mask), flags=IN_ORDER)
                target.store(0, column, product, mask)

            emit_columns(builder, args[3], multiply)
            return context.get_dummy_value()

        return types.void(out, gate, up, types.int64), emit

    return activate


silu_row = _emit_activation(_emit_sigmoid)
gelu_row = _emit_activation(_emit_normal_cdf)
gelu_tanh_row = _emit_activation(_emit_tanh_factor)


# Fields of an activation job. ACTIVATION is an index into ACTIVATIONS.
GATE_UP, ACTIVATED, ACTIVATION = range(3)


def act_mul_worker(job: Job) -> None:
    """Multiplies act(gate) by up in each row. Each item of the job is one row."""
    gate_up, out = read_model_matrix(job, GATE_UP), read_model_matrix(job, ACTIVATED)
    width, activation = out.shape[1], read_int(job, ACTIVATION)
    row, share = take_shared_item(job, take_thread_index(job))
    while row < count_items(job):
        gate, up = gate_up[row, :width], gate_up[row, width : 2 * width]
        if activation == 0:
            silu_row(out[row], gate, up, width)
        elif activation == 1:
            gelu_row(out[row], gate, up, width)
        else:
            gelu_tanh_row(out[row], gate, up, width)
        row, share = take_shared_item(job, share)


@compiled
def copy_row(target: Array, source: Array) -> None:
    for i in range(source.shape[0]):
        target[i] = source[i]


@intrinsic
def _rotate(typing: Any, target: Array, source: Array, angles: Array, half: Int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, numbers, turns = _access_rows(context, builder, signature, args)

        def turn(_chain: int, column: Any, mask: Any) -> None:
            other = builder.add(column, args[3])
            x, y = numbers.load(0, column, mask), numbers.load(0, other, mask)
            emit_turn(builder, to, (x, y), turns, (column, other), mask)

        emit_columns(builder, args[3], turn)
        return context.get_dummy_value()

    return types.void(target, source, angles, types.int64), emit


def emit_turn(
    builder: Any, to: Memory, numbers: tuple[Any, Any], turns: Memory, columns: tuple[Any, Any], mask: Any
) -> None:
    """Rotates pairs of numbers and stores them at `columns`, where `turns` has their cosines and sines."""
    (x, y), (column, other) = numbers, columns
    cos, sin = turns.load(0, column, mask), turns.load(0, other, mask)
    low = builder.fneg(builder.fmul(y, sin, flags=IN_ORDER))
    to.store(0, column, multiply_add(builder, x, cos, low), mask)
    high = builder.fmul(x, sin, flags=IN_ORDER)
    to.store(0, other, multiply_add(builder, y, cos, high), mask)


@compiled
def rotate_head(target: Array, source: Array, angles: Array) -> None:
    """Rotates the first len(angles) dimensions of a head and copies the others. `target` may be `source`.

    angles: cosines, then sines.
    """
    turned = angles.shape[0]
    _rotate(target, source, angles, turned // 2)
    if turned < source.shape[0]:
        copy_row(target[turned:], source[turned:])


@intrinsic
def _scale_and_rotate(typing: Any, head: Array, angles: Array, weight: Array, scale: Float, half: Int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, turns, gains = _access_rows(context, builder, signature, args)
        factor = splat(builder, args[3])

        def turn(_chain: int, column: Any, mask: Any) -> None:
            columns = column, builder.add(column, args[4])
            scaled = [
                builder.fmul(
                    builder.fmul(numbers.load(0, at, mask), factor, flags=IN_ORDER),
                    gains.load(0, at, mask),
                    flags=IN_ORDER,
                )
                for at in columns
            ]
            emit_turn(builder, numbers, (scaled[0], scaled[1]), turns, columns, mask)

        emit_columns(builder, args[4], turn)
        return context.get_dummy_value()

    return types.void(head, angles, weight, types.float32, types.int64), emit


@compiled
def norm_and_rotate_head(head: Array, angles: Array, weight: Array, eps: Float) -> None:
    """Normalises and rotates a head in place, with a single rounding."""
    size, turned = head.shape[0], angles.shape[0]
    scale = invert_rms(sum_squares(head, size), size, eps)
    _scale_and_rotate(head, angles, weight, scale, turned // 2)
    if turned < size:
        rest = head[turned:]
        scale_row(rest, rest, weight[turned:], scale, size - turned)


# Fields of a rotation job: the fields of the call come first, then the step.
#
# LAYER_START and SCALE_START are where the layer's elements and scales begin in a page.
# COS_SIN has no columns if nothing is rotated.
# QUERY_NORM, KEY_NORM and HEAD_EPS are used only if NORMED, and SCALES only in fp8. SIDES is 1 if values are in keys.
(
    QKV,
    COS_SIN,
    LAYER_START,
    SCALE_START,
    NORMED,
    QUERY_NORM,
    KEY_NORM,
    HEAD_EPS,
    KV_PAGES,
    POSITIONS,
    KV_SLOTS,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    BLOCK_TOKENS,
    SCALES,
    SIDES,
) = range(17)

_LARGEST_E4M3 = np.float32(LARGEST_E4M3)
_NAN_SCALE, _SMALLEST_SCALE = 0x7FC0, 0x0080


@compiled
def compute_scale(largest: Int) -> Int:
    """Returns the bits of the bfloat16 scale of a K or V vector (see `KVFormat`).

    largest: greatest magnitude in the vector, as float32 bits.
    """
    exact = to_bits(from_bits(np.int32(largest)) / _LARGEST_E4M3)
    # The upper half of a float32 is a bfloat16. Adding 0xFFFF before taking it rounds up.
    return max((exact + 0xFFFF) >> 16, _SMALLEST_SCALE)


@compiled
def quantize_row(target: Array, source: Array, scale: Int) -> None:
    divisor = from_bits(np.int32(scale << 16))
    for i in range(source.shape[0]):
        target[i] = narrow(widen(source[i]) / divisor, target)


@compiled
def norm_and_rotate_heads(heads: Array, angles: Array, weight: Array, eps: Float) -> None:
    """Normalises and rotates the consecutive heads of one token in place."""
    size = weight.shape[0]
    for start in range(0, heads.shape[0], size):
        head = heads[start : start + size]
        norm_and_rotate_head(head, angles, weight, eps)


def rotate_and_write_kv_worker(job: Job) -> None:
    """Rotates the query and key heads of each token (after a norm if NORMED), and writes K and V to the page.

    Each item of the job is one token.
    """
    rotate_and_write_items(job, read_model_matrix(job, KV_PAGES), None)


def rotate_and_write_fp8_worker(job: Job) -> None:
    """Like `rotate_and_write_kv_worker`, for KV in fp8."""
    rotate_and_write_items(job, read_byte_matrix(job, KV_PAGES), read_bfloat16_matrix(job, SCALES))


@compiled
def write_key(target: Array, key: Array) -> None:
    """Writes a key that is also the value, see `KVGeometry.num_sides`."""
    if find_largest_magnitude(key) >= INFINITY_BITS:
        fill(target, _ZERO)
        fill(target[target.shape[0] - 1 :], _NAN)
    else:
        copy_row(target, key)


@compiled
def write_scaled_key(target: Array, scale_target: Array, key: Array) -> None:
    """Like `write_key`, in fp8."""
    largest = find_largest_magnitude(key)
    scale = _NAN_SCALE if largest >= INFINITY_BITS else compute_scale(largest)
    scale_target[0] = scale
    if scale == _NAN_SCALE:
        fill(target, _ZERO)
    else:
        quantize_row(target, key, scale)


@compiled
def rotate_and_write_items(job: Job, pages: Array, scales: Array | None) -> None:
    qkv = read_model_matrix(job, QKV)
    cos_sin, positions = read_float_matrix(job, COS_SIN), read_int64_matrix(job, POSITIONS)[0]
    kv_slots, normed = read_int64_matrix(job, KV_SLOTS)[0], read_int(job, NORMED)
    heads, kv_heads, size = read_int(job, HEADS), read_int(job, KV_HEADS), read_int(job, HEAD_DIM)
    block_tokens, layer_start = read_int(job, BLOCK_TOKENS), read_int(job, LAYER_START)
    turning, side, has_values = heads + kv_heads, kv_heads * block_tokens, read_int(job, SIDES) > 1
    token, share = take_shared_item(job, take_thread_index(job))
    while token < count_items(job):
        row, angles = qkv[token], cos_sin[positions[token]]
        if normed:
            eps = read_float(job, HEAD_EPS)
            norm_and_rotate_heads(row[: heads * size], angles, read_float_matrix(job, QUERY_NORM)[0], eps)
            keys = row[heads * size : turning * size]
            norm_and_rotate_heads(keys, angles, read_float_matrix(job, KEY_NORM)[0], eps)
        else:
            for head in range(heads):
                q = row[head * size : head * size + size]
                rotate_head(q, q, angles)
        slot = kv_slots[token]
        page, offset = pages[slot // block_tokens], slot % block_tokens
        for head in range(kv_heads):
            source = (heads + head) * size
            vector = head * block_tokens + offset
            target = layer_start + vector * size
            key = row[source : source + size]
            if not has_values:
                if not normed:
                    rotate_head(key, key, angles)
                if scales is not None:
                    write_scaled_key(
                        page[target : target + size],
                        scales[slot // block_tokens, read_int(job, SCALE_START) + vector :],
                        key,
                    )
                else:
                    write_key(page[target : target + size], key)
                continue
            value = row[source + kv_heads * size :][:size]
            key_target = page[target : target + size]
            value_target = page[target + side * size : target + side * size + size]
            if scales is not None:
                if not normed:
                    rotate_head(key, key, angles)
                largest_key, largest_value = find_largest_magnitude(key), find_largest_magnitude(value)
                key_scale, value_scale = compute_scale(largest_key), compute_scale(largest_value)
                if max(largest_key, largest_value) >= INFINITY_BITS:
                    key_scale, value_scale = _NAN_SCALE, _SMALLEST_SCALE
                    fill(key_target, _ZERO)
                    fill(value_target, _ZERO)
                else:
                    quantize_row(key_target, key, key_scale)
                    quantize_row(value_target, value, value_scale)
                beside = scales[slot // block_tokens, read_int(job, SCALE_START) :]
                beside[vector], beside[side + vector] = key_scale, value_scale
            else:
                if normed:
                    copy_row(key_target, key)
                else:
                    rotate_head(key_target, key, angles)
                if max(find_largest_magnitude(key_target), find_largest_magnitude(value)) >= INFINITY_BITS:
                    fill(key_target, _NAN)
                    fill(value_target, _ZERO)
                else:
                    copy_row(value_target, value)
        token, share = take_shared_item(job, share)
