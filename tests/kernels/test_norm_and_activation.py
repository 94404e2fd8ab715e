import pytest
import torch

from slora_kernels.batch import Activation
from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from tests.kernels.scenes import check_close

HALF = pytest.param(torch.float16, marks=pytest.mark.compiled_late)
DTYPES = (torch.float32, torch.bfloat16, HALF)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
SHAPES = ((1, 64), (7, 100), (3, 769))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_matches_its_twin(
    kernels: Kernels, device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape, dtype=dtype, device=device) * 3
    weight = torch.randn(shape[1], dtype=dtype, device=device)
    check_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), units=1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_matches_its_twin_and_updates_the_residual(
    kernels: Kernels, device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, residual = torch.randn(2, *shape, dtype=dtype, device=device)
    weight = torch.randn(shape[1], dtype=dtype, device=device)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    check_close(kernels.add_rms_norm(x, residual, weight, 1e-5), expected, units=2)
    check_close(residual, expected_residual, units=1)


def test_rms_norm_of_a_row_of_zeros_is_zero(kernels: Kernels, device: str) -> None:
    x = torch.zeros(2, 64, device=device)
    assert torch.equal(kernels.rms_norm(x, torch.ones(64, device=device), 1e-6), x)


@pytest.mark.parametrize("dtype", (torch.bfloat16, HALF))
def test_a_norms_weight_may_be_wider_than_its_rows(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 130, dtype=dtype, device=device)
    weight = 1 + torch.randn(130, device=device) * 0.1
    check_close(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), units=1)
    expected = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    check_close(kernels.add_rms_norm(x, residual, weight, 1e-6), expected, units=2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((1, 64), (5, 1025), (3, 130)))
def test_act_mul_matches_its_twin(
    kernels: Kernels, device: str, dtype: torch.dtype, shape: tuple[int, int], activation: Activation
) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1], dtype=dtype, device=device) * 4
    # For a gate far below 0, the result is a difference of numbers as large as the gate.
    expected = reference.act_mul(gate_up, activation)
    check_close(kernels.act_mul(gate_up, activation), expected, units=1, size=4.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_mul_survives_extreme_gates(kernels: Kernels, device: str, activation: Activation) -> None:
    gate_up = torch.tensor([[-1e12, -1e4, -100.0, 0.0, 100.0, 1e4] + [1.0] * 6], device=device)
    check_close(kernels.act_mul(gate_up, activation), reference.act_mul(gate_up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_is_added_first(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 130, dtype=dtype, device=device)
    weight, delta = torch.randn(130, dtype=dtype, device=device), torch.randn(5, 130, device=device)
    added, expected_residual = (x.float() + delta).to(dtype), residual.clone()
    expected = reference.add_rms_norm(added, expected_residual, weight, 1e-5)
    # Triton's interpreter rounds to bfloat16 toward zero.
    check_close(kernels.add_rms_norm(x, residual, weight, 1e-5, delta), expected, units=4)
    check_close(residual, expected_residual, units=2)
    check_close(kernels.act_mul(x, "silu", delta), reference.act_mul(added, "silu"), units=4, size=4.0)
