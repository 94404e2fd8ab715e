import pytest
import torch

from slora_kernels import reference
from slora_kernels.batch import KVGeometry, LoraTiles
from slora_kernels.layout import DOWN, GROUPS, QKV, LinearGroup, ModelShape
from slora_kernels.ops import Kernels
from tests.kernels.scenes import AdapterScene, build_adapters, build_attention, build_tiles, check_close

# Two layers; ranks differ by adapter, by layer and by module, and some modules have none.
RANKS = [
    [[8] * 7, [5] * 7],
    [[0, 5, 12, 64, 0, 128, 1], [128, 64, 0, 3, 8, 0, 12]],
    [[0] * 7, [0, 0, 0, 0, 12, 5, 0]],
    [[64] * 7, [12, 0, 0, 128, 64, 64, 8]],
]
# (slot, first token, tokens) of 31 tokens; tokens 7 to 9 and 30 are the base model's.
RUNS = [(0, 0, 1), (1, 1, 5), (3, 6, 1), (2, 10, 7), (0, 17, 13)]
TOKENS = 31


def build(dtype: torch.dtype, device: str, *, hidden: int = 72, intermediate: int = 200) -> AdapterScene:
    shape = ModelShape(2, hidden, 6, 2, 16, intermediate, dtype.itemsize)
    return build_adapters(shape, dtype, RANKS, device=device)


def run_group(
    kernels: Kernels,
    scene: AdapterScene,
    tiles: LoraTiles,
    x: torch.Tensor,
    out: torch.Tensor,
    layer: int,
    group: LinearGroup,
) -> None:
    batch = build_attention(KVGeometry(1, 1, 1, 16, 16, scene.dtype), [(1, 1)] * x.shape[0]).batch
    widths = tuple(scene.shape.out_widths[m] for m in group.modules)
    step = kernels.prepare(batch, tiles, scene.tables)
    bridge = kernels.shrink(x, scene.pages, scene.tables, layer, group, step)
    kernels.expand(out, bridge, scene.pages, scene.tables, layer, group, step, widths)


def make_inputs(
    scene: AdapterScene, group: LinearGroup, tokens: int = TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    width = sum(scene.shape.out_widths[m] for m in group.modules)
    x = torch.randn(tokens, scene.shape.in_widths[group.modules[0]], generator=random)
    out = torch.randn(tokens, width, generator=random)
    device = scene.pages.device
    return x.to(scene.dtype).to(device), out.to(scene.dtype).to(device)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
@pytest.mark.parametrize(
    ("dtype", "layer"), ((torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 1), (torch.float16, 0))
)
def test_mixed_ranks_in_scattered_pages_match_the_twin(
    kernels: Kernels, device: str, dtype: torch.dtype, group: LinearGroup, layer: int
) -> None:
    scene = build(dtype, device)
    tiles = build_tiles(RUNS, scene.tables)
    x, out = make_inputs(scene, group)
    # Whoever reads a token outside its tile gets NaN.
    x[7:10] = torch.nan
    expected, before = out.clone(), out.clone()
    widths = tuple(scene.shape.out_widths[m] for m in group.modules)
    bridge = reference.shrink(x, scene.pages, scene.tables, layer, group, tiles)
    reference.expand(expected, bridge, scene.pages, scene.tables, layer, group, tiles, widths)
    run_group(kernels, scene, tiles, x, out, layer, group)
    check_close(out, expected, units=1, size=2)
    assert torch.equal(out[7:10], before[7:10]) and torch.equal(out[30], before[30])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_longer_than_a_page_and_wide_splits_match_the_twin(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    shape = ModelShape(1, 700, 4, 1, 16, 1100, dtype.itemsize)
    scene = build_adapters(shape, dtype, [[[12] * 7], [[5] * 7]], block_tokens=8, device=device)
    tiles = build_tiles([(1, 0, 2), (0, 2, 1)], scene.tables)
    for group in GROUPS:
        x, out = make_inputs(scene, group, 3)
        expected = out.clone()
        widths = tuple(shape.out_widths[m] for m in group.modules)
        bridge = reference.shrink(x, scene.pages, scene.tables, 0, group, tiles)
        reference.expand(expected, bridge, scene.pages, scene.tables, 0, group, tiles, widths)
        run_group(kernels, scene, tiles, x, out, 0, group)
        check_close(out, expected, units=1, size=2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_token_gets_the_same_bits_alone_and_in_a_batch(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    if kernels.name == "torch":
        pytest.skip("a library's matmul sums in an order that depends on the number of rows")
    scene = build(dtype, device)
    tiles = build_tiles(RUNS, scene.tables)
    for group in (QKV, DOWN):
        x, together = make_inputs(scene, group)
        before = together.clone()
        run_group(kernels, scene, tiles, x, together, 0, group)
        for index, (slot, first, size) in enumerate(RUNS):
            # The interpreter's dot is numpy's, whose sums depend on the row; a GPU's do not.
            interpreted = kernels.name == "triton" and device == "cpu"
            for token in {first} if interpreted else {first, first + size - 1}:
                alone = before[token : token + 1].clone()
                single = build_tiles([(slot, 0, 1)], scene.tables)
                weighted = LoraTiles(single.tiles, tiles.weights[index : index + 1], single.max_group_rank)
                run_group(kernels, scene, weighted, x[token : token + 1], alone, 0, group)
                assert torch.equal(together[token : token + 1], alone), (group.name, token)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_long_tiles_beside_short_ones_match_the_twin(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    scene = build(dtype, device)
    runs = [(0, 0, 1), (3, 1, 70), (1, 71, 2)]
    if kernels.tile_tokens < 70:
        runs = [(0, 0, 1), *((3, at, min(16, 71 - at)) for at in range(1, 71, 16)), (1, 71, 2)]
    tiles = build_tiles(runs, scene.tables)
    x, out = make_inputs(scene, QKV, 73)
    expected = out.clone()
    widths = tuple(scene.shape.out_widths[m] for m in QKV.modules)
    bridge = reference.shrink(x, scene.pages, scene.tables, 1, QKV, tiles)
    reference.expand(expected, bridge, scene.pages, scene.tables, 1, QKV, tiles, widths)
    run_group(kernels, scene, tiles, x, out, 1, QKV)
    check_close(out, expected, units=1, size=2)


def test_adapters_without_a_rank_anywhere_change_nothing(kernels: Kernels, device: str) -> None:
    shape = ModelShape(1, 64, 4, 2, 16, 96, 4)
    scene = build_adapters(shape, torch.float32, [[[0] * 7]], device=device)
    tiles = build_tiles([(0, 0, 2)], scene.tables)
    for group in GROUPS:
        x, out = make_inputs(scene, group, 2)
        before = out.clone()
        run_group(kernels, scene, tiles, x, out, 0, group)
        assert torch.equal(out, before)
