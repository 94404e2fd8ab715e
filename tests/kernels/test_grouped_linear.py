import pytest
import torch

from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from tests.kernels.scenes import UNIT, check_close
from tests.kernels.test_quantized_linear import FORMS, make_weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of each group, input width, output width. Groups without rows are at the ends and between others; a group has
# more rows than a tile; a single group has all rows; no group has rows.
SHAPES = (
    ((1,), 64, 64),
    ((0, 3, 0, 1, 17, 0), 72, 20),
    ((5, 0, 0, 40, 16), 130, 70),
    ((0, 0, 1), 300, 33),
    ((33, 32, 31), 128, 64),
    ((0, 0), 64, 16),
)


def list_starts(counts: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_group_is_multiplied_with_its_own_weight(
    kernels: Kernels, device: str, dtype: torch.dtype, shape: tuple[tuple[int, ...], int, int]
) -> None:
    counts, width, rows = shape
    random = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts), width, generator=random).to(dtype).to(device)
    weight = torch.randn(len(counts), rows, width, generator=random).to(dtype).to(device)
    starts = list_starts(counts, device)
    actual = kernels.grouped_linear(x, weight, None, starts)
    assert actual.dtype == dtype and actual.shape == (sum(counts), rows)
    check_close(actual, reference.grouped_linear(x, weight, None, starts), size=width**0.5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_eight_bit_weights_match_their_twin(
    kernels: Kernels, device: str, dtype: torch.dtype, form: torch.dtype
) -> None:
    counts, width, rows = (4, 0, 19, 1), 72, 20
    values, scales = make_weight(len(counts) * rows, width, form, device)
    values, scales = values.view(len(counts), rows, width), scales.view(len(counts), rows)
    x = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    starts = list_starts(counts, device)
    expected = reference.grouped_linear(x, values, scales, starts)
    actual = kernels.grouped_linear(x, values, scales, starts)
    # Before scaling, the sums of all rows have about the same size.
    size = float(values.float().square().mean().sqrt()) * width**0.5
    unscaled = scales.repeat_interleave(torch.tensor(counts, device=device), dim=0)
    error = (actual.double() - expected.double()).abs() / unscaled
    assert (error <= 2 * UNIT[dtype] * (expected.double().abs() / unscaled + size)).all()


def test_a_row_of_nan_spoils_no_other_row_of_its_group(kernels: Kernels, device: str) -> None:
    x = torch.randn(6, 64, device=device)
    weight = torch.randn(2, 16, 64, device=device)
    starts = list_starts((4, 2), device)
    clean = kernels.grouped_linear(x, weight, None, starts)
    x[1] = torch.nan
    spoiled = kernels.grouped_linear(x, weight, None, starts)
    assert spoiled[1].isnan().all()
    rest = [0, 2, 3, 4, 5]
    check_close(spoiled[rest], clean[rest], size=8.0)
