"""Transposes a matrix of elements of 2 or 4 bytes.

A vector of elements from each of several rows is read, and these vectors are transposed in registers. numpy moves one
element at a time, which takes about three times as long.
"""

from collections.abc import Callable
from typing import Any

from numba import types

from slora_kernels.cpu.worker_sizes import TRANSPOSED_BYTES
from slora_kernels.cpu.workers.dots import transpose_vectors
from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Int,
    Job,
    compiled,
    count_items,
    intrinsic,
    read_int,
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


# Fields of a job: the matrix [n, m], the number of its columns, and the transposed matrix [m, n].
SOURCE, NUM_COLUMNS, TARGET = range(3)


def transpose_worker(job: Job) -> None:
    """Each item of the job is a strip of columns, as many as a wide block has."""
    source, target = read_model_matrix(job, SOURCE), read_model_matrix(job, TARGET)
    width, num_columns = TRANSPOSED_BYTES // source.itemsize, read_int(job, NUM_COLUMNS)
    strip = take_item(job)
    while strip < count_items(job):
        column = strip * width
        _transpose_strip(target[column:], source[:, column:], min(width, num_columns - column))
        strip = take_item(job)
