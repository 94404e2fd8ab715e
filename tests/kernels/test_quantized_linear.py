import pytest
import torch
from torch import Tensor

from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from slora_kernels.torch.quantized_matmuls import widen
from tests.kernels.scenes import UNIT, check_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = (torch.int8, torch.float8_e4m3fn)
# (tokens, input width, rows): odd shapes, and shapes for the fast paths of each implementation.
SHAPES = ((1, 64, 64), (3, 72, 20), (17, 300, 130), (8, 128, 192), (130, 200, 70))


def make_weight(rows: int, width: int, form: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A large enough weight contains every number of the format. The scales differ by a factor of up to a thousand."""
    patterns = torch.arange(256, dtype=torch.uint8)
    if form == torch.float8_e4m3fn:
        patterns = patterns[(patterns & 0x7F) != 0x7F]  # these two codes are NaN
    values = patterns[torch.arange(rows * width) * 37 % len(patterns)].view(form).view(rows, width)
    return values.to(device), torch.logspace(-4, -1, rows).to(device)


@pytest.mark.covering(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quantized_linear_matches_its_twin(
    kernels: Kernels, device: str, dtype: torch.dtype, form: torch.dtype, shape: tuple[int, int, int]
) -> None:
    tokens, width, rows = shape
    random = torch.Generator().manual_seed(1)
    values, scales = make_weight(rows, width, form, device)
    x = torch.randn(tokens, width, generator=random).to(dtype).to(device)
    bias = torch.randn(rows, generator=random).to(dtype).to(device) if tokens % 2 else None
    expected = reference.quantized_linear(x, values, scales, bias)
    actual = kernels.quantized_linear(x, values, scales, bias)
    assert actual.dtype == dtype and actual.shape == (tokens, rows)
    # Before scaling, the sums of all rows have about the same size.
    size = float(values.float().square().mean().sqrt()) * width**0.5
    error = (actual.double() - expected.double()).abs() / scales
    assert (error <= 2 * UNIT[dtype] * (expected.double().abs() / scales + size)).all()


@pytest.mark.parametrize("form", FORMS)
def test_sums_that_half_precision_cannot_hold_do_not_overflow(
    kernels: Kernels, device: str, form: torch.dtype
) -> None:
    values = torch.full((4, 512), 100.0, device=device).to(form)
    scales = torch.full((4,), 1e-3, device=device)
    x = torch.full((2, 512), 10.0, dtype=torch.float16, device=device)
    expected = reference.quantized_linear(x, values, scales, None)
    check_close(kernels.quantized_linear(x, values, scales, None), expected)


def test_rows_of_a_wider_tensor_are_read_in_place(kernels: Kernels, device: str) -> None:
    values, scales = make_weight(9, 64, torch.int8, device)
    x = torch.randn(5, 100, device=device)[:, 20:84]
    expected = reference.quantized_linear(x, values, scales, None)
    check_close(kernels.quantized_linear(x, values, scales, None), expected, size=10)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_all_numbers_of_eight_bits_are_widened_exactly(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(widen(numbers.view(torch.int8), dtype), numbers.view(torch.int8).to(dtype))
    floats = numbers[(numbers & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(widen(floats, dtype), floats.to(dtype))
