import numpy as np
import pytest

from slora_kernels.cpu import transposition
from slora_kernels.cpu.machine_code import has_workers
from slora_kernels.cpu.transposition import copy_transposed

NUM_ROWS = (1, 7, 15, 16, 33, 1000)
NUM_COLUMNS = (1, 3, 4, 7, 8, 9, 12, 15, 16, 17, 24, 31, 64, 100)


def _copy(num_rows: int, num_columns: int, dtype: str) -> None:
    """Transposes any bits between matrices that are parts of wider ones."""
    size = np.dtype(dtype).itemsize
    random = np.random.default_rng(num_rows * num_columns)
    source = random.integers(0, 256, (num_rows, (num_columns + 3) * size), np.uint8).view(dtype)
    target = np.full((num_columns + 1, num_rows + 5), 0xA5, f"u{size}").view(dtype)
    copy_transposed(source[:, 1 : num_columns + 1], target[:num_columns, 2 : num_rows + 2])
    found = target.view(f"u{size}")
    expected = np.full_like(found, 0xA5)
    expected[:num_columns, 2 : num_rows + 2] = source.view(f"u{size}")[:, 1 : num_columns + 1].T
    assert np.array_equal(found, expected)


@pytest.mark.skipif(not has_workers(), reason="there is neither machine code nor numba")
@pytest.mark.parametrize("dtype", ("uint16", "float16", "float32"))
def test_a_matrix_of_any_size_and_pitch_is_transposed_and_nothing_beside_it_is_written(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transposition, "_LEAST_BYTES", 0)
    for num_rows in NUM_ROWS:
        for num_columns in NUM_COLUMNS:
            _copy(num_rows, num_columns, dtype)


def test_without_machine_code_numpy_transposes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transposition, "load_transposition", lambda element_bytes: None)
    _copy(1000, 24, "uint16")


def test_a_matrix_at_an_odd_address_is_transposed() -> None:
    """A header of a file may have an odd number of bytes."""
    source = np.arange(1, 2 * 8192 + 2, dtype=np.uint8)[1:].tobytes()
    odd = np.frombuffer(b"x" + source, np.uint8)[1:].view(np.uint16).reshape(512, 16)
    assert not odd.flags.aligned
    target = np.empty((16, 512), np.uint16)
    copy_transposed(odd, target)
    assert np.array_equal(target, odd.T)


@pytest.mark.parametrize("shape", ((15, 512), (16, 511)))
def test_a_target_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        copy_transposed(np.zeros((512, 16), np.uint16), np.zeros(shape, np.uint16))
