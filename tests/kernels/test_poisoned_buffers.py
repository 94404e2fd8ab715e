"""Nothing uninitialised changes a result, wherever it lies: in fresh memory, in scratch, beside inputs, or in pages.

Each operation runs twice: once everything around its inputs is NaN, and once it is 0.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slora.models.weights import packed_weight
from slora.models.weights.linear import multiply
from slora_kernels.batch import AttentionRule, KVGeometry
from slora_kernels.layout import llama_shape
from slora_kernels.ops import Kernels
from slora_kernels.torch import row_blocks
from tests.kernels.scenes import build_adapters, build_attention, build_tiles
from tests.kernels.test_quantized_linear import FORMS, make_weight

HALF = pytest.param(torch.float16, marks=(pytest.mark.compiled_late, pytest.mark.interpreted_slowly))
DTYPES = (torch.float32, torch.bfloat16, HALF)


@contextmanager
def filled(kernels: Kernels, number: float) -> Iterator[None]:
    """Fills fresh tensors and the scratch memory of `kernels` with a number, which is NaN or 0."""
    scratch = getattr(kernels, "_scratch", None)
    if isinstance(scratch, Tensor):
        scratch.fill_(number)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = number != 0
    with warnings.catch_warnings():
        yield
    torch.utils.deterministic.fill_uninitialized_memory = before


def surround(x: Tensor, number: float, *, beside: int = 32) -> Tensor:
    """Returns x as a part of a longer and wider tensor that is otherwise filled with `number`."""
    wide = torch.full((x.shape[0] + 2, x.shape[1] + 2 * beside), number, dtype=x.dtype, device=x.device)
    inner = wide[1:-1, beside : beside + x.shape[1]]
    return inner.copy_(x)


def check(kernels: Kernels, compute: Callable[[float], Tensor]) -> None:
    """compute: takes the number that surrounds the inputs."""
    results = []
    for number in (0.0, torch.nan, torch.nan):
        with filled(kernels, number):
            results.append(compute(number).cpu())
    clean, *poisoned = results
    assert clean.isfinite().all()
    assert all(torch.equal(one, clean) for one in poisoned)


def draw(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


def unused_byte(number: float) -> int:
    return 0 if number == 0 else 0xFF


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", (1, 5, 17))
@pytest.mark.parametrize("tokens", (1, 9))
def test_adapters_of_an_odd_rank(
    kernels: Kernels, device: str, dtype: torch.dtype, rank: int, tokens: int
) -> None:
    """The adapters beside it have other ranks, so the rows of the shrink are wider than this rank."""
    shape = llama_shape(1, 72, 2, 1, 24, 130, 300, dtype.itemsize)
    x, before = (draw(tokens + 3, width, dtype=dtype, device=device) for width in (72, 96))

    def compute(number: float) -> Tensor:
        scene = build_adapters(
            shape, dtype, [[rank] * 9, [24] * 9], device=device, unused=unused_byte(number)
        )
        tiles = build_tiles([(0, 0, tokens), (1, tokens, 3)], scene.tables)
        step, site = kernels.prepare_lora(tiles, scene.tables), scene.shape.sites[0]
        out = surround(before, number)
        kernels.expand(
            out, kernels.shrink(surround(x, number), scene.pages, site, step), scene.pages, site, step
        )
        return out.clone()

    check(kernels, compute)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", (None, 21))
@pytest.mark.parametrize("chunks", (((1, 1), (1, 70), (1, 33)), ((9, 9), (3, 70), (1, 17))), ids=str)
def test_attention(
    kernels: Kernels,
    device: str,
    dtype: torch.dtype,
    window: int | None,
    chunks: tuple[tuple[int, int], ...],
) -> None:
    geometry = KVGeometry(2, 3, 1, 80, 16, dtype)

    def compute(number: float) -> Tensor:
        scene = build_attention(geometry, chunks, window=window, device=device, unused=unused_byte(number))
        step = kernels.prepare_attention(scene.batch)
        q = surround(scene.q.flatten(1), number).unflatten(1, scene.q.shape[1:])
        return kernels.attend(q, scene.pages, geometry, 1, step, AttentionRule(80**-0.5, window, None))

    check(kernels, compute)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linears_of_odd_widths(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    x, weight = (draw(n, 17, dtype=dtype, device=device) for n in (12, 36))
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=device)
    check(
        kernels,
        lambda number: kernels.grouped_linear(surround(x, number), weight.view(3, 12, 17), None, starts),
    )
    for form in FORMS:
        values, scales = make_weight(36, 17, form, device)
        check(
            kernels,
            lambda number, values=values, scales=scales: kernels.quantized_linear(  # type: ignore[misc]
                surround(x, number), values, scales, None
            ),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_activations_and_maxima(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    x, weight = draw(5, 70, dtype=dtype, device=device), draw(70, dtype=dtype, device=device)
    check(kernels, lambda number: kernels.rms_norm(surround(x, number, beside=0), weight, 1e-5))
    check(kernels, lambda number: kernels.act_mul(surround(x, number, beside=0), "silu"))
    check(kernels, lambda number: torch.stack(kernels.argmax(surround(x, number, beside=0))))


class GreedyLibrary:
    """A matmul library that reads the element after an odd number of elements of half precision, as oneDNN does with
    AMX. After the last row, this is uninitialised memory."""

    def __init__(self) -> None:
        self.num_calls = 0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.num_calls += 1
        product = torch.mm(x.float(), weight.float().T).to(x.dtype)
        if x.dtype != torch.float32 and x.shape[1] % 2:
            product[-1] = torch.nan
        return product if bias is None else product + bias


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("width", (17, 33, 34))
def test_a_library_that_reads_past_an_odd_width_finds_zeros(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int
) -> None:
    library = GreedyLibrary()
    monkeypatch.setattr(row_blocks.F, "linear", library.linear)
    # Row counts are found once for each shape in a process, and no other test has this shape.
    x, weight = (draw(n, width, dtype=dtype, device="cpu") for n in (12, 37))
    assert multiply(x, weight).isfinite().all()
    assert library.num_calls > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_packed_weight_of_an_odd_width_is_packed_with_a_column_of_zeros(dtype: torch.dtype) -> None:
    x, weight = (draw(n, 17, dtype=dtype, device="cpu") for n in (12, 36))
    packed = packed_weight.pack_weight(weight)
    if isinstance(packed, packed_weight.PackedWeight):
        width = 17 if dtype == torch.float32 else 18
        assert [piece.shape[1] for piece in packed.pieces] == [width]
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(multiply(x, packed).double(), expected, rtol=2**-7, atol=2**-5)
