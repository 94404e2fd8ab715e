from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slora.models.weights import packed_weight
from slora.models.weights.linear import multiply
from slora.models.weights.packed_weight import PackedWeight, pack_weight


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("biased", (False, True), ids=("plain", "biased"))
@pytest.mark.parametrize("shape", ((768, 256), (70, 288), (100, 96), (100, 72), (7, 3)))
def test_a_packed_weight_multiplies_like_the_plain_one(
    dtype: torch.dtype, biased: bool, shape: tuple[int, int]
) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if biased else None
    packed = pack_weight(weight)
    if isinstance(packed, PackedWeight):
        assert torch.equal(packed.unpack(shape[1]), weight)
    for rows in (1, 2, 5, 64, 300):
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        unit = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
        torch.testing.assert_close(multiply(x, packed, bias).double(), expected, rtol=unit, atol=8 * unit)


@pytest.mark.parametrize("width", (5632, 8192))
def test_many_rows_that_are_too_wide_to_be_copied_are_multiplied(width: int) -> None:
    """Born from a crash of the products in tiles."""
    weight, x = torch.randn(40, width).bfloat16(), torch.randn(300, width).bfloat16()
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(multiply(x, pack_weight(weight)).double(), expected, rtol=2**-7, atol=2**-4)


@pytest.mark.invariance
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("width", (768, 2048))
def test_a_row_is_the_same_bits_alone_and_among_any_number(dtype: torch.dtype, width: int) -> None:
    """Answers depend on this: a sequence may decode alone or in a batch, and prompt chunks have any length.

    In bfloat16, oneDNN adds in another order for single rows on a CPU with AVX-512, and for many more numbers of rows
    on a CPU with AMX. Our own products have other code for each number of rows up to 12.
    """
    packed = pack_weight(torch.randn(1280, width).to(dtype))
    x = torch.randn(513, width).to(dtype)
    among_all = multiply(x, packed)
    for rows in (*range(1, 14), 17, 25, 33, 64, 100, 512):
        assert torch.equal(multiply(x[:rows], packed), among_all[:rows]), rows
    for row in range(0, 513, 8):
        assert torch.equal(multiply(x[row : row + 1], packed), among_all[row : row + 1]), row


@pytest.mark.invariance
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_library_whose_rows_depend_on_their_number_is_called_with_safe_numbers_only(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """oneDNN with AMX does this, so the test holds on CPUs without AMX, too."""
    called: set[int] = set()
    real_call = torch.ops.mkldnn._linear_pointwise

    def call(x: Tensor, *rest: Any) -> Tensor:
        called.add(len(x))
        product: Tensor = real_call(x, *rest)
        return product if 16 <= len(x) < 128 else product * (1 + 2 * torch.finfo(dtype).eps)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", call)
    # Row counts are found once for each shape in a process, and no other test has this shape.
    packed = pack_weight(torch.randn(776, 96).to(dtype))
    if not isinstance(packed, packed_weight.PackedWeight):
        pytest.skip(f"nothing is packed here in {dtype}")
    called.clear()
    x = torch.randn(513, 96).to(dtype)
    among_all = multiply(x, packed)
    for rows in (1, 2, 15, 16, 17, 33, 64, 500):
        assert torch.equal(multiply(x[-rows:], packed), among_all[-rows:]), rows
    assert called <= {16, 24, 32, 48, 64, 96}


@pytest.mark.parametrize("biased", (False, True), ids=("plain", "biased"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_large_weight_is_multiplied_in_pieces(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, biased: bool
) -> None:
    weight, x = torch.randn(100, 32).to(dtype), torch.randn(9, 32).to(dtype)
    bias = torch.randn(100).to(dtype) if biased else None
    whole = multiply(x, weight, bias)
    monkeypatch.setattr(packed_weight, "_PIECE_BYTES", 30 * 32 * dtype.itemsize)
    for form in (weight, pack_weight(weight, is_biased=biased)):
        torch.testing.assert_close(multiply(x, form, bias), whole, rtol=2**-7, atol=2**-7)
    assert len(packed_weight.split_weight(weight)) == 4


def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    packed, wide = pack_weight(torch.randn(96, 64)), torch.randn(5, 200)
    assert torch.equal(multiply(wide[:, 10:74], packed), multiply(wide[:, 10:74].contiguous(), packed))


def test_a_bias_with_gaps_between_its_numbers_is_added_as_it_is() -> None:
    packed, bias = pack_weight(torch.randn(96, 64).bfloat16()), torch.randn(192)[::2]
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(
        multiply(x, packed, bias.bfloat16()), multiply(x, packed, bias.bfloat16().contiguous())
    )
    if isinstance(packed, PackedWeight) and packed.tiles is not None:  # Only these take a bias in float32.
        assert torch.equal(multiply(x, packed, bias), multiply(x, packed, bias.contiguous()))
