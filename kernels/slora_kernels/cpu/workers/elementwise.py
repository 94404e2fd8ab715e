"""Norm, activation and rotation on a CPU: one pass over each row, read in the model's dtype, computed in float32."""

import numpy as np

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
    narrow,
    read_bfloat16_matrix,
    read_byte_matrix,
    read_float,
    read_float_matrix,
    read_int,
    read_int64_matrix,
    read_model_matrix,
    take_item,
    to_bits,
    widen,
)
from slora_kernels.layout import LARGEST_E4M3

_ZERO, _HALF, _ONE, _NAN = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(np.nan)
_LOG2_E, _ROOT_HALF = np.float32(np.log2(np.e)), np.float32(np.sqrt(0.5))
_GELU_SCALE, _GELU_CUBE = np.float32(np.sqrt(8.0 / np.pi)), np.float32(0.044715)
_E0, _E1, _E2, _E3, _E4 = (
    np.float32(c) for c in (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806)
)
_E5, _E6, _E7, _E8, _E9 = (
    np.float32(c) for c in (0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)
)


@compiled
def compute_inverse_rms(x: Array, eps: Float) -> Float:
    """1 / sqrt(mean(x^2) + eps)."""
    squares = _ZERO
    for i in range(x.shape[0]):
        value = widen(x[i])
        squares += value * value
    return _ONE / np.sqrt(squares / np.float32(x.shape[0]) + eps)


@compiled
def norm_row(out: Array, x: Array, weight: Array, eps: Float) -> None:
    scale = compute_inverse_rms(x, eps)
    for i in range(x.shape[0]):
        out[i] = narrow(widen(x[i]) * scale * widen(weight[i]), out)


@compiled
def add_row(residual: Array, x: Array) -> None:
    for i in range(x.shape[0]):
        residual[i] = narrow(widen(residual[i]) + widen(x[i]), residual)


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
    row = take_item(job)
    while row < count_items(job):
        if adds:
            add_row(residual[row, :size], x[row, :size])
        if is_wide:
            norm_row(out[row], residual[row, :size], wide_weight, eps)
        else:
            norm_row(out[row], residual[row, :size], weight, eps)
        row = take_item(job)


@compiled
def sigmoid(value: Float) -> Float:
    small = exp2(-abs(value) * _LOG2_E)
    return (_ONE if value >= _ZERO else small) / (_ONE + small)


@compiled
def normal_cdf(value: Float) -> Float:
    """The normal distribution's CDF at `value`: erfc(-value / sqrt(2)) / 2, with a relative error below 1.2e-7.

    Chebyshev fit from Numerical Recipes (2nd edition, section 6.2, erfcc). It calls no other function, so a loop
    that calls it can be vectorised.
    """
    z = abs(value) * _ROOT_HALF
    t = _ONE / (_ONE + _HALF * z)
    series = _E5 + t * (_E6 + t * (_E7 + t * (_E8 + t * _E9)))
    series = _E0 + t * (_E1 + t * (_E2 + t * (_E3 + t * (_E4 + t * series))))
    tail = _HALF * t * exp2((series - z * z) * _LOG2_E)
    return _ONE - tail if value >= _ZERO else tail


@compiled
def silu_row(out: Array, gate: Array, up: Array) -> None:
    for i in range(out.shape[0]):
        value = widen(gate[i])
        out[i] = narrow(value * sigmoid(value) * widen(up[i]), out)


@compiled
def gelu_row(out: Array, gate: Array, up: Array) -> None:
    for i in range(out.shape[0]):
        value = widen(gate[i])
        out[i] = narrow(value * normal_cdf(value) * widen(up[i]), out)


@compiled
def gelu_tanh_row(out: Array, gate: Array, up: Array) -> None:
    """out = gelu_tanh(gate) * up, computed with (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    for i in range(out.shape[0]):
        value = widen(gate[i])
        factor = sigmoid(_GELU_SCALE * (value + _GELU_CUBE * value * value * value))
        out[i] = narrow(value * factor * widen(up[i]), out)


# Fields of an activation job. ACTIVATION is an index into ACTIVATIONS.
GATE_UP, ACTIVATED, ACTIVATION = range(3)


def act_mul_worker(job: Job) -> None:
    """Multiplies act(gate) by up in each row. Each item of the job is one row."""
    gate_up, out = read_model_matrix(job, GATE_UP), read_model_matrix(job, ACTIVATED)
    width, activation = out.shape[1], read_int(job, ACTIVATION)
    row = take_item(job)
    while row < count_items(job):
        gate, up = gate_up[row, :width], gate_up[row, width : 2 * width]
        if activation == 0:
            silu_row(out[row], gate, up)
        elif activation == 1:
            gelu_row(out[row], gate, up)
        else:
            gelu_tanh_row(out[row], gate, up)
        row = take_item(job)


@compiled
def copy_row(target: Array, source: Array) -> None:
    for i in range(source.shape[0]):
        target[i] = source[i]


@compiled
def rotate_head(target: Array, source: Array, angles: Array) -> None:
    """Rotates the first len(angles) dimensions of a head and copies the others. `target` may be `source`.

    angles: cosines, then sines.
    """
    half = angles.shape[0] // 2
    a, b, cos, sin = source[:half], source[half : 2 * half], angles[:half], angles[half:]
    low, high = target[:half], target[half : 2 * half]
    for i in range(half):
        x, y = widen(a[i]), widen(b[i])
        low[i] = narrow(x * cos[i] - y * sin[i], target)
        high[i] = narrow(y * cos[i] + x * sin[i], target)
    if 2 * half < source.shape[0]:
        copy_row(target[2 * half :], source[2 * half :])


@compiled
def norm_and_rotate_head(target: Array, source: Array, angles: Array, weight: Array, eps: Float) -> None:
    """Normalises and rotates a head with a single rounding. `target` may be `source`."""
    scale, half = compute_inverse_rms(source, eps), angles.shape[0] // 2
    a, b, cos, sin = source[:half], source[half : 2 * half], angles[:half], angles[half:]
    low, high, v, w = target[:half], target[half : 2 * half], weight[:half], weight[half : 2 * half]
    for i in range(half):
        x, y = widen(a[i]) * scale * v[i], widen(b[i]) * scale * w[i]
        low[i] = narrow(x * cos[i] - y * sin[i], target)
        high[i] = narrow(y * cos[i] + x * sin[i], target)
    still, rest, gain = target[2 * half :], source[2 * half :], weight[2 * half :]
    for i in range(rest.shape[0]):
        still[i] = narrow(widen(rest[i]) * scale * gain[i], target)


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
        norm_and_rotate_head(head, head, angles, weight, eps)


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
    token = take_item(job)
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
        token = take_item(job)
