"""The bits of a row do not depend on the number of rows, on its place, or on how a prompt is cut into chunks.

Every operation of the CPU kernels is tried. `tests/kernels/test_cpu_isa.py` repeats these tests with other instruction
sets.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slora_kernels.batch import AttentionBatch, AttentionRule, KVGeometry
from slora_kernels.kernel_selector import find_token_recurrence, select_kernels
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import LoraSite, ModelShape, llama_shape
from slora_kernels.ops import Kernels
from tests.kernels.scenes import AdapterScene, AttentionScene, build_adapters, build_attention, build_tiles
from tests.kernels.test_quantized_linear import FORMS, make_weight
from tests.support.cpu_kernels import CPU_KERNELS

pytestmark = pytest.mark.invariance

BATCHES = (1, 2, 4, 5, 15, 16, 17, 33, 64, 500)
ROWS = 504
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=CPU_KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select_kernels(request.param, torch.device("cpu"))


@pytest.fixture(params=(1, 2), ids=("one thread", "two threads"), autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def check_rows(compute: Callable[[slice], Tensor]) -> None:
    """compute: returns the results of a part of the `ROWS` rows."""
    among_all = compute(slice(0, ROWS))
    assert not among_all.isnan().any()
    for rows in BATCHES:
        for start in {0, 1, (ROWS - rows) // 2, ROWS - rows}:
            part = slice(start, start + rows)
            if part.stop <= ROWS:
                assert torch.equal(compute(part), among_all[part]), (rows, start)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (48, 130))
def test_norms_and_activations(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x, weight = draw(ROWS, width, dtype=dtype), draw(width, dtype=dtype)
    check_rows(lambda part: kernels.rms_norm(x[part], weight, 1e-5))
    check_rows(lambda part: kernels.add_rms_norm(x[part], x[part].clone(), weight, 1e-5))
    for activation in ("silu", "gelu", "gelu_tanh"):
        check_rows(lambda part, activation=activation: kernels.act_mul(x[part], activation))  # type: ignore[misc]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_recurrent_layers(dtype: torch.dtype) -> None:
    code = find_token_recurrence()
    if code is None:
        pytest.skip("there is neither machine code nor numba")
    x, window, taps = draw(ROWS, 42, dtype=dtype), draw(ROWS, 42, 3, dtype=dtype), draw(42, 4, dtype=dtype)
    check_rows(
        lambda part: code.convolve(
            x[part], window[part].clone(), taps, taps[:, 0].contiguous(), activates=True
        )
    )
    pair, values, states = (
        draw(ROWS, 2, 24, dtype=dtype),
        draw(ROWS, 4, 10, dtype=dtype),
        torch.rand(ROWS, 4, 24, 10),
    )
    decay, beta, step = torch.rand(ROWS, 4), draw(ROWS, 4, dtype=dtype), torch.rand(ROWS, 4)

    def join(out: Tensor, state: Tensor) -> Tensor:
        return torch.cat((out.flatten(1).float(), state.flatten(1)), dim=1)

    def apply_delta_rule(part: slice) -> Tensor:
        state, own = states[part].clone(), pair[part]
        return join(
            code.apply_delta_rule(own, own, values[part], decay[part], beta[part], state, norms=True), state
        )

    def scan(part: slice) -> Tensor:
        state, own = states[part].mT.contiguous(), pair[part]
        return join(code.scan(values[part], own, own, step[part], decay[part], decay[0], state), state)

    check_rows(apply_delta_rule)
    check_rows(scan)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ((72, 20), (128, 192)))
def test_weights_of_eight_bits(
    kernels: Kernels, dtype: torch.dtype, form: torch.dtype, shape: tuple[int, int]
) -> None:
    width, out_width = shape
    values, scales = make_weight(out_width, width, form, "cpu")
    x = draw(ROWS, width, dtype=dtype)
    check_rows(lambda part: kernels.quantized_linear(x[part], values, scales, None))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = draw(ROWS, 72, dtype=dtype), draw(3, 40, 72, dtype=dtype)

    def multiply(part: slice) -> Tensor:
        """The rows of the part are those of expert 1. The other experts have other rows."""
        starts = torch.tensor([0, 5, 5 + len(x[part]), 12 + len(x[part])], dtype=torch.int32)
        rows = torch.cat((x[:5], x[part], x[:7]))
        return kernels.grouped_linear(rows, weight, None, starts)[5:-7]

    check_rows(multiply)


def add_lora(kernels: Kernels, scene: AdapterScene, site: LoraSite, x: Tensor) -> Tensor:
    size = min(kernels.tile_limits.tokens, len(x))
    tiles = build_tiles(
        [(0, first, min(size, len(x) - first)) for first in range(0, len(x), size)], scene.tables
    )
    step = kernels.prepare_lora(replace(tiles, weights=torch.ones(len(tiles.tiles))), scene.tables)
    out = torch.ones(len(x), sum(site.widths), dtype=x.dtype)
    kernels.expand(out, kernels.shrink(x, scene.pages, site, step), scene.pages, site, step)
    return out


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", (1, 5, 17, 64))
@pytest.mark.parametrize("sizes", ((72, 24, 136, 16), (256, 64, 320, 16), (256, 64, 320, 64)))
def test_adapters(kernels: Kernels, dtype: torch.dtype, rank: int, sizes: tuple[int, int, int, int]) -> None:
    """16 rows of A are in one page, in two or in more. The first sizes are no multiples of 32."""
    hidden, head_dim, intermediate, block_tokens = sizes
    shape: ModelShape = llama_shape(1, hidden, 2, 1, head_dim, intermediate, 300, dtype.itemsize)
    scene = build_adapters(shape, dtype, [[rank] * 7 + [0, 0]], block_tokens=block_tokens)
    for site in shape.sites[:4]:
        x = draw(ROWS, site.in_width, dtype=dtype)
        check_rows(lambda part, x=x, site=site: add_lora(kernels, scene, site, x[part]))  # type: ignore[misc]


def take_chunk(scene: AttentionScene, first: int, end: int) -> AttentionScene:
    """A chunk of the scene's only sequence."""
    batch = scene.batch
    chunk = AttentionBatch(
        torch.tensor([0, end - first], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32),
        batch.block_tables,
        batch.positions[first:end],
        batch.kv_slots[first:end],
        end - first,
        end,
    )
    return AttentionScene(scene.geometry, scene.pages, chunk, scene.q[first:end])


@pytest.mark.covering(2)
@pytest.mark.parametrize("kernels", CPU_KERNELS, indirect=True)
@pytest.mark.parametrize(
    ("dtype", "kv_format"),
    [
        *((dtype, KVFormat.MODEL) for dtype in DTYPES),
        (torch.float32, KVFormat.FP8),
        pytest.param(torch.bfloat16, KVFormat.FP8, marks=pytest.mark.compiled_late),
    ],
)
@pytest.mark.parametrize(
    ("heads", "window", "softcap"),
    (((2, 2, 64, 16), None, None), ((6, 2, 16, 8), 77, None), ((3, 1, 80, 16), None, 1.5)),
)
def test_attention_of_any_chunk(
    kernels: Kernels,
    dtype: torch.dtype,
    kv_format: KVFormat,
    heads: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
) -> None:
    context = 300
    scene = build_attention(KVGeometry(2, *heads, dtype, kv_format), [(context, context)])
    rule = AttentionRule(heads[2] ** -0.5, window, softcap)

    def attend(part: AttentionScene) -> Tensor:
        step = kernels.prepare_attention(part.batch)
        return kernels.attend(part.q, part.pages, part.geometry, part.layer, step, rule)

    whole = attend(scene)
    assert not whole.isnan().any()
    for size in (1, 3, 16, 33, 100):
        for first in range(0, context, size if size > 1 else 7):
            end = min(first + size, context)
            assert torch.equal(attend(take_chunk(scene, first, end)), whole[first:end]), (size, first)
