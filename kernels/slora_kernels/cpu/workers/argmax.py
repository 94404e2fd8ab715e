"""The maximum and argmax of each row on a CPU: one pass over the logits, then one over the block with the maximum.

Logits are converted to integers of the same order (`sortable_int`) and then compared. Comparing floats would not detect
NaN, because fastmath assumes that there is none.
"""

import numpy as np

from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Int,
    Job,
    compiled,
    count_items,
    is_nan_magnitude,
    magnitude,
    read_float_matrix,
    read_int,
    read_int64_matrix,
    read_model_matrix,
    sortable_int,
    take_item,
    widen,
)

BLOCK = 256
_LOWEST, _NONE = np.int32(-(2**31)), np.int32(0)
_NAN = np.float32(np.nan)


@compiled
def find_max(numbers: Array) -> tuple[Int, Int]:
    """Returns the greatest `sortable_int` and the greatest `magnitude` of the numbers."""
    peak, size = _LOWEST, _NONE
    for i in range(numbers.shape[0]):
        peak = max(peak, sortable_int(numbers[i]))
        size = max(size, magnitude(numbers[i]))
    return peak, size


@compiled
def find_index(numbers: Array, peak: Int) -> Int:
    for i in range(numbers.shape[0]):
        if sortable_int(numbers[i]) == peak:
            return i
    return 0


# Fields of a job: logits [B, V], maximum of each row [1, B], argmax of each row [1, B], and V.
LOGITS, BEST, TOKENS, WIDTH = range(4)


def argmax_worker(job: Job) -> None:
    """Finds the maximum and the argmax of each row of logits. Each item of the job is one row."""
    logits, best, tokens = (
        read_model_matrix(job, LOGITS),
        read_float_matrix(job, BEST)[0],
        read_int64_matrix(job, TOKENS)[0],
    )
    width = read_int(job, WIDTH)
    row = take_item(job)
    while row < count_items(job):
        numbers = logits[row]
        peak, size, start = _LOWEST, _NONE, 0
        for first in range(0, width, BLOCK):
            block_peak, block_size = find_max(numbers[first : min(first + BLOCK, width)])
            size = max(size, block_size)
            if block_peak > peak:
                peak, start = block_peak, first
        token = start + find_index(numbers[start : min(start + BLOCK, width)], peak)
        tokens[row] = token
        best[row] = _NAN if is_nan_magnitude(size, numbers) else widen(numbers[token])
        row = take_item(job)
