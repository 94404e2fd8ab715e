"""Products in blocks: a row has the same bits in every batch, whatever order of additions a library chooses."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slora_kernels.torch import row_blocks
from slora_kernels.torch.row_blocks import (
    ROW_COUNTS,
    Multiply,
    find_row_counts,
    multiply_batches,
    multiply_heads,
    multiply_in_blocks,
    multiply_rows,
)

pytestmark = pytest.mark.invariance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = (1, 2, 15, 16, 17, 33, 64, 500)
# (output width, input width)
SHAPES = ((576, 576), (130, 17), (33, 1000), (1, 96), (768, 2048), (7, 3), (2048, 64))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rows(multiply: Multiply, x: Tensor) -> None:
    """Compares rows in batches of every size, at several places, with the same rows among all."""
    among_all = multiply(x)
    for rows in BATCHES:
        for start in {0, 1, len(x) // 3, len(x) - rows}:
            if start + rows <= len(x):
                assert torch.equal(multiply(x[start : start + rows]), among_all[start : start + rows]), rows


def add_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """x W^T with `parts` sums that are added at the end, as libraries do to use several registers."""
    sums = [torch.zeros(len(x), len(weight)) for _ in range(parts)]
    for term in range(x.shape[1]):
        sums[term % parts] += x[:, term, None].float() * weight[:, term].float()
    return torch.stack(sums).cumsum(0)[-1].to(x.dtype)


def by_number_of_rows(weight: Tensor) -> Multiply:
    """A library whose order depends on the number of rows, like oneDNN with AMX."""

    def multiply(x: Tensor) -> Tensor:
        return add_in_parts(x, weight, 1 if len(x) == 1 else 2 if len(x) < 16 else 3 if len(x) < 200 else 4)

    return multiply


def by_place(weight: Tensor) -> Multiply:
    """A library that computes the last rows of a block in another order if they do not fill its registers."""

    def multiply(x: Tensor) -> Tensor:
        full = len(x) // 6 * 6
        return torch.cat([add_in_parts(x[:full], weight, 1), add_in_parts(x[full:], weight, 2)])

    return multiply


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bind", "expected"),
    (
        (by_number_of_rows, tuple(count for count in ROW_COUNTS if 16 <= count < 200)),
        (by_place, tuple(count for count in ROW_COUNTS if count % 6 == 0)),
    ),
)
def test_only_sizes_with_the_same_order_of_additions_are_used(
    dtype: torch.dtype, bind: Callable[[Tensor], Multiply], expected: tuple[int, ...]
) -> None:
    weight, x = draw(40, 60, dtype=dtype, seed=1), draw(505, 60, dtype=dtype, seed=2)
    multiply = bind(weight)
    counts = find_row_counts(bind, 40, 60, dtype)
    assert counts == expected
    check_rows(lambda rows: multiply_in_blocks(rows, multiply, counts), x)
    assert not torch.equal(multiply(x[:1]).float(), multiply(x)[:1].float()) or dtype != torch.float32


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", (False, True), ids=("plain", "biased"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_times_a_plain_weight_is_the_same_bits_in_every_batch(
    dtype: torch.dtype, biased: bool, shape: tuple[int, int]
) -> None:
    weight, x = draw(*shape, dtype=dtype, seed=1), draw(520, shape[1], dtype=dtype, seed=2)
    bias = draw(shape[0], dtype=dtype) if biased else None
    check_rows(lambda rows: multiply_rows(rows, weight, bias), x)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    unit = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(
        multiply_rows(x, weight, bias).double(), exact, rtol=unit, atol=unit * shape[1] ** 0.5
    )


@pytest.mark.parametrize("transposes", (False, True))
def test_a_product_of_matrices_is_the_same_bits_in_every_batch(*, transposes: bool) -> None:
    x, y = draw(130, 16, 48), draw(130, *((70, 48) if transposes else (48, 70)), seed=1)
    among_all = multiply_batches(x, y, transposes=transposes)
    torch.testing.assert_close(among_all, torch.matmul(x, y.mT if transposes else y), rtol=1e-4, atol=1e-4)
    for count in (1, 2, 3, 15, 17, 64, 100):
        for start in (0, 1, 30):
            part = slice(start, start + count)
            product = multiply_batches(x[part], y[part], transposes=transposes)
            assert torch.equal(product, among_all[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposes", (False, True))
def test_a_product_of_heads_is_the_same_bits_in_every_batch(dtype: torch.dtype, *, transposes: bool) -> None:
    """The weight is a part of a larger one, as in latent attention."""
    x = draw(520, 6, 32 if transposes else 24, dtype=dtype)
    stack = draw(6, 40, 32, dtype=dtype, seed=1)
    weight = stack[:, 24:].mT if transposes else stack[:, :24]
    check_rows(lambda rows: multiply_heads(rows, weight), x)
    exact = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    unit = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(multiply_heads(x, weight).double(), exact, rtol=unit, atol=unit * 6)


def test_no_rows_give_no_rows() -> None:
    assert multiply_heads(torch.empty(0, 2, 5), draw(2, 5, 4)).shape == (0, 2, 4)
    assert multiply_rows(torch.empty(0, 5), draw(3, 5)).shape == (0, 3)


def test_rows_that_are_not_aligned_are_the_same_bits() -> None:
    weight, x = draw(50, 63), draw(40, 63)
    expected = multiply_rows(x, weight)
    memory = torch.zeros(x.numel() + 1)
    memory[1:] = x.flatten()
    assert torch.equal(multiply_rows(memory[1:].view(40, 63), weight), expected)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(multiply_rows(wide[:, :63], weight), expected)


@given(st.integers(1, 3000), st.sets(st.sampled_from(ROW_COUNTS), min_size=1))
def test_only_the_last_block_of_a_cut_is_padded(rows: int, sizes: set[int]) -> None:
    counts = tuple(sorted(sizes))
    cut = row_blocks.cut_rows(rows, counts)
    assert set(cut) <= sizes
    assert sum(cut[:-1]) < rows <= sum(cut)
