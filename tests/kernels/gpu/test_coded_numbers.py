"""How the Triton kernel for weights of 4 bits makes numbers of a 16-bit dtype.

The tests with Triton's interpreter multiply in float32.
"""

import pytest
import torch
import triton.language as tl

from slora_kernels.coded_weight import CodedWeight
from slora_kernels.gpu.coded_linear import UNITS, bind_coded_linear

HALVES = (torch.bfloat16, torch.float16)
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
NF4 += (
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def bind(numbers: tuple[float, ...], dtype: torch.dtype) -> dict[str, object]:
    weight = CodedWeight(
        torch.zeros(16, 16, dtype=torch.uint8), torch.ones(16, 1), torch.empty(0, 0), torch.tensor(numbers)
    )
    launch, _ = bind_coded_linear(torch.zeros(1, 32, dtype=dtype), weight, None)
    return launch.constants


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32))
@pytest.mark.parametrize(
    "numbers", (NF4, tuple(torch.linspace(-1000 / 3, 1e4, 16).tolist()), (0.0,) * 15 + (6.0,))
)
def test_the_parts_of_a_number_add_up_to_it(numbers: tuple[float, ...], dtype: torch.dtype) -> None:
    constants = bind(numbers, dtype)
    rest = torch.tensor(numbers) * constants["FACTOR"]
    for _ in range(constants["PARTS"]):  # type: ignore[call-overload]
        assert rest.to(dtype).isfinite().all()
        rest -= rest.to(dtype).float()
    assert not rest.any() and constants["COUNTS"] is None
    assert constants["PARTS"] == (1 if dtype == torch.float32 or numbers[0] == 0 else 3)


@pytest.mark.parametrize("first", (-16, -8, 0))
def test_integers_are_made_from_the_bits_of_codes(first: int) -> None:
    codes, dtypes = (
        torch.arange(16),
        {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32},
    )
    assert bind(tuple(range(first, first + 16)), torch.bfloat16)["COUNTS"] is not None
    for unit, (integer, bits, power) in UNITS.items():
        offset = torch.tensor(power - first, dtype=dtypes[unit])
        assert offset.item() == power - first
        numbers = (codes | bits).to(torch.int16 if integer == tl.int16 else torch.int32).view(
            dtypes[unit]
        ) - offset
        assert torch.equal(numbers.float(), codes.float() + first)


@pytest.mark.parametrize("numbers", (range(-17, -1), range(1, 17), range(0, 32, 2), range(15, -1, -1)))
def test_other_integers_are_looked_up(numbers: range) -> None:
    assert bind(tuple(map(float, numbers)), torch.bfloat16)["COUNTS"] is None
