"""Copies, transposes and rounds matrices of numpy, by machine code where there is some. It needs no torch."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slora_kernels.cpu.machine_code import COPY, ROUND, find_worker, has_workers
from slora_kernels.cpu.worker_sizes import COPY_FIELDS, FIELD_WORDS, NUM_ITEMS, NUM_SHARES, NUM_WORDS

# Element size -> a dtype of this size. Only bits are copied, so the values may have any other dtype of this size.
_DTYPES = {2: "bfloat16", 4: "float32"}
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# numpy does less than this, because in a checkout the first call of a worker imports numba, which takes a second.
_LEAST_BYTES = 64 << 10
# The words of a copy that hold the starts of the matrix and of its target.
_SOURCE, _TARGET = 0, FIELD_WORDS
_COPY_WORDS = COPY_FIELDS * FIELD_WORDS


@cache
def load_copy_worker(element_bytes: int) -> Callable[[int], None] | None:
    """Returns the worker for elements of this size. None if there is neither machine code for this CPU nor numba.

    In a checkout, the first call imports numba and may compile the worker, which takes seconds.
    """
    return _WORKER(find_worker(COPY, _DTYPES[element_bytes])) if has_workers() else None


@cache
def _load_round_worker() -> Callable[[int], None] | None:
    return _WORKER(find_worker(ROUND, "bfloat16")) if has_workers() else None


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint16], int] | None:
    """Rounds finite values, [n], to the bits of bfloat16, [n]. Those that overflow become infinity.

    Also returns the bits of the greatest magnitude of `values`. Returns None for few values, for values that are not
    aligned or contiguous, and without machine code, see `load_copy_worker`. numpy takes four times as long.
    """
    is_suited = values.nbytes >= _LEAST_BYTES and values.flags.aligned and values.flags.c_contiguous
    run_job = _load_round_worker() if is_suited else None
    if run_job is None:
        return None
    rounded, greatest, count = np.empty(values.size, np.uint16), np.zeros(1, np.int32), values.size
    words = np.zeros(NUM_WORDS + 3 * FIELD_WORDS, np.int64)
    words[NUM_ITEMS], words[NUM_SHARES] = 1, 1
    words[NUM_WORDS:] = (
        *(values.ctypes.data, 1, count),
        *(rounded.ctypes.data, 1, count),
        *(greatest.ctypes.data, 1, 1),
    )
    run_job(words.ctypes.data)
    return rounded, int(greatest[0])


class Place(NamedTuple):
    """A matrix in an array: the index of its first element, its shape, and the distance of its rows in elements."""

    start: int
    num_rows: int
    num_columns: int
    pitch: int

    @property
    def end(self) -> int:
        """One more than the index of the last element."""
        return self.start + max(0, self.num_rows - 1) * self.pitch + self.num_columns

    def view(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        size = values.itemsize
        return np.ndarray(
            (self.num_rows, self.num_columns),
            values.dtype,
            values.data,
            offset=self.start * size,
            strides=(self.pitch * size, size),
        )


class MatrixCopies:
    """Copies of matrices of one array to matrices of another one. They are made together, in any order.

    One call of machine code makes all of them, without the GIL. numpy releases and takes it again for each. With two
    threads, an adapter of 196 small matrices was loaded no faster than with one.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Place, Place, bool]] = []
        self._source_end = self._target_end = self._num_elements = 0
        self._words: npt.NDArray[np.int64] | None = None

    def copy(self, source: Place, target: Place) -> None:
        """Adds the copy of a matrix [n, m] to the first columns of one of [n, m or more], whose other columns become
        zero.
        """
        assert target.num_rows == source.num_rows and target.num_columns >= source.num_columns, (
            f"{source} was to be copied to {target}"
        )
        self._add(source, target, is_transposed=False)

    def transpose(self, source: Place, target: Place) -> None:
        """Adds the copy of a matrix [n, m] to one of [m, n]."""
        assert (target.num_columns, target.num_rows) == (source.num_rows, source.num_columns), (
            f"{source} was to be transposed to {target}"
        )
        self._add(source, target, is_transposed=True)

    def run(self, source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        """Makes all copies. They can be made again with other arrays, also by several threads at once.

        source, target: one-dimensional, with elements of 2 or 4 bytes.
        """
        size = source.itemsize
        assert source.ndim == target.ndim == 1 and target.itemsize == size, "the arrays are not alike"
        assert source.flags.c_contiguous and target.flags.c_contiguous, "an array is not contiguous"
        assert self._source_end <= source.size, f"{self._source_end} elements are read of {source.size}"
        assert self._target_end <= target.size, f"{self._target_end} elements are written of {target.size}"
        run_job = load_copy_worker(size) if self._num_elements * size >= _LEAST_BYTES else None
        if run_job is None:
            self._run_by_numpy(source, target)
            return
        if not source.flags.aligned:
            source = source.copy()
        if self._words is None:
            self._words = self._pack()
        words = self._words.copy()
        copies = words[NUM_WORDS:].reshape(-1, _COPY_WORDS)
        for word, values in ((_SOURCE, source), (_TARGET, target)):
            copies[:, word] *= size
            copies[:, word] += values.ctypes.data
        run_job(words.ctypes.data)

    def _add(self, source: Place, target: Place, *, is_transposed: bool) -> None:
        assert self._words is None, "the copies have been made"
        self._copies.append((source, target, is_transposed))
        self._source_end = max(self._source_end, source.end)
        self._target_end = max(self._target_end, target.end)
        self._num_elements += target.num_rows * target.num_columns

    def _pack(self) -> npt.NDArray[np.int64]:
        """Returns the words of a job, with the indices of first elements in place of addresses."""
        words = np.zeros(NUM_WORDS + len(self._copies) * _COPY_WORDS, np.int64)
        words[NUM_ITEMS], words[NUM_SHARES] = len(self._copies), 1
        copies = words[NUM_WORDS:].reshape(-1, _COPY_WORDS)
        for row, (source, target, is_transposed) in zip(copies, self._copies, strict=True):
            row[:] = (
                *(source.start, source.num_rows, source.pitch, target.start, target.num_rows, target.pitch),
                *(source.num_columns, 0, 0, target.num_columns, 0, 0, is_transposed, 0, 0),
            )
        return words

    def _run_by_numpy(self, source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        for of, to, is_transposed in self._copies:
            rows, copied = to.view(target), of.view(source)
            if is_transposed:
                rows[:] = copied.T
            else:
                rows[:, : of.num_columns], rows[:, of.num_columns :] = copied, 0
