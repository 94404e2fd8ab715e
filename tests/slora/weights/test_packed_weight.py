import pytest
import torch
import torch.nn.functional as F

from slora.weights.linear import multiply
from slora.weights.packed_weight import PackedWeight, pack_weight


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("biased", (False, True), ids=("plain", "biased"))
@pytest.mark.parametrize("shape", ((768, 256), (100, 72), (7, 3)))
def test_a_packed_weight_multiplies_like_the_plain_one(
    dtype: torch.dtype, biased: bool, shape: tuple[int, int]
) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if biased else None
    packed = pack_weight(weight)
    for rows in (1, 2, 5, 64, 200):
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        unit = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
        torch.testing.assert_close(multiply(x, packed, bias).double(), expected, rtol=unit, atol=8 * unit)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("width", (768, 2048))
def test_a_row_is_the_same_bits_alone_and_among_any_number(dtype: torch.dtype, width: int) -> None:
    """Answers depend on this: a sequence may decode alone or in a batch, and prompt chunks have any length.

    In bfloat16, one element in ten thousand differed for single rows of more than 1,024 elements.
    """
    packed = pack_weight(torch.randn(1280, width).to(dtype))
    if not isinstance(packed, PackedWeight):
        pytest.skip(f"nothing is packed here in {dtype}")
    x = torch.randn(513, width).to(dtype)
    among_all = multiply(x, packed)
    for rows in (1, 2, 3, 4, 8, 17, 64, 100, 512):
        assert torch.equal(multiply(x[:rows], packed), among_all[:rows]), rows
    for row in range(300):
        assert torch.equal(multiply(x[row : row + 1], packed), among_all[row : row + 1]), row


def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    packed, wide = pack_weight(torch.randn(96, 64)), torch.randn(5, 200)
    assert torch.equal(multiply(wide[:, 10:74], packed), multiply(wide[:, 10:74].contiguous(), packed))
