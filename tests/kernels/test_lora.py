from dataclasses import replace

import pytest
import torch

from slora_kernels.batch import LoraTiles, TokenRows
from slora_kernels.layout import LoraSite, llama_shape
from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from tests.kernels.scenes import AdapterScene, build_adapters, build_tiles, check_close

# Ranks for two layers, the embedding and the head. They differ by adapter, layer and module. Some modules have none.
RANKS = [
    [*[8] * 7, *[5] * 7, 0, 0],
    [0, 5, 12, 64, 0, 128, 1, 128, 64, 0, 3, 8, 0, 12, 5, 12],
    [*[0] * 7, 0, 0, 0, 0, 12, 5, 0, 128, 0],
    [*[64] * 7, 12, 0, 0, 128, 64, 64, 8, 0, 64],
]
# (slot, first token, tokens) of 31 tokens. Tokens 7 to 9 and 30 belong to the base model.
RUNS = [(0, 0, 1), (1, 1, 5), (3, 6, 1), (2, 10, 7), (0, 17, 13)]
TOKENS = 31
# The module groups of a layer, in order.
QKV, OUTPUT, GATE_UP, DOWN = range(4)
SLOW = pytest.mark.interpreted_slowly
DTYPES = pytest.mark.parametrize("dtype", (torch.float32, pytest.param(torch.bfloat16, marks=SLOW)))
GROUPS = pytest.mark.parametrize("group", (QKV, OUTPUT, GATE_UP, DOWN), ids=("qkv", "o", "gate_up", "down"))


def build(dtype: torch.dtype, device: str, *, hidden: int = 72, intermediate: int = 200) -> AdapterScene:
    shape = llama_shape(2, hidden, 6, 2, 16, intermediate, 300, dtype.itemsize)
    return build_adapters(shape, dtype, RANKS, device=device)


def run_group(
    kernels: Kernels,
    scene: AdapterScene,
    tiles: LoraTiles,
    x: torch.Tensor,
    out: torch.Tensor,
    site: LoraSite,
) -> None:
    step = kernels.prepare_lora(tiles, scene.tables)
    shrunk = kernels.shrink(x, scene.pages, site, step)
    kernels.expand(out, shrunk, scene.pages, site, step)


def run_twin(
    scene: AdapterScene, tiles: LoraTiles, x: torch.Tensor, out: torch.Tensor, site: LoraSite
) -> None:
    shrunk = reference.shrink(x, scene.pages, scene.tables, site, tiles)
    reference.expand(out, shrunk, scene.pages, scene.tables, site, tiles)


def make_inputs(
    scene: AdapterScene, site: LoraSite, tokens: int = TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, site.in_width, generator=random)
    out = torch.randn(tokens, sum(site.widths), generator=random)
    device = scene.pages.device
    return x.to(scene.dtype).to(device), out.to(scene.dtype).to(device)


@pytest.mark.covering(2)
@GROUPS
@pytest.mark.parametrize(
    ("dtype", "layer"),
    [
        pytest.param(torch.float32, 0, marks=SLOW),
        (torch.float32, 1),
        (torch.bfloat16, 0),
        pytest.param(torch.float16, 0, marks=(SLOW, pytest.mark.compiled_late)),
    ],
)
def test_mixed_ranks_in_scattered_pages_match_the_twin(
    kernels: Kernels, device: str, dtype: torch.dtype, group: int, layer: int
) -> None:
    scene = build(dtype, device)
    tiles = build_tiles(RUNS, scene.tables)
    site = scene.shape.layer_sites(layer)[group]
    x, out = make_inputs(scene, site)
    # A read of a token outside its tile returns NaN.
    x[7:10] = torch.nan
    expected, before = out.clone(), out.clone()
    run_twin(scene, tiles, x, expected, site)
    run_group(kernels, scene, tiles, x, out, site)
    check_close(out, expected, units=2)
    assert torch.equal(out[7:10], before[7:10]) and torch.equal(out[30], before[30])


@pytest.mark.parametrize(
    "dtype",
    (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.compiled_late)),
)
def test_an_adapted_embedding_matches_the_twin(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    scene = build(dtype, device)
    site, tiles = scene.shape.embedding_site, build_tiles(RUNS, scene.tables)
    _, out = make_inputs(scene, site)
    # The first and the last token of the vocabulary, and tokens next to a segment's edge.
    token_ids = torch.arange(TOKENS, device=device) * 37 % site.in_width
    edges = torch.tensor([0, 63, 64, 127, 128, 255, 256, site.in_width - 1])
    token_ids[17 : 17 + len(edges)] = edges.to(device)
    expected, before = out.clone(), out.clone()
    shrunk = reference.shrink_embedding(token_ids, scene.pages, scene.tables, site, tiles, dtype)
    reference.expand(expected, shrunk, scene.pages, scene.tables, site, tiles)
    step = kernels.prepare_lora(tiles, scene.tables)
    kernels.expand(
        out, kernels.shrink_embedding(token_ids, scene.pages, site, step, dtype), scene.pages, site, step
    )
    check_close(out, expected, units=2)
    assert torch.equal(out[7:10], before[7:10]) and torch.equal(out[30], before[30])
    assert not torch.equal(out[10:17], before[10:17]), (
        "the adapter of this tile has rank 128 here and little elsewhere"
    )


@DTYPES
def test_an_adapted_head_matches_the_twin(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    scene = build(dtype, device)
    site, tiles = scene.shape.head_site, build_tiles(RUNS, scene.tables)
    x, out = make_inputs(scene, site)
    expected = out.clone()
    run_twin(scene, tiles, x, expected, site)
    run_group(kernels, scene, tiles, x, out, site)
    check_close(out, expected, units=2)


@DTYPES
def test_rows_longer_than_a_page_and_wide_splits_match_the_twin(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    shape = llama_shape(1, 700, 4, 1, 16, 1100, 900, dtype.itemsize)
    scene = build_adapters(shape, dtype, [[12] * 9, [5] * 9], block_tokens=8, device=device)
    tiles = build_tiles([(1, 0, 2), (0, 2, 1)], scene.tables)
    for site in shape.layer_sites(0):
        x, out = make_inputs(scene, site, 3)
        expected = out.clone()
        run_twin(scene, tiles, x, expected, site)
        run_group(kernels, scene, tiles, x, out, site)
        check_close(out, expected, units=2)


@DTYPES
def test_a_token_gets_the_same_bits_alone_and_in_a_batch(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    if kernels.name == "torch":
        pytest.skip("a library's matmul sums in an order that depends on the number of rows")
    scene = build(dtype, device)
    tiles = build_tiles(RUNS, scene.tables)
    for group in (QKV, DOWN):
        site = scene.shape.layer_sites(0)[group]
        x, together = make_inputs(scene, site)
        before = together.clone()
        run_group(kernels, scene, tiles, x, together, site)
        for index, (slot, first, size) in enumerate(RUNS):
            # The interpreter's dot is numpy's, whose sums depend on the row. A GPU's sums do not.
            interpreted = kernels.name == "triton" and device == "cpu"
            for token in {first} if interpreted else {first, first + size - 1}:
                alone = before[token : token + 1].clone()
                single = build_tiles([(slot, 0, 1)], scene.tables)
                weighted = replace(single, weights=tiles.weights[index : index + 1])
                run_group(kernels, scene, weighted, x[token : token + 1], alone, site)
                assert torch.equal(together[token : token + 1], alone), (group, token)


@DTYPES
@pytest.mark.parametrize("block_tokens", (8, pytest.param(64, marks=SLOW)))
def test_tiles_of_any_length_match_the_twin_wherever_pages_cut_the_rows(
    kernels: Kernels, device: str, dtype: torch.dtype, block_tokens: int, *, soak: bool
) -> None:
    """The adapters have up to 256 rows, of 576 and 800 elements. In the quick run, one of them meets each site in the
    interpreter, and the other two do elsewhere."""
    is_interpreted = kernels.name == "triton" and device == "cpu"
    shape = llama_shape(1, 576, 9, 3, 64, 800, 300, dtype.itemsize)
    ranks = [[256, 1, 64] + [16] * 6, [16] * 9, [33, 0, 7, 40, 5, 31, 200, 0, 0]]
    scene = build_adapters(shape, dtype, ranks, block_tokens=block_tokens, device=device)
    longest = min(50, kernels.tile_limits.tokens)
    lengths = (1, longest) if is_interpreted and not soak else (1, 2, 3, 4, 5, 16, longest)
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    for slot in range(len(ranks)):
        runs = [(slot, start, length) for start, length in zip(starts, lengths, strict=True)]
        tiles = build_tiles(runs, scene.tables)
        for number, site in enumerate(shape.layer_sites(0)):
            if not soak and (number % 3 == slot) != is_interpreted:
                continue
            x, out = make_inputs(scene, site, sum(lengths))
            expected = out.clone()
            run_twin(scene, tiles, x, expected, site)
            run_group(kernels, scene, tiles, x, out, site)
            check_close(out, expected, units=3)


@DTYPES
def test_long_tiles_beside_short_ones_match_the_twin(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    scene = build(dtype, device)
    longest = min(70, kernels.tile_limits.tokens)
    runs = [(0, 0, 1), *((3, at, min(longest, 71 - at)) for at in range(1, 71, longest)), (1, 71, 2)]
    tiles = build_tiles(runs, scene.tables)
    site = scene.shape.layer_sites(1)[QKV]
    x, out = make_inputs(scene, site, 73)
    expected = out.clone()
    run_twin(scene, tiles, x, expected, site)
    run_group(kernels, scene, tiles, x, out, site)
    # Shrunk rows, deltas and sums are rounded, each once.
    check_close(out, expected, units=3)


@DTYPES
def test_an_empty_tile_anywhere_in_the_list_changes_nothing(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    """Lists of tiles are padded to the captured length. A padding tile names a slot and zero tokens."""
    scene = build(dtype, device)
    full = build_tiles(RUNS, scene.tables)
    gaps = [0, 2, 3, 5]
    rows, weights = full.tiles.tolist(), full.weights.tolist()
    for place in reversed(gaps):
        rows.insert(place, [1, 0, 0])
        weights.insert(place, float("nan"))
    padded = replace(
        full,
        tiles=torch.tensor(rows, dtype=torch.int32, device=device),
        weights=torch.tensor(weights, device=device),
    )
    for site in (scene.shape.layer_sites(1)[QKV], scene.shape.layer_sites(1)[DOWN]):
        x, expected = make_inputs(scene, site)
        out = expected.clone()
        run_group(kernels, scene, full, x, expected, site)
        run_group(kernels, scene, padded, x, out, site)
        assert torch.equal(out, expected)


@pytest.mark.covering(2)
@DTYPES
@pytest.mark.parametrize("block_tokens", (8, 16))
def test_scales_and_offsets_of_columns_match_the_twin(
    kernels: Kernels, device: str, dtype: torch.dtype, block_tokens: int
) -> None:
    """Slot 0 has none. The other slots have them at most modules, also where they have no A and B."""
    shape = llama_shape(2, 72, 6, 2, 16, 200, 300, dtype.itemsize)
    affine = set(range(shape.num_modules)) - {1, 12}
    scene = build_adapters(shape, dtype, RANKS, block_tokens=block_tokens, device=device, affine=affine)
    tiles = build_tiles([*RUNS, (1, 30, 0)], scene.tables)
    for site in shape.sites:
        _, out = make_inputs(scene, site)
        expected, before = out.clone(), out.clone()
        reference.apply_affine(expected, scene.pages, scene.tables, site, tiles)
        kernels.apply_affine(out, scene.pages, site, kernels.prepare_lora(tiles, scene.tables))
        check_close(out, expected, units=2)
        # Tokens of the base model and of slot 0.
        for rows in ([7, 8, 9, 30], [0, *range(17, 30)]):
            assert torch.equal(out[rows], before[rows])
        assert not torch.equal(out[10:17], before[10:17])


@pytest.mark.covering(2)
@DTYPES
@pytest.mark.parametrize("count", (1, 63, 300))
def test_logits_of_rows_in_scattered_pages_match_their_products(
    kernels: Kernels, device: str, dtype: torch.dtype, count: int
) -> None:
    shape = llama_shape(1, 72, 6, 2, 16, 200, 300, dtype.itemsize)
    # The rows of A of this adapter stand for rows of a head.
    scene = build_adapters(shape, dtype, [[0] * 8 + [count]], block_tokens=8, device=device)
    (_, first), pages = scene.tables.groups[0, -1].tolist(), scene.tables.page_table[0].tolist()
    rows = TokenRows(scene.pages, pages, count, 0, first)
    values = reference.read_rows(scene.pages, pages, first, count, 72, dtype)
    for tokens in (1, 5, 70):
        hidden = torch.randn(tokens, 72, generator=torch.Generator().manual_seed(tokens)).to(dtype).to(device)
        logits = kernels.token_logits(hidden, rows)
        check_close(logits, hidden.double() @ values.double().T, units=2)
        if kernels.name != "triton" or device != "cpu":
            alone = kernels.token_logits(hidden[-1:], rows)
            assert device != "cpu" or torch.equal(alone, logits[-1:])


def test_adapters_without_a_rank_anywhere_change_nothing(kernels: Kernels, device: str) -> None:
    shape = llama_shape(1, 64, 4, 2, 16, 96, 100, 4)
    scene = build_adapters(shape, torch.float32, [[0] * 9], device=device)
    tiles = build_tiles([(0, 0, 2)], scene.tables)
    for site in shape.layer_sites(0):
        x, out = make_inputs(scene, site, 2)
        before = out.clone()
        run_group(kernels, scene, tiles, x, out, site)
        assert torch.equal(out, before)
