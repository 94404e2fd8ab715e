"""Copies and transposes matrices of elements of 2 or 4 bytes, and rounds float32 to bfloat16.

To transpose, a vector of elements from each of several rows is read, and these vectors are transposed in registers.
numpy moves one element at a time, which takes about three times as long.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from slora_kernels.cpu.worker_sizes import COPY_FIELDS, TRANSPOSED_BYTES
from slora_kernels.cpu.workers.dots import transpose_vectors
from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Int,
    Job,
    compiled,
    count_items,
    intrinsic,
    read_int,
    read_int32_matrix,
    read_model_matrix,
    take_item,
)
from slora_kernels.cpu.workers.vectors import I64, Memory


def _emit_block(num_bytes: int) -> Callable[..., None]:
    """Builds a block that transposes n rows of n elements, which take `num_bytes`."""

    @intrinsic
    def block(typing: Any, target: Array, source: Array, first: Int) -> Any:
        lanes = num_bytes * 8 // source.dtype.bitwidth

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to, of = (
                Memory(context, builder, kind, array)
                for kind, array in zip(signature.args[:2], args[:2], strict=True)
            )
            rows = [of.load_stored(k, I64(0), lanes) for k in range(lanes)]
            for k, column in enumerate(transpose_vectors(builder, rows)):
                to.store_stored(k, args[2], column)
            return context.get_dummy_value()

        return types.void(target, source, types.int64), emit

    return block


_wide, _narrow = _emit_block(TRANSPOSED_BYTES), _emit_block(TRANSPOSED_BYTES // 2)


@compiled
def _copy_elements(target: Array, source: Array, first: Int, num_columns: Int) -> None:
    for column in range(num_columns):
        row = target[column]
        for k in range(first, source.shape[0]):
            row[k] = source[k, column]


@compiled
def _transpose_strip(target: Array, source: Array, num_columns: Int) -> None:
    """target[:num_columns] = source[:, :num_columns].T, of at most as many columns as a wide block has."""
    wide = TRANSPOSED_BYTES // source.itemsize
    narrow = wide // 2
    num_rows, first = source.shape[0], 0
    if num_columns == wide:
        while first + wide <= num_rows:
            _wide(target, source[first:], first)
            first += wide
    elif num_columns >= narrow:
        while first + narrow <= num_rows:
            _narrow(target, source[first:], first)
            first += narrow
        _copy_elements(target[narrow:], source[:, narrow:], 0, num_columns - narrow)
        num_columns = narrow
    _copy_elements(target, source, first, num_columns)


@compiled
def _transpose(target: Array, source: Array, num_columns: Int) -> None:
    # A strip has as many columns as a wide block.
    width = TRANSPOSED_BYTES // source.itemsize
    for column in range(0, num_columns, width):
        _transpose_strip(target[column:], source[:, column:], min(width, num_columns - column))


@compiled
def _copy(target: Array, source: Array, num_columns: Int, end: Int) -> None:
    """target[:, :num_columns] = source, target[:, num_columns:end] = 0"""
    for k in range(source.shape[0]):
        to, of = target[k], source[k]
        for column in range(num_columns):
            to[column] = of[column]
        for column in range(num_columns, end):
            to[column] = 0


# Fields of each copy: the matrix [n, m], its target [n or m, columns], m, the number of the target's columns, and
# whether the matrix is transposed.
SOURCE, TARGET, NUM_COLUMNS, END, IS_TRANSPOSED = range(COPY_FIELDS)


def copy_worker(job: Job) -> None:
    """Each item of the job is a copy."""
    item = take_item(job)
    while item < count_items(job):
        first = item * COPY_FIELDS
        source, target = read_model_matrix(job, first + SOURCE), read_model_matrix(job, first + TARGET)
        num_columns = read_int(job, first + NUM_COLUMNS)
        if read_int(job, first + IS_TRANSPOSED):
            _transpose(target, source, num_columns)
        else:
            _copy(target, source, num_columns, read_int(job, first + END))
        item = take_item(job)


# Fields of a job that rounds: the bits of float32 [1, n], those of bfloat16 [1, n], and a place, int32 [1, 1], for the
# bits of the greatest magnitude of the float32.
SINGLES, ROUNDED, GREATEST = range(3)


def round_worker(job: Job) -> None:
    """Rounds to nearest, ties to even. Infinity and NaN count as greater than every finite value. They, and what
    overflows, are not rounded as such.
    """
    singles, rounded = read_int32_matrix(job, SINGLES)[0], read_model_matrix(job, ROUNDED)[0]
    greatest = np.int32(0)
    for k in range(len(singles)):
        bits = singles[k]
        greatest = max(greatest, bits & np.int32(0x7FFFFFFF))
        unsigned = np.uint32(bits)
        rounded[k] = (
            unsigned + np.uint32(0x7FFF) + ((unsigned >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
    read_int32_matrix(job, GREATEST)[0][0] = greatest
