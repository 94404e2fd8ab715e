from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from slora_kernels.cpu import matrix_copies
from slora_kernels.cpu.machine_code import has_workers
from slora_kernels.cpu.matrix_copies import MatrixCopies, Place, round_to_bfloat16

SIZES = [
    (num_rows, num_columns)
    for num_rows in (1, 7, 15, 16, 33, 1000)
    for num_columns in (1, 3, 4, 7, 8, 9, 12, 15, 16, 17, 24, 31, 64, 100)
]
_Copies = Sequence[tuple[Place, Place, bool]]


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers do small jobs, too."""
    monkeypatch.setattr(matrix_copies, "_LEAST_BYTES", 0)


def _make_copies(sizes: Sequence[tuple[int, int]]) -> _Copies:
    """Copies and transpositions of matrices that lie in wider ones, one after the other in both arrays."""
    made, first, first_target = [], 3, 5
    for num_rows, num_columns in sizes:
        for is_transposed in (False, True):
            source = Place(first, num_rows, num_columns, num_columns + num_rows % 3)
            shape = (num_columns, num_rows) if is_transposed else (num_rows, num_columns + num_rows % 5)
            target = Place(first_target, *shape, shape[1] + 2)
            made.append((source, target, is_transposed))
            first, first_target = source.end + 1, target.end + 4
    return made


def _collect(made: _Copies) -> MatrixCopies:
    copies = MatrixCopies()
    for source, target, is_transposed in made:
        (copies.transpose if is_transposed else copies.copy)(source, target)
    return copies


def _expect(made: _Copies, values: npt.NDArray[np.generic], target: npt.NDArray[np.generic]) -> None:
    """Makes the copies one element at a time."""
    for of, to, is_transposed in made:
        for row in range(to.num_rows):
            for column in range(to.num_columns):
                k, m = (column, row) if is_transposed else (row, column)
                is_padding = m >= of.num_columns
                place = to.start + row * to.pitch + column
                target[place] = 0 if is_padding else values[of.start + k * of.pitch + m]


def _run(dtype: str, sizes: Sequence[tuple[int, int]]) -> None:
    made, size = _make_copies(sizes), np.dtype(dtype).itemsize
    random = np.random.default_rng(len(made))
    values = random.integers(0, 256, (made[-1][0].end + 1) * size, np.uint8).view(dtype)
    target = np.full(made[-1][1].end + 9, 0xA5, f"u{size}")
    expected, bits = target.copy(), values.view(f"u{size}")
    _expect(made, bits, expected)
    copies = _collect(made)
    copies.run(values, target.view(dtype))
    assert np.array_equal(target, expected)
    # The same copies, of other arrays.
    other, other_target = values[::-1].copy(), np.full_like(target, 0x5A)
    expected[:] = 0x5A
    _expect(made, other.view(f"u{size}"), expected)
    copies.run(other, other_target.view(dtype))
    assert np.array_equal(other_target, expected)


@pytest.mark.skipif(not has_workers(), reason="there is neither machine code nor numba")
@pytest.mark.parametrize("dtype", ("uint16", "float16", "float32"))
def test_matrices_of_any_size_are_copied_and_nothing_beside_them_is_written(dtype: str) -> None:
    _run(dtype, SIZES)


@pytest.mark.parametrize("dtype", ("uint16", "float32"))
def test_without_machine_code_numpy_copies(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_copies, "load_copy_worker", lambda element_bytes: None)
    _run(dtype, [size for size in SIZES if size[0] < 1000])


@pytest.mark.parametrize("is_transposed", (False, True))
def test_a_matrix_at_an_odd_address_is_copied(is_transposed: bool) -> None:
    """A header of a file may have an odd number of bytes."""
    content = np.arange(1, 2 * 8192 + 2, dtype=np.uint8)[1:].tobytes()
    odd = np.frombuffer(b"x" + content, np.uint8)[1:].view(np.uint16)
    assert not odd.flags.aligned
    target = np.empty(8192, np.uint16)
    shape = (16, 512, 512) if is_transposed else (512, 16, 16)
    _collect([(Place(0, 512, 16, 16), Place(0, *shape), is_transposed)]).run(odd, target)
    matrix = odd.reshape(512, 16)
    assert np.array_equal(target.reshape(shape[:2]), matrix.T if is_transposed else matrix)


def test_a_target_may_only_get_padding() -> None:
    target = np.ones(24, np.float32)
    _collect([(Place(0, 3, 0, 0), Place(2, 3, 4, 8), False)]).run(np.ones(0, np.float32), target)
    assert np.array_equal(target, [1, 1, *([0] * 4 + [1] * 4) * 2, 0, 0, 0, 0, 1, 1])


def test_no_copies_are_no_work() -> None:
    MatrixCopies().run(np.ones(3, np.uint16), np.ones(0, np.uint16))


@pytest.mark.parametrize("shape", ((15, 512), (16, 511)))
def test_a_target_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="transposed"):
        MatrixCopies().transpose(Place(0, 512, 16, 16), Place(0, *shape, 600))
    with pytest.raises(AssertionError, match="copied"):
        MatrixCopies().copy(Place(0, 16, 512, 512), Place(0, shape[0], min(511, shape[1]), 600))


def test_arrays_that_are_too_short_or_not_alike_are_refused() -> None:
    copies = _collect([(Place(1, 3, 4, 6), Place(2, 3, 4, 5), False)])
    long, target = np.zeros(17, np.uint16), np.zeros(16, np.uint16)
    copies.run(long, target)
    for source, to in (
        (long[:16], target),
        (long, target[:15]),
        (long.astype(np.float32), target),
        (np.zeros(34, np.uint16)[::2], target),
        (long, np.zeros(32, np.uint16)[::2]),
    ):
        with pytest.raises(AssertionError):
            copies.run(source, to)


@pytest.mark.skipif(not has_workers(), reason="there is neither machine code nor numba")
def test_float32_is_rounded_to_bfloat16_as_torch_does() -> None:
    random = np.random.default_rng(0)
    for count in (1, 2, 15, 16, 17, 1000, 70_001):
        bits = random.integers(0, 1 << 32, count, np.uint32)
        bits[bits & 0x7F800000 == 0x7F800000] = 0x3F808000  # A tie, instead of what is not finite.
        bits[::3] &= 0xFFFF8000
        values = bits.view(np.float32)
        found = round_to_bfloat16(values)
        assert found is not None
        rounded, greatest = found
        expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(rounded, expected)
        assert greatest == int((bits & 0x7FFFFFFF).max())


@pytest.mark.skipif(not has_workers(), reason="there is neither machine code nor numba")
@pytest.mark.parametrize("value", (np.inf, -np.inf, np.nan))
def test_what_is_not_finite_is_greater_than_all_numbers(value: float) -> None:
    values = np.full(40, -3e38, np.float32)
    values[33] = value
    found = round_to_bfloat16(values)
    assert found is not None and found[1] >= 0x7F800000


def test_what_is_small_needs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout, the first worker imports numba."""
    monkeypatch.undo()
    monkeypatch.setattr(matrix_copies, "find_worker", None)
    matrix_copies.load_copy_worker.cache_clear()
    source, target = np.ones(12, np.float32), np.zeros(12, np.float32)
    _collect([(Place(0, 3, 4, 4), Place(0, 3, 4, 4), False)]).run(source, target)
    assert np.array_equal(source, target)
    assert round_to_bfloat16(source) is None


def test_an_array_that_the_worker_cannot_read_is_not_rounded() -> None:
    odd = np.frombuffer(b"x" + bytes(64), np.uint8)[1:].view(np.float32)
    assert round_to_bfloat16(odd) is None
    assert round_to_bfloat16(np.zeros(8, np.float32)[::2]) is None
