"""Norm, activation and rotation on a CPU: one pass over each row, read in the model's dtype, computed in float32."""

import numpy as np

from slora_kernels.numba_language import (
    Array,
    Float,
    Job,
    compiled,
    count_items,
    exp2,
    narrow,
    read_float,
    read_float_matrix,
    read_int,
    read_int64_matrix,
    read_model_matrix,
    take_item,
    widen,
)

_ZERO, _ONE, _LOG2_E = np.float32(0.0), np.float32(1.0), np.float32(np.log2(np.e))


@compiled
def norm_row(out: Array, x: Array, weight: Array, eps: Float) -> None:
    squares = _ZERO
    for i in range(x.shape[0]):
        value = widen(x[i])
        squares += value * value
    scale = _ONE / np.sqrt(squares / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = narrow(widen(x[i]) * scale * widen(weight[i]), out)


@compiled
def add_to(residual: Array, x: Array) -> None:
    for i in range(x.shape[0]):
        residual[i] = narrow(widen(residual[i]) + widen(x[i]), residual)


# Fields of a norm job; X is the residual itself when there is nothing to add.
X, RESIDUAL, WEIGHT, OUT, EPS, ADDS = range(6)


def rms_norm_worker(job: Job) -> None:
    """Items: rows."""
    x, residual, out = (
        read_model_matrix(job, X),
        read_model_matrix(job, RESIDUAL),
        read_model_matrix(job, OUT),
    )
    weight, eps, adds = read_model_matrix(job, WEIGHT)[0], read_float(job, EPS), read_int(job, ADDS)
    size = weight.shape[0]
    row = take_item(job)
    while row < count_items(job):
        if adds:
            add_to(residual[row, :size], x[row, :size])
        norm_row(out[row], residual[row, :size], weight, eps)
        row = take_item(job)


@compiled
def silu_row(out: Array, gate: Array, up: Array) -> None:
    for i in range(out.shape[0]):
        value = widen(gate[i])
        small = exp2(-abs(value) * _LOG2_E)
        sigmoid = (_ONE if value >= _ZERO else small) / (_ONE + small)
        out[i] = narrow(value * sigmoid * widen(up[i]), out)


# Fields of an activation job.
GATE_UP, ACTIVATED = range(2)


def silu_mul_worker(job: Job) -> None:
    """Items: rows."""
    gate_up, out = read_model_matrix(job, GATE_UP), read_model_matrix(job, ACTIVATED)
    width = out.shape[1]
    row = take_item(job)
    while row < count_items(job):
        silu_row(out[row], gate_up[row, :width], gate_up[row, width : 2 * width])
        row = take_item(job)


@compiled
def rotate_head(target: Array, source: Array, angles: Array) -> None:
    """Rotates the halves of a head; target may be source. angles: cosines, then sines."""
    half = angles.shape[0] // 2
    a, b, cos, sin = source[:half], source[half : 2 * half], angles[:half], angles[half:]
    low, high = target[:half], target[half : 2 * half]
    for i in range(half):
        x, y = widen(a[i]), widen(b[i])
        low[i] = narrow(x * cos[i] - y * sin[i], target)
        high[i] = narrow(y * cos[i] + x * sin[i], target)


@compiled
def copy_row(target: Array, source: Array) -> None:
    for i in range(source.shape[0]):
        target[i] = source[i]


# Fields of a rotation job; LAYER_START is where the layer begins in a page.
QKV, COS_SIN, KV_PAGES, POSITIONS, KV_SLOTS, HEADS, KV_HEADS, BLOCK_TOKENS, LAYER_START = range(9)


def rotate_and_write_kv_worker(job: Job) -> None:
    """Items: tokens."""
    qkv, pages = read_model_matrix(job, QKV), read_model_matrix(job, KV_PAGES)
    cos_sin, positions = read_float_matrix(job, COS_SIN), read_int64_matrix(job, POSITIONS)[0]
    kv_slots, heads, kv_heads = (
        read_int64_matrix(job, KV_SLOTS)[0],
        read_int(job, HEADS),
        read_int(job, KV_HEADS),
    )
    block_tokens, layer_start = read_int(job, BLOCK_TOKENS), read_int(job, LAYER_START)
    size = cos_sin.shape[1]
    token = take_item(job)
    while token < count_items(job):
        row, angles = qkv[token], cos_sin[positions[token]]
        for head in range(heads):
            q = row[head * size : head * size + size]
            rotate_head(q, q, angles)
        slot = kv_slots[token]
        page, at = pages[slot // block_tokens], layer_start + slot % block_tokens * size
        for head in range(kv_heads):
            source = (heads + head) * size
            target = at + head * block_tokens * size
            rotate_head(page[target : target + size], row[source : source + size], angles)
            source += kv_heads * size
            target += kv_heads * block_tokens * size
            copy_row(page[target : target + size], row[source : source + size])
        token = take_item(job)
