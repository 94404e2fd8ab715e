"""Products of a library on the CPU, in which a row's bits do not depend on the other rows or on their number.

oneDNN and MKL choose the order in which they add a row's products by the number of rows, the instruction set and the
number of threads. So rows are multiplied in blocks of a few fixed sizes, for example 300 rows as 256, 32 and 16. The
last block may be padded. `find_row_counts` selects sizes for which the library adds in one and the same order:

- Size 1 is always possible, because the library then gets the same call for each row.
- Two sizes are used for the same weight only if a trial shows that they add in the same order at each place of a block
  and in each output column. The trial calls the library with this shape, dtype, memory layout and number of threads.
  A matmul takes the same path for all values of its elements. The elements of the trial make the rounding errors of the
  sums visible, so two different orders would have to give the same bits in thousands of sums.

A trial takes about as long as a product with 1,200 rows, once per shape in a process.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# x [n, K] -> [n, N]
Multiply = Callable[[Tensor], Tensor]

# Sizes to try. More sizes mean less padding, but the library compiles a matmul for each of them.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
# Calling the library for a block takes about as long as computing this many further rows.
_CALL_ROWS = 16
# The batches for which the sizes are chosen.
_USUAL_ROWS = (1, 16, 64, 512)
# Number of different rows in a trial. A block repeats them.
_TRIAL_ROWS = 8
# With fewer output columns than this, each row of a trial is tried at several places.
_MANY_COLUMNS = 64
# With fewer terms than this, the trial's sums in half precision have no rounding error.
_FEW_TERMS = 16
# The elements of a trial are about this large. Then the sums do not overflow float16, and their rounding errors do not
# underflow.
_TRIAL_SCALE = 8.0
_TRIAL_BIAS = 1e-3
# The largest product of a trial, in multiplications, so that it takes less than a second at 20 GFLOP/s.
_MAX_TRIAL = 1 << 33
# Libraries may take another path for operands that do not begin at a cache line.
_ALIGNMENT = 64


def multiply_in_blocks(x: Tensor, multiply: Multiply, counts: tuple[int, ...]) -> Tensor:
    """x [T, K] -> [T, N]. `multiply` is called with blocks whose numbers of rows are in `counts`, ascending."""
    rows, out, start = len(x), None, 0
    if rows == 0:
        return multiply(x)
    for count in cut_rows(rows, counts):
        product = multiply(_take_block(x, start, count))
        if count >= rows:
            return product[:rows]
        if out is None:
            out = product.new_empty(rows, product.shape[1])
        out[start : start + count] = product[: rows - start]
        start += count
    assert out is not None
    return out


def _take_block(x: Tensor, start: int, count: int) -> Tensor:
    """Returns `count` contiguous and aligned rows, beginning with row `start` of x. Missing rows are 0."""
    block = x[start : start + count]
    if len(block) < count:
        padded = x.new_zeros(count, *x.shape[1:])
        padded[: len(block)] = block
        return padded
    is_aligned = block.is_contiguous() and block.data_ptr() % _ALIGNMENT == 0
    return block if is_aligned else block.clone(memory_format=torch.contiguous_format)


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N]: x W^T + b, with torch's matmul on a CPU, in blocks."""
    x, weight = even_terms(x), even_terms(weight)
    bind = _bind_linear if bias is None else _bind_biased_linear
    out_width, width = weight.shape
    counts = find_row_counts(bind, out_width, width, x.dtype)
    return multiply_in_blocks(x, lambda rows: F.linear(rows, weight, bias), counts)


def even_terms(rows: Tensor) -> Tensor:
    """Appends a column of zeros to rows [n, K] in half precision if K is odd.

    CPUs multiply elements of half precision in pairs. oneDNN with AMX reads the element after the last one of an odd
    number, and multiplies it by 0. If that element is NaN, as uninitialised memory may be, the sum is NaN.
    """
    return rows if rows.element_size() > 2 or rows.shape[1] % 2 == 0 else F.pad(rows, (0, 1))


def _bind_linear(weight: Tensor) -> Multiply:
    return lambda rows: F.linear(rows, weight)


def _bind_biased_linear(weight: Tensor) -> Multiply:
    bias = make_trial_bias(weight)
    return lambda rows: F.linear(rows, weight, bias)


def make_trial_bias(weight: Tensor) -> Tensor:
    """Returns a bias [N] for the trial of a product with `weight` [N, K].

    It is about as small as the rounding errors, so that the sums show when it is added.
    """
    random = torch.Generator().manual_seed(len(weight))
    return (torch.randn(len(weight), generator=random) * _TRIAL_BIAS).to(weight.dtype)


def find_row_counts(
    bind: Callable[[Tensor], Multiply], out_width: int, width: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Returns the sizes of blocks, ascending, for products of rows [n, width] with weights of one shape.

    bind: takes a contiguous weight [out_width, width] and returns the product with it. Calls with the same `bind` and
    shape share one trial, so products with other operations, such as adding a bias, need another `bind`.
    """
    return _find_row_counts(bind, out_width, width, dtype, torch.get_num_threads())


@cache
def _find_row_counts(
    bind: Callable[[Tensor], Multiply], out_width: int, width: int, dtype: torch.dtype, threads: int
) -> tuple[int, ...]:
    if dtype != torch.float32 and width < _FEW_TERMS:
        return ROW_COUNTS[:1]
    rows, weight = _make_trial(out_width, width, dtype)
    multiply = bind(weight)
    return _choose_counts(lambda index: multiply(rows[index]), weight.numel())


def multiply_batches(x: Tensor, y: Tensor, *, transposes: bool) -> Tensor:
    """x [B, M, K] times y [B, K, N], or y [B, N, K] transposed -> [B, M, N]. float32 on a CPU.

    The bits of a product do not depend on the other products.
    """
    width = y.shape[1] if transposes else y.shape[2]
    counts = _find_batch_counts(x.shape[1], width, x.shape[2], transposes, torch.get_num_threads())
    out, start = x.new_empty(len(x), x.shape[1], width), 0
    for count in cut_rows(len(x), counts):
        a, b = (_take_block(operand, start, count) for operand in (x, y))
        out[start : start + count] = torch.bmm(a, b.mT if transposes else b)[: len(x) - start]
        start += count
    return out


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies each head by a weight of its own: x [T, H, K] times weight [H, K, N] -> [T, H, N].

    The weight may be a view whose last two dimensions are transposed. On a CPU, the bits of a row do not depend on the
    other rows.
    """
    heads, width, columns = weight.shape

    def multiply(rows: Tensor) -> Tensor:
        return torch.bmm(rows.view(-1, heads, width).transpose(0, 1), weight).transpose(0, 1).flatten(1)

    rows = x.reshape(len(x), heads * width)
    if x.device.type != "cpu":
        return multiply(rows).view(-1, heads, columns)
    counts = _find_head_counts(weight.shape, weight.stride(), x.dtype, torch.get_num_threads())
    return multiply_in_blocks(rows, multiply, counts).view(-1, heads, columns)


@cache
def _find_head_counts(
    sizes: tuple[int, int, int], strides: tuple[int, ...], dtype: torch.dtype, threads: int
) -> tuple[int, ...]:
    heads, width, columns = sizes
    if dtype != torch.float32 and width < _FEW_TERMS:
        return ROW_COUNTS[:1]
    rows, flat = _make_trial(columns, width, dtype)
    x = rows[:, None].expand(-1, heads, -1)
    weight = torch.empty_strided(sizes, strides, dtype=dtype).copy_(flat.T.expand(sizes))

    def multiply(index: Tensor) -> Tensor:
        return torch.bmm(x[index].transpose(0, 1), weight).transpose(0, 1).flatten(1)

    return _choose_counts(multiply, weight.numel())


@cache
def _find_batch_counts(
    rows: int, columns: int, terms: int, transposes: bool, threads: int
) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(terms)
    x = torch.randn(_TRIAL_ROWS, rows, terms, generator=random)
    y = torch.randn((_TRIAL_ROWS, *((columns, terms) if transposes else (terms, columns))), generator=random)

    def multiply(index: Tensor) -> Tensor:
        return torch.bmm(x[index], y[index].mT if transposes else y[index]).flatten(1)

    return _choose_counts(multiply, rows * columns * terms)


def _choose_counts(multiply: Multiply, num_products: int) -> tuple[int, ...]:
    """Returns the best sizes that give the same bits.

    multiply: takes the numbers of the trial's rows in a block, int64 [n], and returns their products [n, N].
    num_products: number of multiplications in a row of the trial.
    """
    groups: dict[bytes, list[int]] = {}
    for count in ROW_COUNTS:
        if count > 1 and count * num_products > _MAX_TRIAL:
            break
        results = _try_count(multiply, count)
        if results is not None:
            groups.setdefault(results, []).append(count)
    return max((tuple(counts) for counts in groups.values()), key=_rate_counts)


def _make_trial(out_width: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns rows [_TRIAL_ROWS, width] and a weight [out_width, width] whose products show the order of the sums.

    A rounding error of a float32 sum is rarely visible after the sum is rounded to half precision. Therefore the terms
    in half precision come in pairs that cancel each other, and a sum is nothing but its rounding errors. The two terms
    of a pair are at random places.
    """
    random = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * _TRIAL_SCALE).to(dtype)

    if dtype == torch.float32:
        return draw(_TRIAL_ROWS, width), draw(out_width, width)
    pairs = width // 2
    places = torch.randperm(width, generator=random)
    first, second, left_over = places[:pairs], places[pairs : 2 * pairs], places[2 * pairs :]
    rows, weight = (torch.zeros(n, width, dtype=dtype) for n in (_TRIAL_ROWS, out_width))
    x, w = draw(_TRIAL_ROWS, pairs), draw(out_width, pairs)
    rows[:, first], rows[:, second] = x, -x
    weight[:, first], weight[:, second] = w, w
    # The last one of an odd number of terms shares a pair's second half.
    if len(left_over):
        rows[:, second[:1]] /= 2
        rows[:, left_over], weight[:, left_over] = rows[:, second[:1]], w[:, :1]
    return rows, weight


def _try_count(multiply: Multiply, count: int) -> bytes | None:
    """Returns the bits of the products of all rows of a trial, computed in blocks of `count` rows.

    Returns None if a row's bits depend on its place in a block, or if a sum is not finite.
    """
    expected = None
    for shift in range(_TRIAL_ROWS):
        index = torch.arange(shift, shift + max(count, _TRIAL_ROWS)) % _TRIAL_ROWS
        products = torch.cat([multiply(block) for block in torch.split(index, count)])
        if expected is None:
            expected = products[:_TRIAL_ROWS]
        if not products.isfinite().all() or not torch.equal(products, expected[index]):
            return None
        if expected.shape[1] >= _MANY_COLUMNS:
            break
    assert expected is not None
    # Adding 0 turns -0 into 0.
    return (expected.float() + 0).numpy().tobytes()


def _rate_counts(counts: tuple[int, ...]) -> float:
    """Rates sizes by the expected speed of usual batches. The result never depends on a measured time.

    Otherwise, the answers of two processes on the same machine could differ.
    """
    return sum((rows + _CALL_ROWS) / _cost(cut_rows(rows, counts)) for rows in _USUAL_ROWS)


def _cost(cut: Sequence[int]) -> int:
    return sum(cut) + _CALL_ROWS * len(cut)


def cut_rows(rows: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts `rows` into blocks at the least cost, large ones first. Only the last block may need padding."""
    largest = counts[-1]
    whole = max(0, rows // largest - 1)
    return (largest,) * whole + _cheapest_cuts(counts)[rows - whole * largest]


@cache
def _cheapest_cuts(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the cheapest cut for each number of rows below two of the largest blocks."""
    cuts: list[tuple[int, ...]] = [()]
    for rows in range(1, 2 * counts[-1]):
        options = ((count, *cuts[max(0, rows - count)]) for count in counts)
        cuts.append(min(options, key=_cost))
    return [tuple(sorted(cut, reverse=True)) for cut in cuts]
