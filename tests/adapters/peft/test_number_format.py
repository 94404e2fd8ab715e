import numpy as np
import pytest
import torch

from slora_adapters.peft.tensor_file import convert, fits, is_finite, largest_magnitude_bits

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SERVED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = {4: torch.int32, 2: torch.int16}


def _from_bits(bits: np.ndarray, dtype: str) -> tuple[torch.Tensor, np.ndarray]:
    numpy_type = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype]
    tensor = torch.from_numpy(bits.astype(f"i{bits.dtype.itemsize}", copy=False).copy()).view(TORCH[dtype])
    return tensor, bits.view(numpy_type)


def _interesting_bits(dtype: str) -> np.ndarray:
    if dtype != "F32":
        return np.arange(1 << 16, dtype=np.uint16)
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    ties = [upper + np.uint32(low) for low in (0, 0x7FFF, 0x8000, 0x8001)]
    near = np.float32([65504, 65519.996, 65520, 65536, 2**-24, 2**-25, 3 * 2**-26]).view(np.uint32)
    return np.concatenate([random, *ties, near])


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("dtype", TORCH)
def test_conversion_rounds_as_torch_does(dtype: str, served: str) -> None:
    tensor, values = _from_bits(_interesting_bits(dtype), dtype)
    finite = torch.isfinite(tensor)
    theirs = tensor.to(SERVED[served])
    ours = torch.from_numpy(np.array(convert(values, dtype, served)).view(f"i{theirs.itemsize}"))
    assert torch.equal(theirs.view(INTEGERS[theirs.itemsize])[finite], ours[finite])


@pytest.mark.covering(1)
@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("dtype", TORCH)
def test_fits_agrees_with_torch_on_which_numbers_stay_finite(dtype: str, served: str) -> None:
    bits = _interesting_bits(dtype)
    tensor, _ = _from_bits(bits, dtype)
    magnitudes = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    finite = torch.isfinite(tensor).numpy()
    assert [is_finite(dtype, int(m)) for m in magnitudes] == finite.tolist()
    stays = torch.isfinite(tensor.to(SERVED[served])).numpy()
    assert [fits(dtype, int(m), served) for m in magnitudes[finite]] == stays[finite].tolist()


@pytest.mark.parametrize("size", [0, 1, 5, 65536, 65537, 200_001])
def test_the_largest_magnitude_is_found_wherever_it_lies(size: int) -> None:
    values = np.full((size,), -0.5, np.float32)
    assert largest_magnitude_bits(values) == (0x3F00_0000 if size else 0)
    for position in {0, size // 2, size - 1} if size else ():
        spiked = values.copy()
        spiked[position] = -np.inf
        assert largest_magnitude_bits(spiked) == 0x7F80_0000
