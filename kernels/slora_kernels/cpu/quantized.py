"""x times an 8-bit weight on a CPU. The weight's elements are widened in registers, so it is read once, as bytes.

Every sum is added in the order of `dots`, whatever the number of rows of x.
"""

from slora_kernels.cpu.dots import add_four_dots, add_one_dot
from slora_kernels.cpu.intrinsics import (
    Array,
    Job,
    compiled,
    count_items,
    read_byte_matrix,
    read_float_matrix,
    read_int,
    read_signed_byte_matrix,
    take_item,
)

# Output columns of an item. Their rows of the weight fit a core's own cache for any usual width.
ITEM_ROWS = 64
# Rows of x that are multiplied with the weight's rows of an item before the next ones, in elements. 256 KiB of float32.
_TILE_ELEMENTS = 65536

# Fields of a job: x float32 [T, K], sums float32 [T, N], which are 0 at first, the weight [N, K], K and N.
X, SUMS, VALUES, WIDTH, NUM_ROWS = range(5)


def int8_worker(job: Job) -> None:
    """Multiplies x with a weight of int8. Each item of the job is a block of output columns."""
    multiply_items(job, read_signed_byte_matrix(job, VALUES))


def float8_worker(job: Job) -> None:
    """Like `int8_worker`, for float8_e4m3fn without NaN."""
    multiply_items(job, read_byte_matrix(job, VALUES))


@compiled
def multiply_items(job: Job, values: Array) -> None:
    x, sums = read_float_matrix(job, X), read_float_matrix(job, SUMS)
    width, num_rows = read_int(job, WIDTH), read_int(job, NUM_ROWS)
    numbers, tokens = values.reshape(values.size), x.shape[0]
    step = max(4, _TILE_ELEMENTS // width // 4 * 4)
    item = take_item(job)
    while item < count_items(job):
        end = min((item + 1) * ITEM_ROWS, num_rows)
        for first in range(0, tokens, step):
            last = min(first + step, tokens)
            row = item * ITEM_ROWS
            while row + 4 <= end:
                add_four_dots(sums[first:last, row:], x[first:last], numbers[row * width :], width, width)
                row += 4
            while row < end:
                add_one_dot(sums[first:last, row:], x[first:last], numbers[row * width :], width, width)
                row += 1
        item = take_item(job)
