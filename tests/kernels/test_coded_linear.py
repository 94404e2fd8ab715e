import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slora.models.weights.linear import INT4_GROUPS, quantize_groups
from slora.models.weights.packed_weight import pack_bytes_in_tiles, pack_codes_in_tiles
from slora_kernels.coded_weight import CodedWeight, pack_codes
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from tests.kernels.scenes import UNIT
from tests.kernels.test_quantized_linear import FORMS, make_weight

HALF = pytest.param(torch.float16, marks=pytest.mark.compiled_late)
DTYPES = (torch.float32, torch.bfloat16, HALF)
# (tokens, input width, columns of a group, rows): several blocks of columns and rows, and parts of them.
SHAPES = (
    (1, 64, 64, 64),
    (3, 96, 32, 20),
    (3, 512, 32, 70),
    (5, 192, 96, 40),
    (17, 320, 64, 130),
    (40, 128, 32, 33),
    (130, 2304, 128, 70),
)
# The interpreter takes long for these.
MOSTLY_QUICK = [
    pytest.param(one, marks=pytest.mark.interpreted_slowly) if one in (SHAPES[3], *SHAPES[5:]) else one
    for one in SHAPES
]
TABLES = {
    "integers": torch.arange(16.0),
    "e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    # bfloat16 does not have most of these numbers.
    "any": torch.linspace(-1, 1, 16),
}
# Numbers of tokens. The Triton kernel has other block sizes from 17 and from 129 tokens on, except in float32.
COUNTS = ((1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 100, 131),)
COUNTS_OF_BLOCKS = ((1, 2, 16), (17, 128), (129, 131))


def make_coded(
    rows: int,
    width: int,
    group: int,
    table: str,
    *,
    scale_dtype: torch.dtype,
    has_minimums: bool,
    device: str = "cpu",
) -> CodedWeight:
    """Every code in every place of a block, and scales that differ by a factor of a hundred."""
    codes = (torch.arange(rows * width) * 7 // 5 % 16).view(rows, width)
    scales = torch.logspace(-3, -1, rows * width // group).view(rows, -1).to(scale_dtype)
    minimums = -3 * scales if has_minimums else torch.empty(0, 0, dtype=scale_dtype)
    tensors = (pack_codes(codes), scales, minimums, TABLES[table])
    return CodedWeight(*(tensor.to(device) for tensor in tensors))


def multiply(kernels: Kernels, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """As a linear does: with a packed weight where this machine has one, unless the kernels are those of GPUs."""
    packed = pack_codes_in_tiles(weight, x.dtype) if kernels.name != "triton" else None
    return kernels.coded_linear(x, weight, bias) if packed is None else packed.multiply(x, bias)


def test_codes_are_unpacked_in_the_order_of_the_columns() -> None:
    codes = torch.arange(128).view(2, 64) * 5 % 16
    ones = torch.ones(2, 2)
    weight = CodedWeight(pack_codes(codes), ones, torch.empty(0, 0), torch.arange(16.0))
    assert weight.shape == (2, 64) and weight.group == 32
    assert torch.equal(weight.decode(), codes.float())
    assert torch.equal(weight.rows(1, 2).decode(), codes[1:].float())


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("scale_dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("has_minimums", (False, True))
def test_squares_of_rows_are_added_up_without_decoding(
    shape: tuple[int, int, int, int], table: str, scale_dtype: torch.dtype, *, has_minimums: bool
) -> None:
    _, width, group, rows = shape
    weight = make_coded(rows, width, group, table, scale_dtype=scale_dtype, has_minimums=has_minimums)
    expected = weight.decode().double().square().sum(1)
    torch.testing.assert_close(weight.sum_squares().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MOSTLY_QUICK)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("scale_dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("has_minimums", (False, True))
@pytest.mark.parametrize("is_packed", (False, True))
def test_a_linear_of_four_bits_matches_its_twin(
    kernels: Kernels,
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    table: str,
    scale_dtype: torch.dtype,
    has_minimums: bool,
    is_packed: bool,
) -> None:
    tokens, width, group, rows = shape
    weight = make_coded(
        rows, width, group, table, scale_dtype=scale_dtype, has_minimums=has_minimums, device=device
    )
    random = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, width + 8, generator=random).to(device, dtype)[:, 3:-5]
    bias = torch.randn(rows, generator=random).to(device, dtype) if tokens % 2 else None
    expected = reference.coded_linear(x, weight, bias)
    actual = multiply(kernels, x, weight, bias) if is_packed else kernels.coded_linear(x, weight, bias)
    assert actual.dtype == dtype and actual.shape == (tokens, rows)
    # The terms' magnitudes: what float32 rounds on the way does not exceed a few units of their sum.
    size = x.double().abs() @ weight.decode().double().abs().T
    error = (actual.double() - expected.double()).abs()
    limit = 2 * UNIT[dtype] * expected.double().abs() + 4 * UNIT[torch.float32] * size + 1e-7
    if is_packed and dtype == torch.bfloat16 and table == "integers":
        # With tiles, x is rounded by at most 2^-13 of the largest number of its group.
        largest = x.double().abs().view(tokens, -1, group).amax(2).repeat_interleave(group, dim=1)
        limit += 2**-13 * largest @ weight.decode().double().abs().T
    assert (error <= limit).all()


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", (1, 16, 40))
def test_numbers_with_more_bits_than_bfloat16_are_not_rounded_to_it(
    kernels: Kernels, device: str, dtype: torch.dtype, tokens: int
) -> None:
    """Each row of x subtracts two columns, whose numbers differ by less than bfloat16 has between them."""
    codes = (torch.arange(32) % 16).expand(20, 32)
    scales, table = torch.full((20, 1), 0.5), 1 + torch.arange(16.0) / 4096
    tensors = (pack_codes(codes), scales, torch.empty(0, 0), table)
    weight = CodedWeight(*(tensor.to(device) for tensor in tensors))
    columns = torch.arange(tokens) * 3 % 16 + 16
    x = F.one_hot(columns, 32)
    x[:, 0] = -1
    expected = ((columns - 16) / 8192)[:, None].expand(tokens, 20)
    assert torch.equal(multiply(kernels, x.to(device, dtype), weight, None).float().cpu(), expected)


@pytest.mark.invariance
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MOSTLY_QUICK)
@pytest.mark.parametrize("table", ("integers", "any"))
@pytest.mark.parametrize("has_minimums", (False, True))
def test_a_row_is_the_same_bits_alone_and_among_any_number(
    kernels: Kernels,
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    table: str,
    has_minimums: bool,
) -> None:
    """Tiles multiply one number of bfloat16 for each of the first table, and two for the other.

    The Triton kernel has other sums in blocks of other sizes.
    """
    if device == "cuda" and kernels.name == "torch":
        pytest.skip("the GPU's matrix library chooses its kernels by the size of the batch")
    _, width, group, rows = shape
    weight = make_coded(
        rows, width, group, table, scale_dtype=torch.float16, has_minimums=has_minimums, device=device
    )
    x = torch.randn(131, width).to(device, dtype)
    for counts in COUNTS_OF_BLOCKS if kernels.name == "triton" else COUNTS:
        rows_of_all = x[: counts[-1]]
        among_all = multiply(kernels, rows_of_all, weight, None)
        for count in counts[:-1]:
            for first in {0, counts[-1] - count}:
                part = slice(first, first + count)
                product = multiply(kernels, rows_of_all[part], weight, None)
                assert torch.equal(product, among_all[part]), (count, first)


@pytest.mark.parametrize("lowest", (0, -8))
def test_rows_of_extreme_numbers_are_the_same_alone_and_among_others(lowest: int) -> None:
    """Tiles do not have subnormal numbers, and few rows are multiplied as integers of 16 bits."""
    codes, scales = torch.randint(0, 16, (33, 128)), torch.rand(33, 2)
    weight = CodedWeight(pack_codes(codes), scales, -7 * scales, torch.arange(16.0) + lowest)
    packed = pack_codes_in_tiles(weight, torch.bfloat16)
    if packed is None:
        pytest.skip("this CPU has no tiles")
    x = torch.randn(12, 128)
    x[0, 5], x[1, 70], x[2, 3], x[3], x[4, :64] = torch.nan, torch.inf, -torch.inf, 3e38, 0
    x[5:8] *= torch.tensor([[1e-38], [1e-20], [1e20]])
    x[8] *= torch.logspace(-30, 5, 128)
    rows = x.to(torch.bfloat16)
    expected = packed.multiply(rows)
    assert expected[:4].isnan().all() and expected[4:].isfinite().all()
    for count in (1, 2, 3):
        for first in range(len(x) - count + 1):
            part = slice(first, first + count)
            torch.testing.assert_close(
                packed.multiply(rows[part]), expected[part], rtol=0, atol=0, equal_nan=True
            )
    many = packed.multiply(rows.repeat(25, 1))
    torch.testing.assert_close(many, expected.repeat(25, 1), rtol=0, atol=0, equal_nan=True)
    size = rows[4:].double().abs() @ weight.decode().double().abs().T
    error = (expected[4:].double() - rows[4:].double() @ weight.decode().double().T).abs()
    # Groups of numbers below 2^-100 are 0.
    assert (error <= 2**-8 * size + 1e-27).all()


@pytest.mark.invariance
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] != 64])
def test_a_packed_linear_of_eight_bits_matches_its_twin_alone_and_among_any_number(
    kernels: Kernels, dtype: torch.dtype, form: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    tokens, width, _, rows = shape
    values, scales = make_weight(rows, width, form, "cpu")
    packed = pack_bytes_in_tiles(values, scales, dtype)
    x, bias = torch.randn(tokens, width).to(dtype), torch.randn(rows).to(dtype)

    def multiply(part: Tensor) -> Tensor:
        if packed is None:
            return kernels.quantized_linear(part, values, scales, bias)
        return packed.multiply(part, bias)

    actual, expected = multiply(x), reference.quantized_linear(x.double(), values, scales, bias)
    size = x.double().abs() @ (values.double().abs() * scales[:, None]).T + bias.double().abs()
    assert ((actual.double() - expected).abs() <= UNIT[dtype] * (2 * expected.abs() + size / 8)).all()
    # `test_invariance` tries the kernels for weights that are not packed.
    for count in (1, 2, 15, 17, 33, 100) if packed is not None else ():
        assert torch.equal(multiply(x[:count]), actual[:count]), count


def test_models_of_two_threads_multiply_at_the_same_time() -> None:
    """Two engines of one process may compute on threads of their own."""
    kernels, x = select_kernels("auto", torch.device("cpu")), torch.randn(64, 2048).to(torch.bfloat16)
    weights = [
        make_coded(1024, 2048, 32, table, scale_dtype=torch.float16, has_minimums=False)
        for table in ("integers", "e2m1")
    ]
    expected = [multiply(kernels, x, weight, None) for weight in weights]

    def is_same(index: int) -> bool:
        # Calls of the same kernels must not overlap.
        own = select_kernels("auto", torch.device("cpu"))
        products = [multiply(own, x, weights[index], None) for _ in range(20)]
        return all(torch.equal(product, expected[index]) for product in products)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(is_same, range(2)))


def test_callers_with_other_numbers_of_threads_multiply_with_one_weight() -> None:
    """A second caller comes before a line of the first one, for each line. Born from a bug: some columns were not
    computed."""
    weight = pack_bytes_in_tiles(*make_weight(512, 256, torch.int8, "cpu"), torch.bfloat16)
    if weight is None:
        pytest.skip("this CPU has no tiles")
    x, num_threads, num_lines = torch.randn(3, 256).to(torch.bfloat16), torch.get_num_threads(), 0
    expected, zeros = weight.multiply(x), torch.zeros_like(x)

    def interrupt(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal num_lines
        if not frame.f_globals["__name__"].startswith("slora_kernels"):
            return None
        num_lines += 1
        if num_lines == line:
            pool.submit(weight.multiply, zeros).result()
        return interrupt

    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        torch.set_num_threads(2)
        try:
            for line in itertools.count(1):
                num_lines = 0
                sys.settrace(interrupt)
                product = weight.multiply(x)
                sys.settrace(None)
                assert torch.equal(product, expected), line
                if num_lines < line:
                    break
        finally:
            sys.settrace(None)
            torch.set_num_threads(num_threads)


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_numbers_of_a_group_are_rounded_to_the_nearest_of_sixteen_steps(group: int) -> None:
    rows = torch.randn(40, 3 * group) * torch.logspace(-6, 3, 40)[:, None]
    rows[3], rows[4, :group], rows[5, group:] = 0, 0.7, -2.5
    weight = CodedWeight(*quantize_groups(rows.clone(), group), torch.arange(16.0))
    assert weight.group == group
    steps = weight.scales.float().repeat_interleave(group, dim=1)
    numbers = weight.minimums.float()[..., None] + weight.scales.float()[..., None] * torch.arange(16.0)
    errors = (weight.decode() - rows).abs()
    nearest = (numbers.repeat_interleave(group, dim=1) - rows[..., None]).abs().amin(2)
    assert (errors <= nearest + steps * 1e-3).all()
    # The errors are at most those of steps over the whole range. Minimum and scale are rounded to float16.
    groups = rows.view(-1, group)
    smallest, largest = groups.aminmax(dim=1, keepdim=True)
    plain = (largest - smallest) / 15
    plain_errors = (groups - smallest).div(plain).round().mul(plain).add(smallest).sub(groups).square().sum(1)
    slack = (groups.abs().amax(1) * 2**-10 + 16 * 2**-24).square() * group
    assert (errors.view(-1, group).square().sum(1) <= 1.02 * plain_errors.nan_to_num() + slack).all()
    assert torch.equal(weight.decode()[3], rows[3])
    again = CodedWeight(*quantize_groups(weight.decode(), group), torch.arange(16.0))
    torch.testing.assert_close(again.decode(), weight.decode(), rtol=2**-9, atol=2**-9 * 1e-3)
