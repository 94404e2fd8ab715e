"""The online softmax (arXiv 2205.14135) in base 2: turns one row's scores for one block of keys into weights.

The scores of a row stay in registers from the maximum to the sum. Every row takes the same steps: the keys of a block
that it does not see have the score `INITIAL_MAX`, and so the weight 0.
"""

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from slora_kernels.cpu.worker_sizes import (
    BLOCK_KEYS,
    LANES,
)
from slora_kernels.cpu.workers.intrinsics import (
    INFINITY_BITS,
    Array,
    Float,
    Int,
    as_row,
    clear,
    compiled,
    find_largest_magnitude,
    intrinsic,
)
from slora_kernels.cpu.workers.vectors import (
    EXACT,
    I32,
    I64,
    IN_ORDER,
    VECTOR,
    Memory,
    exp2_vector,
    max_vector,
    shuffle,
    splat,
    sum_lanes,
)

_ZERO, _ONE, _MINUS_TWO, _LOWEST = (np.float32(number) for number in (0.0, 1.0, -2.0, -126.0))
LOG2_E = np.float32(np.log2(np.e))
# Initial value of a running maximum: lower than any score.
INITIAL_MAX = np.float32(-1e30)


@compiled
def multiply(row: Array, factor: Float) -> None:
    for i in range(row.shape[0]):
        row[i] *= factor


@intrinsic
def _cap_vector(typing: Any, scores: Array, column: Int, cap: Float) -> Any:
    """Caps the LANES scores from `column` on."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def constant(number: float | np.floating[Any]) -> Any:
            return ir.Constant(VECTOR, [float(number)] * LANES)

        def call(name: str, *operands: Any) -> Any:
            kind = ir.FunctionType(VECTOR, [VECTOR] * len(operands))
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
            return builder.call(function, operands)

        target, limit = Memory(context, builder, scores, args[0], I64(0)), splat(builder, args[2])
        numbers = target.load(0, args[1])
        slope = builder.fdiv(constant(_MINUS_TWO * LOG2_E), limit, flags=EXACT)
        x = builder.fmul(call("fabs", numbers), slope, flags=IN_ORDER)
        # Below, 2^x changes nothing. The lower bound is for infinite scores.
        small = exp2_vector(builder, max_vector(builder, constant(_LOWEST), x))
        size = builder.fmul(limit, builder.fsub(constant(1.0), small, flags=IN_ORDER), flags=IN_ORDER)
        size = builder.fdiv(size, builder.fadd(constant(1.0), small, flags=IN_ORDER), flags=EXACT)
        target.store(0, args[1], call("copysign", size, numbers))
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.float32), emit


@compiled
def cap_scores(scores: Array, cap: Float) -> None:
    """scores = cap * tanh(scores / cap). Both `scores` and `cap` include the factor log2(e).

    The number of scores is a multiple of LANES.
    """
    for column in range(0, scores.shape[0], LANES):
        _cap_vector(scores, column, cap)


@compiled
def mark_not_finite(state: Array, scores: Array) -> None:
    """Marks a row whose result is NaN because a score is NaN or infinite.

    The check uses the bits of the scores, because fastmath lets the compiler assume that no score is NaN or infinite.
    """
    if find_largest_magnitude(scores) >= INFINITY_BITS:
        state[2] = _ONE


@intrinsic
def _update_state(typing: Any, weights: Array, state: Array, scores: Array) -> Any:
    """Computes the weights and the state of a row. Returns the factor for its earlier sums."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nowhere = I64(0)
        target = Memory(context, builder, weights, args[0], nowhere)
        kept = Memory(context, builder, state, args[1], nowhere)
        source = Memory(context, builder, scores, args[2], nowhere)
        starts = [I64(start) for start in range(0, BLOCK_KEYS, LANES)]
        found = [source.load(0, start) for start in starts]
        before = splat(builder, kept.load_scalar(0, I64(0)))
        peak = reduce(lambda a, b: max_vector(builder, a, b), found)
        part = LANES
        while part > 1:  # halve the distance until all lanes hold the maximum
            part //= 2
            rotated = shuffle(builder, peak, peak, [(lane + part) % LANES for lane in range(LANES)])
            peak = max_vector(builder, peak, rotated)
        peak = max_vector(builder, before, peak)
        rounded = []
        for start, vector in zip(starts, found, strict=True):
            stored = target.narrow(exp2_vector(builder, builder.fsub(vector, peak, flags=IN_ORDER)))
            target.store_stored(0, start, stored)
            rounded.append(target.widen(stored))
        added = reduce(lambda a, b: builder.fadd(a, b, flags=IN_ORDER), rounded)
        total = builder.extract_element(sum_lanes(builder, [added]), I32(0))
        decay = builder.extract_element(
            exp2_vector(builder, builder.fsub(before, peak, flags=IN_ORDER)), I32(0)
        )
        sum_before = kept.load_scalar(0, I64(1))
        kept.store_scalar(I64(0), builder.extract_element(peak, I32(0)))
        earlier = builder.fmul(sum_before, decay, flags=IN_ORDER)
        kept.store_scalar(I64(1), builder.fadd(earlier, total, flags=IN_ORDER))
        return decay

    return types.float32(weights, state, scores), emit


@compiled
def update_softmax(
    weights: Array, sums: Array, state: Array, scores: Array, first: Int, end: Int, cap: Float
) -> None:
    """One step of one row's online softmax: turns scores into weights and rescales the earlier sums to the new maximum.

    weights, scores: [BLOCK_KEYS]. The row sees the keys from `first` to `end - 1`.
    state: (maximum, sum of weights, whether a score was NaN or infinite).
    """
    if cap > _ZERO:
        cap_scores(scores, cap)
    for n in range(first):
        scores[n] = INITIAL_MAX
    for n in range(end, BLOCK_KEYS):
        scores[n] = INITIAL_MAX
    decay = _update_state(weights, state, scores)
    if decay < _ONE:
        multiply(sums, decay)


@compiled
def update_softmax_of_rows(
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
    """Turns the scores of the first `count` keys of a block into weights. Scores and weights are [M, BLOCK_KEYS].

    Positions count from the first key of the block. Row m belongs to the token at position `before + m // group`. The
    row sees that token and the `window - 1` tokens before that token. All other keys get weight 0.
    """
    # Infinite or NaN scores are rare, so rows are checked one by one only if the block has any.
    is_any_not_finite = find_largest_magnitude(as_row(scores)) >= INFINITY_BITS
    for m in range(weights.shape[0]):
        end = before + m // group + 1
        seen, first = min(count, end), min(count, max(0, end - window))
        if first < seen:
            if is_any_not_finite:
                mark_not_finite(state[m], scores[m, first:seen])
            update_softmax(weights[m], sums[m], state[m], scores[m], first, seen, cap)
        else:
            clear(weights[m])
