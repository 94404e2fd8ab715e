"""One token of a recurrence on a CPU: a short convolution, the gated delta rule, or Mamba-2's scan.

A state is read twice and written once, while it is in a core's own cache. Each item of a job is one sequence of a
convolution, or else one head of one sequence.
"""

import numpy as np

from slora_kernels.cpu.workers.elementwise import sigmoid
from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Float,
    Int,
    Job,
    compiled,
    count_items,
    narrow,
    read_float_matrix,
    read_int,
    read_model_matrix,
    take_item,
    take_thread_index,
    widen,
)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
# What transformers adds to the square of a key or a query.
_NORM_EPS = np.float32(1e-6)

# Fields of a convolution's job. KEPT: inputs of a channel in the state. TAPS: inputs that the convolution multiplies.
INPUT, WINDOW, TAP_WEIGHTS, BIAS, CONVOLVED, KEPT, TAPS, HAS_BIAS, ACTIVATES = range(9)


@compiled
def convolve_row(
    out: Array, x: Array, window: Array, weights: Array, bias: Array, kept: Int, taps: Int, has_bias: Int
) -> None:
    """window: the inputs before x, [channels * kept], which are moved on."""
    for channel in range(out.shape[0]):
        first, own = channel * kept, channel * taps
        last = x[channel]
        total = widen(last) * widen(weights[own + taps - 1])
        for k in range(taps - 1):
            total += widen(window[first + kept + 1 - taps + k]) * widen(weights[own + k])
        for k in range(kept - 1):
            window[first + k] = window[first + k + 1]
        window[first + kept - 1] = last
        if has_bias:
            total += widen(bias[channel])
        out[channel] = narrow(total, out)


@compiled
def activate_row(row: Array) -> None:
    for i in range(row.shape[0]):
        value = widen(row[i])
        row[i] = narrow(value * sigmoid(value), row)


def convolve_token_worker(job: Job) -> None:
    """Convolves one token of each sequence with the inputs before it. Each item of the job is one sequence."""
    x, window, out = (
        read_model_matrix(job, INPUT),
        read_model_matrix(job, WINDOW),
        read_model_matrix(job, CONVOLVED),
    )
    weights, bias = read_model_matrix(job, TAP_WEIGHTS)[0], read_model_matrix(job, BIAS)[0]
    kept, taps, has_bias = read_int(job, KEPT), read_int(job, TAPS), read_int(job, HAS_BIAS)
    activates, channels = read_int(job, ACTIVATES), out.shape[1]
    row = take_item(job)
    while row < count_items(job):
        convolve_row(out[row], x[row, :channels], window[row], weights, bias, kept, taps, has_bias)
        if activates:
            activate_row(out[row])
        row = take_item(job)


# Fields of both other jobs. HEADS: those of the state. SHARED_HEADS: those of keys and queries, or of Mamba's B and C.
STATE, READ, WRITE, VALUE, DECAY, FACTOR, RESULT, SCRATCH, HEADS, SHARED_HEADS, WIDTH, VALUE_WIDTH = range(12)
# Fields of one of them.
NORMS = 12
SKIP = 12


@compiled
def widen_row(target: Array, source: Array) -> Float:
    """target = source. Returns the sum of the squares."""
    total = _ZERO
    for i in range(target.shape[0]):
        value = widen(source[i])
        target[i] = value
        total += value * value
    return total


@compiled
def scale_row(row: Array, factor: Float) -> None:
    for i in range(row.shape[0]):
        row[i] *= factor


@compiled
def multiply_rows(row: Array, other: Array) -> Float:
    total = _ZERO
    for i in range(row.shape[0]):
        total += row[i] * other[i]
    return total


@compiled
def add_products(first: Array, second: Array, state: Array, a: Float, b: Float) -> None:
    """first += a * state, second += b * state."""
    for j in range(first.shape[0]):
        first[j] += a * state[j]
        second[j] += b * state[j]


@compiled
def update_row(state: Array, decay: Float, change: Array, factor: Float) -> None:
    for j in range(state.shape[0]):
        state[j] = state[j] * decay + factor * change[j]


def delta_rule_worker(job: Job) -> None:
    """The gated delta rule: the state decays, and then gets what its key does not yet give.

    READ has the queries, WRITE the keys, FACTOR beta, and DECAY what the state is multiplied with.
    """
    states, values, results = (
        read_float_matrix(job, STATE),
        read_model_matrix(job, VALUE),
        read_model_matrix(job, RESULT),
    )
    queries, keys, betas = (
        read_model_matrix(job, READ),
        read_model_matrix(job, WRITE),
        read_model_matrix(job, FACTOR),
    )
    decays, scratch = read_float_matrix(job, DECAY), read_float_matrix(job, SCRATCH)[take_thread_index(job)]
    heads, shared, norms = read_int(job, HEADS), read_int(job, SHARED_HEADS), read_int(job, NORMS)
    width, value_width = read_int(job, WIDTH), read_int(job, VALUE_WIDTH)
    size, group = width * value_width, heads // shared
    key, query = scratch[:width], scratch[width : 2 * width]
    seen, answer = scratch[2 * width :][:value_width], scratch[2 * width + value_width :][:value_width]
    root = _ONE / np.sqrt(np.float32(width))
    item = take_item(job)
    while item < count_items(job):
        sequence, head = item // heads, item % heads
        begin = head // group * width
        key_square = widen_row(key, keys[sequence, begin : begin + width])
        query_square = widen_row(query, queries[sequence, begin : begin + width])
        if norms:
            scale_row(key, _ONE / np.sqrt(key_square + _NORM_EPS))
            scale_row(query, root / np.sqrt(query_square + _NORM_EPS))
        else:
            scale_row(query, root)
        state = states[sequence, head * size : head * size + size]
        for j in range(value_width):
            seen[j] = _ZERO
            answer[j] = _ZERO
        for i in range(width):
            add_products(seen, answer, state[i * value_width : (i + 1) * value_width], key[i], query[i])
        decay, beta = decays[sequence, head], widen(betas[sequence, head])
        product = multiply_rows(key, query)
        value = values[sequence, head * value_width : (head + 1) * value_width]
        result = results[sequence, head * value_width : (head + 1) * value_width]
        for j in range(value_width):
            seen[j] = (widen(value[j]) - decay * seen[j]) * beta
            result[j] = narrow(decay * answer[j] + product * seen[j], result)
        for i in range(width):
            update_row(state[i * value_width : (i + 1) * value_width], decay, seen, key[i])
        item = take_item(job)


@compiled
def scan_row(state: Array, decay: Float, change: Float, written: Array, read: Array) -> Float:
    """state = decay * state + change * written. Returns its product with `read`."""
    total = _ZERO
    for n in range(state.shape[0]):
        number = state[n] * decay + change * written[n]
        state[n] = number
        total += number * read[n]
    return total


def scan_token_worker(job: Job) -> None:
    """Mamba-2's recurrence. WRITE has B, READ has C, FACTOR the time steps, and SKIP D."""
    states, values, results = (
        read_float_matrix(job, STATE),
        read_model_matrix(job, VALUE),
        read_model_matrix(job, RESULT),
    )
    outputs, inputs = read_model_matrix(job, READ), read_model_matrix(job, WRITE)
    decays, steps, skips = (
        read_float_matrix(job, DECAY),
        read_float_matrix(job, FACTOR),
        read_float_matrix(job, SKIP)[0],
    )
    scratch = read_float_matrix(job, SCRATCH)[take_thread_index(job)]
    heads, shared = read_int(job, HEADS), read_int(job, SHARED_HEADS)
    width, value_width = read_int(job, WIDTH), read_int(job, VALUE_WIDTH)
    size, group = width * value_width, heads // shared
    written, read = scratch[:width], scratch[width : 2 * width]
    item = take_item(job)
    while item < count_items(job):
        sequence, head = item // heads, item % heads
        begin = head // group * width
        widen_row(written, inputs[sequence, begin : begin + width])
        widen_row(read, outputs[sequence, begin : begin + width])
        state = states[sequence, head * size : head * size + size]
        decay, step = decays[sequence, head], steps[sequence, head]
        value = values[sequence, head * value_width : (head + 1) * value_width]
        result = results[sequence, head * value_width : (head + 1) * value_width]
        for d in range(value_width):
            x = widen(value[d])
            total = scan_row(state[d * width : (d + 1) * width], decay, x * step, written, read)
            result[d] = narrow(total + x * skips[head], result)
        item = take_item(job)
