"""Transposes matrices of numpy, by machine code where there is some. It needs no torch."""

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy.typing as npt

from slora_kernels.cpu.machine_code import TRANSPOSE, find_worker, has_workers
from slora_kernels.cpu.worker_sizes import NUM_ITEMS, NUM_SHARES, NUM_WORDS, TRANSPOSED_BYTES

# Element size -> a dtype of this size. Only bits are copied, so the values may have any other dtype of this size.
_DTYPES = {2: "bfloat16", 4: "float32"}
_NEW_JOB = (0,) * NUM_WORDS
# Shorter matrices are transposed by numpy, because a call of the worker takes as long.
_LEAST_BYTES = 8 << 10
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def load_transposition(element_bytes: int) -> Callable[[int], None] | None:
    """Returns the worker for elements of this size. None if there is neither machine code for this CPU nor numba.

    In a checkout, the first call imports numba and may compile the worker, which takes seconds.
    """
    return _WORKER(find_worker(TRANSPOSE, _DTYPES[element_bytes])) if has_workers() else None


def copy_transposed(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copies a matrix [n, m] to one of [m, n], both with contiguous rows and elements of 2 or 4 bytes."""
    is_long = source.nbytes >= _LEAST_BYTES and source.flags.aligned
    transpose = load_transposition(source.itemsize) if is_long else None
    if transpose is None:
        target[:] = source.T
        return
    (num_rows, num_columns), size = source.shape, source.itemsize
    assert target.shape == (num_columns, num_rows) and target.dtype == source.dtype, (
        f"{source.dtype} {source.shape} was to be transposed to {target.dtype} {target.shape}"
    )
    assert source.strides[1] == target.strides[1] == size, "the rows are not contiguous"
    fields = (
        *(source.ctypes.data, num_rows, source.strides[0] // size),
        *(num_columns, 0, 0),
        *(target.ctypes.data, num_columns, target.strides[0] // size),
    )
    job = array("q", (*_NEW_JOB, *fields))
    job[NUM_ITEMS], job[NUM_SHARES] = -(-num_columns * size // TRANSPOSED_BYTES), 1
    transpose(job.buffer_info()[0])
