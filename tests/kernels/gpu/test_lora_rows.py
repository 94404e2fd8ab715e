"""Decode rows beside prefill chunks: a token's kernel form and its bits depend only on the token itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slora_kernels.batch import LoraTiles
from slora_kernels.gpu.lora_expand_rows import ROW_TILE_TOKENS
from slora_kernels.gpu.lora_sizes import LoraSizes, RowSizes, load_sizes
from slora_kernels.gpu.triton_kernels import TritonKernels
from slora_kernels.layout import LoraSite, llama_shape
from tests.kernels.scenes import AdapterScene, build_adapters, build_tiles, check_close
from tests.kernels.test_lora import DOWN, GROUPS, QKV, build, make_inputs, run_group, run_twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (slot, first token, tokens): decode rows of all adapters, some of them alone, then chunks of two adapters. Tokens 4,
# 14 and 30 belong to the base model.
DECODES = [(0, 0, 1), (1, 1, 3), (3, 5, 1), (2, 6, 4), (2, 10, 4), (1, 15, 1)]
CHUNKS = [(3, 16, 2), (0, 18, 12)]
BASE = [4, 14, 30]
TOKENS = 31


def mix(scene: AdapterScene) -> LoraTiles:
    return replace(build_tiles(DECODES + CHUNKS, scene.tables), num_decodes=len(DECODES))


def with_rows(block_rank: int, num_warps: int) -> LoraSizes:
    sizes = load_sizes()
    return replace(sizes, expand=(replace(sizes.expand[0], rows=RowSizes(block_rank, 2, num_warps)),))


@GROUPS
@pytest.mark.parametrize(
    ("dtype", "layer", "block_rank"),
    [
        (torch.float32, 1, 16),
        pytest.param(torch.float32, 0, 4, marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, 1, 16, marks=pytest.mark.soak),
        pytest.param(torch.float16, 1, 32, marks=pytest.mark.soak),
    ],
)
def test_decode_rows_beside_chunks_match_the_twin(
    dtype: torch.dtype, layer: int, block_rank: int, group: int
) -> None:
    scene = build(dtype, DEVICE)
    tiles, site = mix(scene), scene.shape.layer_sites(layer)[group]
    x, out = make_inputs(scene, site, TOKENS)
    x[BASE] = torch.nan
    expected, before = out.clone(), out.clone()
    run_twin(scene, tiles, x, expected, site)
    run_group(TritonKernels(sizes=with_rows(block_rank, 1)), scene, tiles, x, out, site)
    check_close(out, expected, units=2)
    assert torch.equal(out[BASE], before[BASE])


def expand(
    scene: AdapterScene, tiles: LoraTiles, shrunk: Tensor, out: Tensor, site: LoraSite, sizes: LoraSizes
) -> Tensor:
    """A copy of `out` with the result of expand added."""
    kernels, result = TritonKernels(sizes=sizes), out.clone()
    kernels.expand(result, shrunk, scene.pages, site, kernels.prepare_lora(tiles, scene.tables))
    return result


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.soak), torch.bfloat16])
def test_a_decode_row_gets_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """For a lone row, the shrink output has fewer columns and the tile is another. Chunk rows in the batch must not
    change its bits."""
    scene, sizes = build(dtype, DEVICE), with_rows(16, 1)
    tiles = mix(scene)
    for group in (QKV, DOWN):
        site = scene.shape.layer_sites(1)[group]
        random = torch.Generator().manual_seed(3)
        shrunk = torch.randn(3, TOKENS, tiles.max_group_rank, generator=random).to(dtype).to(DEVICE)
        _, before = make_inputs(scene, site, TOKENS)
        together = expand(scene, tiles, shrunk, before, site, sizes)
        for index, (slot, first, size) in enumerate(DECODES):
            single = replace(build_tiles([(slot, 0, 1)], scene.tables), num_decodes=1)
            single = replace(single, weights=tiles.weights[index : index + 1])
            for token in range(first, first + size):
                own = shrunk[:, token : token + 1, : max(1, single.max_group_rank)].contiguous()
                alone = expand(scene, single, own, before[token : token + 1], site, sizes)
                assert torch.equal(alone, together[token : token + 1]), (group, token)
    assert not torch.equal(together, before)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_a_delta_gives_the_bits_of_expand(dtype: torch.dtype) -> None:
    scene, kernels = build(dtype, DEVICE), TritonKernels()
    tiles = mix(scene)
    step = kernels.prepare_lora(tiles, scene.tables)
    for group in (QKV, DOWN):
        site = scene.shape.layer_sites(1)[group]
        x, before = make_inputs(scene, site, TOKENS)
        shrunk = kernels.shrink(x, scene.pages, site, step)
        # What an earlier site of the same width has left there.
        delta = torch.full_like(before, 7.0)
        delta[BASE] = 0
        kernels.write_delta(delta, shrunk, scene.pages, site, step)
        assert not delta[BASE].any()
        expected = before.clone()
        kernels.expand(expected, shrunk, scene.pages, site, step)
        # The residual is the sum, rounded as kernels round.
        residual, weight = torch.zeros_like(before), before.new_ones(before.shape[1])
        kernels.add_rms_norm(before, residual, weight, 1e-5, delta)
        assert torch.equal(residual, expected)


def test_rows_outside_all_tiles_are_neither_read_nor_written() -> None:
    """The shrink output holds uninitialised memory in the base model's rows and in the columns past a rank.

    Padding tiles in the list have no tokens, and their weights are NaN.
    """
    scene, sizes = build(torch.float32, DEVICE), with_rows(16, 1)
    tiles, site = mix(scene), scene.shape.layer_sites(1)[QKV]
    x, before = make_inputs(scene, site, TOKENS)
    before[BASE] = torch.nan
    kernels = TritonKernels(sizes=sizes)
    shrunk = kernels.shrink(x, scene.pages, site, kernels.prepare_lora(tiles, scene.tables))
    assert shrunk[:, BASE].isnan().all()
    expected = expand(scene, tiles, shrunk, before, site, sizes)
    assert (
        expected[BASE].isnan().all()
        and not expected[[t for t in range(TOKENS) if t not in BASE]].isnan().any()
    )
    rows, weights = tiles.tiles.tolist(), tiles.weights.tolist()
    for place in (5, 2, 0):
        rows.insert(place, [1, 0, 0])
        weights.insert(place, float("nan"))
    padded = LoraTiles(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(weights, device=DEVICE),
        tiles.max_group_rank,
        tiles.max_tokens,
        tiles.num_decodes + 3,
    )
    out = expand(scene, padded, shrunk, before, site, sizes)
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("num_decodes", (0, 1))
@pytest.mark.parametrize(
    ("rank", "segments", "block_tokens"),
    ((1, 3, 8), (4, 12, 8), (3, 9, 8), (11, 33, 8), (11, 33, 64), (30, 90, 64)),
    ids=("page-1", "page", "page+1", "prime", "block in two pages", "pages of blocks"),
)
def test_an_adapter_may_end_anywhere_in_a_page(
    rank: int, segments: int, block_tokens: int, num_decodes: int
) -> None:
    """Each rank of an adapter on gate alone takes one segment of A and two of B.

    A page holds four segments, or 32: then the rows of a program are in one page or in two.
    """
    shape = llama_shape(1, 64, 4, 1, 16, 128, 100, 4)
    scene = build_adapters(
        shape, torch.float32, [[0, 0, 0, 0, rank, 0, 0, 0, 0]], block_tokens=block_tokens, device=DEVICE
    )
    assert scene.pages.shape[1] == block_tokens // 2 * 256 and rank * 3 == segments
    for count in (1, ROW_TILE_TOKENS if num_decodes else 13):
        tiles = replace(build_tiles([(0, 0, count)], scene.tables), num_decodes=num_decodes)
        site = shape.layer_sites(0)[2]
        x, out = make_inputs(scene, site, count)
        expected = out.clone()
        run_twin(scene, tiles, x, expected, site)
        run_group(TritonKernels(sizes=with_rows(16, 1)), scene, tiles, x, out, site)
        check_close(out, expected, units=2)
