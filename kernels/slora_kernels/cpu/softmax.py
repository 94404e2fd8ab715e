"""The online softmax (arXiv 2205.14135) of one row and one block of keys: scores, in base 2, become weights.

A row that sees a whole block has its scores in registers from the maximum to the sum; where the machine can't, and for
what a mask cuts off, the same is done in loops.
"""

from functools import reduce
from typing import Any

import numpy as np
from numba import types

from slora_kernels.cpu.language import (
    INFINITY_BITS,
    Array,
    Float,
    Int,
    clear,
    compiled,
    emitted,
    exp2,
    find_largest,
    narrow,
    widen,
)
from slora_kernels.cpu.vectors import (
    I32,
    I64,
    LANES,
    Memory,
    find_greater,
    join,
    raise_two,
    splat,
    sum_lanes,
)

# Keys of a block at most. With head dim 64 its keys and values are 8 KiB each in 16 bits, beside the scores in L2.
BLOCK_KEYS = 64
_ZERO, _ONE, _MINUS_TWO = np.float32(0.0), np.float32(1.0), np.float32(-2.0)
LOG2_E = np.float32(np.log2(np.e))
# Below any score.
LOW = np.float32(-1e30)


@compiled
def multiply(row: Array, factor: Float) -> None:
    for i in range(row.shape[0]):
        row[i] *= factor


@compiled
def soften(weights: Array, scores: Array, peak: Float) -> Float:
    """weights = 2^(scores - peak), which may be in place; returns their sum, as they are rounded."""
    total = _ZERO
    for n in range(scores.shape[0]):
        weight = narrow(exp2(scores[n] - peak), weights)
        weights[n] = weight
        total += widen(weight)
    return total


@compiled
def cap_scores(scores: Array, cap: Float) -> None:
    """scores = cap * tanh(scores / cap), both in base 2."""
    slope = _MINUS_TWO * LOG2_E / cap
    for n in range(scores.shape[0]):
        small = exp2(abs(scores[n]) * slope)
        size = cap * (_ONE - small) / (_ONE + small)
        scores[n] = -size if scores[n] < _ZERO else size


@compiled
def find_peak(scores: Array, low: Float) -> Float:
    peak = low
    for n in range(scores.shape[0]):
        peak = max(peak, scores[n])
    return peak


@compiled
def note_wrong(state: Array, scores: Array) -> None:
    """One row's result is no number if a score is none, or infinite. By their bits: the softmax is compiled as if there
    were no such numbers, and would leave them out."""
    if find_largest(scores) >= INFINITY_BITS:
        state[2] = _ONE


@compiled
def weigh(weights: Array, sums: Array, state: Array, scores: Array) -> None:
    """One row's step of the online softmax: its scores become weights, and what it has summed up so far shrinks to
    their scale. state is (peak, total, whether something was no number)."""
    peak = find_peak(scores, state[0])
    decay = exp2(state[0] - peak)
    state[0] = peak
    state[1] = state[1] * decay + soften(weights, scores, peak)
    if decay < _ONE:
        multiply(sums, decay)


@emitted
def _soften_whole(typing: Any, weights: Array, state: Array, scores: Array) -> Any:
    """Weights and state of a row that sees a whole block; returns by how much to shrink what it has summed up."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nowhere = I64(0)
        target = Memory(context, builder, weights, args[0], nowhere)
        kept = Memory(context, builder, state, args[1], nowhere)
        source = Memory(context, builder, scores, args[2], nowhere)
        starts = [I64(start) for start in range(0, BLOCK_KEYS, LANES)]
        found = [source.load(0, start) for start in starts]
        before = splat(builder, kept.load_one(0, I64(0)))
        peak = reduce(lambda a, b: find_greater(builder, a, b), found)
        part = LANES
        while part > 1:  # half upon half, until all lanes have the greatest
            part //= 2
            turned = join(builder, peak, peak, [(lane + part) % LANES for lane in range(LANES)])
            peak = find_greater(builder, peak, turned)
        peak = find_greater(builder, before, peak)
        rounded = []
        for start, vector in zip(starts, found, strict=True):
            stored = target.narrow(raise_two(builder, builder.fsub(vector, peak)))
            target.store_stored(0, start, stored)
            rounded.append(target.widen(stored))
        added = reduce(builder.fadd, rounded)
        total = builder.extract_element(sum_lanes(builder, [added]), I32(0))
        decay = builder.extract_element(raise_two(builder, builder.fsub(before, peak)), I32(0))
        sum_before = kept.load_one(0, I64(1))
        kept.store_one(I64(0), builder.extract_element(peak, I32(0)))
        kept.store_one(I64(1), builder.fadd(builder.fmul(sum_before, decay), total))
        return decay

    return types.float32(weights, state, scores), emit


@compiled
def weigh_whole(weights: Array, sums: Array, state: Array, scores: Array) -> None:
    """As `weigh`, of a row that sees a whole block."""
    decay = _soften_whole(weights, state, scores)
    if decay < _ONE:
        multiply(sums, decay)


@compiled
def weigh_token(
    weights: Array, sums: Array, state: Array, scores: Array, count: Int, factor: Float, cap: Float
) -> None:
    """Scores of a block, times `factor` -> their weights, both [M, BLOCK_KEYS]. All rows see its first `count` keys;
    weights of the others are 0."""
    for m in range(scores.shape[0]):
        multiply(scores[m], factor)
    is_wrong = find_largest(scores.reshape(scores.size)) >= INFINITY_BITS  # somewhere, and seldom
    for m in range(scores.shape[0]):
        row = scores[m]
        if is_wrong:
            note_wrong(state[m], row)
        if cap > _ZERO:
            cap_scores(row, cap)
        for n in range(count, BLOCK_KEYS):
            row[n] = LOW
        weigh_whole(weights[m], sums[m], state[m], row)


@compiled
def weigh_tile(
    weights: Array,
    sums: Array,
    state: Array,
    scores: Array,
    count: Int,
    before: Int,
    group: Int,
    window: Int,
    cap: Float,
) -> None:
    """Scores of the first `count` keys of a block -> their weights, both [M, BLOCK_KEYS]; 0 where a row does not see a
    key. Row m sees `window` keys, the last of them before + m // group."""
    is_wrong = find_largest(scores.reshape(scores.size)) >= INFINITY_BITS  # somewhere, and seldom
    for m in range(weights.shape[0]):
        end = before + m // group + 1
        seen, first = min(count, end), min(count, max(0, end - window))
        # A row first, then what it sees of it: the compiler must know that its numbers lie side by side.
        own, row = weights[m], scores[m]
        if first < seen:
            if is_wrong:
                note_wrong(state[m], row[first:seen])
            if cap > _ZERO:
                cap_scores(row[first:seen], cap)
            if seen - first == BLOCK_KEYS:
                weigh_whole(own, sums[m], state[m], row)
            else:
                weigh(own[first:seen], sums[m], state[m], row[first:seen])
        if seen - first < count:
            clear(own[:first])
            clear(own[max(first, seen) : count])
