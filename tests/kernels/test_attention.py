from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from slora_kernels.batch import AttentionBatch, AttentionRule, KVGeometry
from slora_kernels.kv_format import KVFormat
from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from tests.kernels.scenes import AttentionScene, build_attention, check_close, write

# The interpreter computes in float32, whatever the dtype.
SLOW = pytest.mark.interpreted_slowly
# (query heads, KV heads, head dim, block tokens)
HEADS = ((2, 2, 64, 16), (6, 2, 16, 8), (4, 1, 128, 16), (3, 1, 80, 16))
DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 129), (1, 300))
CHUNKS = ((5, 5), (16, 16), (17, 40), (2, 130), (37, 64), (100, 110))
MIXED = ((1, 33), (23, 23), (1, 1), (1, 200), (7, 150))


# Windows: shorter than a block, one block, across blocks and loop rounds of every kernel, and longer than any context.
# The soft-caps are low enough to change most scores.
WINDOWS = (3, 16, 77, 400)
RULES = (*((window, None) for window in WINDOWS), (None, 1.5), (77, 1.5))
WINDOWED = ((1, 1), (1, 5), (1, 17), (1, 90), (1, 300), (5, 5), (23, 23), (41, 140), (7, 150))
# Some head sizes are not powers of two (Phi-3 has 96), and some are as wide as Gemma's.
WINDOW_HEADS = (
    (2, 2, 32, 16),
    (6, 2, 16, 8),
    (3, 1, 80, 16),
    (2, 1, 96, 32),
    (8, 1, 128, 16),
    (2, 2, 256, 16),
)


# As wide as those of Gemma 4.
WIDE = (3, 1, 512, 16)


def build(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    chunks: Sequence[tuple[int, int]],
    device: str,
    window: int | None = None,
) -> AttentionScene:
    return build_attention(KVGeometry(2, *heads, dtype), chunks, window=window, device=device)


def make_rule(
    scene: AttentionScene, window: int | None = None, softcap: float | None = None
) -> AttentionRule:
    return AttentionRule(scene.geometry.head_dim**-0.5, window, softcap)


def attend(kernels: Kernels, scene: AttentionScene, rule: AttentionRule) -> torch.Tensor:
    step = kernels.prepare_attention(scene.batch)
    return kernels.attend(scene.q, scene.pages, scene.geometry, scene.layer, step, rule)


def cut_values(out: torch.Tensor, geometry: KVGeometry) -> torch.Tensor:
    """The elements of an output that are defined: [T, Hq, value_width]."""
    return out.view(len(out), geometry.num_heads, geometry.head_dim)[..., : geometry.value_width]


@cache
def compute_by_twin(
    geometry: KVGeometry,
    chunks: tuple[tuple[int, int], ...],
    device: str,
    window: int | None,
    softcap: float | None,
) -> tuple[AttentionScene, AttentionRule, torch.Tensor]:
    """A scene that all implementations share, its rule, and the output that they must have."""
    scene = build_attention(geometry, chunks, window=window, device=device)
    rule = make_rule(scene, window, softcap)
    expected = reference.attend(scene.q, scene.pages, geometry, scene.layer, scene.batch, rule)
    assert not expected.isnan().any()
    return scene, rule, expected


def check_against_twin(
    kernels: Kernels,
    device: str,
    geometry: KVGeometry,
    chunks: tuple[tuple[int, int], ...],
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    scene, rule, expected = compute_by_twin(geometry, chunks, device, window, softcap)
    check_close(attend(kernels, scene, rule), expected, units=1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("chunks", (DECODES, CHUNKS, MIXED), ids=("decode", "prefill", "mixed"))
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        *((torch.float32, heads) for heads in HEADS),
        (torch.bfloat16, HEADS[1]),
        pytest.param(torch.bfloat16, HEADS[3], marks=SLOW),
    ],
    ids=str,
)
def test_attention_over_scattered_pages_matches_its_twin(
    kernels: Kernels,
    device: str,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    chunks: tuple[tuple[int, int], ...],
) -> None:
    check_against_twin(kernels, device, KVGeometry(2, *heads, dtype), chunks)


@pytest.mark.compiled_late
def test_attention_works_in_half_precision(kernels: Kernels, device: str) -> None:
    check_against_twin(kernels, device, KVGeometry(2, *HEADS[0], torch.float16), MIXED)


def pair_rules_with_heads(
    *, every: bool
) -> list[tuple[tuple[int | None, float | None], tuple[int, int, int, int]]]:
    """Pairs each rule with one shape. With `every`, returns all combinations."""
    pairs = [(rule, heads) for rule in RULES for heads in WINDOW_HEADS]
    return pairs if every else pairs[:: len(WINDOW_HEADS) + 1]


@pytest.mark.parametrize("dtype", (torch.float32, pytest.param(torch.bfloat16, marks=SLOW)))
def test_attention_reads_only_the_tokens_inside_the_window(
    kernels: Kernels, device: str, dtype: torch.dtype, soak: bool
) -> None:
    for (window, softcap), heads in pair_rules_with_heads(every=soak):
        check_against_twin(kernels, device, KVGeometry(2, *heads, dtype), WINDOWED, window, softcap)


def test_a_split_batch_sees_only_its_own_chunks(kernels: Kernels, device: str) -> None:
    scene = build((4, 2, 16, 8), torch.float32, ((1, 40), (30, 70), (1, 33), (5, 5), (20, 32)), device)
    step = kernels.prepare_attention(scene.batch.split(16, 8))
    out = kernels.attend(scene.q, scene.pages, scene.geometry, scene.layer, step, make_rule(scene))
    for token, position in enumerate(scene.batch.positions.tolist()):
        rule = make_rule(scene, window=position % 16 + 1)
        expected = reference.attend(scene.q, scene.pages, scene.geometry, scene.layer, scene.batch, rule)
        check_close(out[token], expected[token], units=1)


@pytest.mark.parametrize(
    ("dtype", "kv_format"),
    [
        (torch.float32, KVFormat.MODEL),
        pytest.param(torch.bfloat16, KVFormat.MODEL, marks=SLOW),
        pytest.param(torch.float32, KVFormat.FP8, marks=SLOW),
    ],
    ids=str,
)
def test_sinks_take_weight_from_the_tokens(
    kernels: Kernels, device: str, dtype: torch.dtype, kv_format: KVFormat
) -> None:
    """The sinks of some heads exceed all scores by far, and those of others are far below them."""
    for heads, window in ((WINDOW_HEADS[1], None), (WIDE, 77), (WINDOW_HEADS[0], 3)):
        geometry = KVGeometry(2, *heads, dtype, kv_format)
        scene = build_attention(geometry, (*WINDOWED, (1, 600)), window=window, device=device)
        sinks = torch.linspace(-20.0, 20.0, heads[0], device=device)
        rule = replace(make_rule(scene, window), sinks=sinks)
        expected = reference.attend(scene.q, scene.pages, geometry, scene.layer, scene.batch, rule)
        out = attend(kernels, scene, rule)
        check_close(out, expected, units=1)
        plain = attend(kernels, scene, make_rule(scene, window)).view(-1, *heads[:3:2])
        ratio = out.view(plain.shape)[:, -1].float().abs().sum() / plain[:, -1].float().abs().sum()
        assert ratio < 1e-3, "the last head's sink takes nearly all weight"


def test_a_window_as_long_as_the_context_changes_no_bit(kernels: Kernels, device: str) -> None:
    scene = build(HEADS[1], torch.float32, MIXED, device)
    plain = attend(kernels, scene, make_rule(scene))
    assert torch.equal(attend(kernels, scene, make_rule(scene, window=200)), plain)


def test_a_cap_far_above_the_scores_changes_little_and_one_of_nothing_averages(
    kernels: Kernels, device: str
) -> None:
    scene = build(HEADS[0], torch.float32, [(1, 33), (7, 20)], device)
    plain = attend(kernels, scene, make_rule(scene))
    # tanh is computed as one minus a term, so its error is up to 1e-7 of the cap.
    torch.testing.assert_close(
        attend(kernels, scene, make_rule(scene, softcap=50.0)), plain, atol=3e-2, rtol=0
    )
    flat = attend(kernels, scene, make_rule(scene, softcap=1e-6))
    equal = attend(kernels, scene, AttentionRule(0.0))
    torch.testing.assert_close(flat, equal, atol=1e-5, rtol=0)


def take_alone(scene: AttentionScene, b: int) -> AttentionScene:
    """The same sequence in a batch of its own."""
    batch = scene.batch
    first, last = batch.query_starts[b : b + 2].tolist()
    context = int(batch.context_lens[b])
    alone = AttentionBatch(
        batch.query_starts[b : b + 2] - first,
        batch.context_lens[b : b + 1],
        batch.block_tables[b : b + 1],
        batch.positions[first:last],
        batch.kv_slots[first:last],
        last - first,
        context,
    )
    return AttentionScene(scene.geometry, scene.pages, alone, scene.q[first:last])


@pytest.mark.parametrize(
    ("dtype", "window"),
    ((torch.float32, None), pytest.param(torch.bfloat16, None, marks=SLOW), (torch.float32, 50)),
)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(
    kernels: Kernels, device: str, dtype: torch.dtype, window: int | None
) -> None:
    if device == "cuda" and kernels.name == "torch":
        pytest.skip("the GPU's matrix library chooses its kernels by the size of the batch")
    scene = build(HEADS[1], dtype, MIXED, device, window)
    together = attend(kernels, scene, make_rule(scene, window))
    for b in range(len(MIXED)):
        first, last = scene.batch.query_starts[b : b + 2].tolist()
        alone = attend(kernels, take_alone(scene, b), make_rule(scene, window))
        assert torch.equal(together[first:last], alone)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("softcap", (None, 1.5), ids=("plain", "capped"))
@pytest.mark.parametrize("chunk", ((1, 40), (5, 40), (12, 40)), ids=str)
def test_a_nan_key_makes_every_token_that_attends_to_it_nan(
    kernels: Kernels, device: str, dtype: torch.dtype, softcap: float | None, chunk: tuple[int, int]
) -> None:
    """The key of token 30 is NaN in the second KV head, which half of the query heads read.

    Of a chunk of 12 tokens, only the last rows attend to token 30.
    """
    scene = build(HEADS[1], dtype, [chunk], device)
    page = int(scene.batch.block_tables[0, 30 // 8])
    reference.view_layer(scene.pages, scene.geometry, scene.layer)[page, 0, 1, 30 % 8, 3] = torch.nan
    sees = scene.batch.positions.cpu() >= 30
    for window, seeing in ((None, sees), (5, sees & (scene.batch.positions.cpu() < 35))):
        out = attend(kernels, scene, make_rule(scene, window, softcap)).view(-1, 6, 16)
        assert out[:, 3:].isnan().all(dim=(1, 2)).tolist() == seeing.tolist()
        assert bool(out[:, :3].isfinite().all()) and bool(out[~seeing].isfinite().all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("side", (0, 1), ids=("k", "v"))
def test_a_non_finite_token_affects_only_the_tokens_that_attend_to_it(
    kernels: Kernels, device: str, side: int, kv_format: KVFormat
) -> None:
    """A token of each sequence has one non-finite number, in the second KV head, which half of the query heads read.

    A weight of 0 times an infinite V was NaN, for the earlier tokens of a chunk too.
    """
    geometry = KVGeometry(2, 6, 2, 16, 8, torch.float32, kv_format)
    scene = build_attention(geometry, [(5, 40), (1, 40), (20, 50), (4, 4)], device=device)
    sides = torch.randn(2, len(scene.q), 2, 16)
    bad_rows = [4, 5, 16]  # the last token of a chunk, a decoded token, and one within a chunk
    sides[side, bad_rows, 1, 3] = torch.tensor([-torch.inf, torch.nan, torch.inf])
    pages = write(kernels, scene, *sides.to(device))
    sequence_of = torch.repeat_interleave(torch.arange(4), scene.batch.query_starts.diff().cpu())
    rows = torch.arange(len(scene.q))
    for window in (None, 9):
        sees = torch.zeros(len(rows), dtype=torch.bool)
        for bad in bad_rows:
            visible = (rows >= bad) & (sequence_of == sequence_of[bad])
            sees |= visible if window is None else visible & (rows < bad + window)
        out = attend(kernels, replace(scene, pages=pages), make_rule(scene, window)).view(-1, 6, 16)
        assert out[:, 3:].isnan().all(dim=(1, 2)).tolist() == sees.tolist()
        assert bool(out[:, :3].isfinite().all()) and bool(out[~sees].isfinite().all())


# (query heads, KV heads, row, block tokens), and the width of the latent in a row. A program of the Triton kernel for
# decoding computes 16 heads.
LATENTS = (((9, 1, 48, 16), 32), ((18, 1, 28, 8), 20), ((3, 1, 576, 16), 512), ((5, 1, 288, 16), 256))
LATENT_CHUNKS = ((1, 33), (7, 7), (1, 150), (2, 70))


def make_latents(
    heads: tuple[int, int, int, int], width: int, dtype: torch.dtype, kv_format: KVFormat
) -> KVGeometry:
    return KVGeometry(2, *heads, dtype, kv_format, latent_width=width)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("heads", "width"), LATENTS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "kv_format"),
    [
        (torch.float32, KVFormat.MODEL),
        (torch.bfloat16, KVFormat.MODEL),
        (torch.float32, KVFormat.FP8),
        pytest.param(torch.bfloat16, KVFormat.FP8, marks=pytest.mark.compiled_late),
        pytest.param(torch.float16, KVFormat.FP8, marks=(pytest.mark.compiled_late, SLOW)),
    ],
)
def test_the_rows_of_latents_are_keys_and_values(
    kernels: Kernels,
    device: str,
    dtype: torch.dtype,
    kv_format: KVFormat,
    heads: tuple[int, int, int, int],
    width: int,
) -> None:
    geometry = make_latents(heads, width, dtype, kv_format)
    assert 2 * geometry.layout.num_bytes <= replace(geometry, latent_width=0).layout.num_bytes + 256
    scene, rule, expected = compute_by_twin(geometry, LATENT_CHUNKS, device, None, None)
    together = cut_values(attend(kernels, scene, rule), geometry)
    check_close(together, cut_values(expected, geometry), units=1)
    if device == "cuda" and kernels.name == "torch":
        return
    for b in range(len(LATENT_CHUNKS)):
        first, last = scene.batch.query_starts[b : b + 2].tolist()
        alone = attend(kernels, take_alone(scene, b), rule)
        assert torch.equal(together[first:last], cut_values(alone, geometry))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_latent_is_written_once_and_one_that_is_not_finite_reaches_no_earlier_token(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    geometry = make_latents(*LATENTS[0], dtype, KVFormat.MODEL)
    scene = build_attention(geometry, [(5, 40), (1, 40), (20, 50), (4, 4)], device=device)
    rows = torch.randn(len(scene.q), 1, 48).to(dtype)
    # The last token of a chunk, a decoded token, and one within a chunk.
    bad_rows = [4, 5, 16]
    rows[bad_rows, 0, 3] = torch.tensor([-torch.inf, torch.nan, torch.inf], dtype=dtype)
    pages, expected = write(kernels, scene, rows.to(device), rows.to(device)), scene.pages.clone()
    exact = rows.double().to(device)
    reference.write_kv(expected, geometry, scene.layer, scene.batch.kv_slots, exact, exact)
    assert torch.equal(pages.view(dtype).nan_to_num(7.0), expected.view(dtype).nan_to_num(7.0))
    sequence_of = torch.repeat_interleave(torch.arange(4), scene.batch.query_starts.diff().cpu())
    tokens = torch.arange(len(scene.q))
    sees = torch.zeros(len(tokens), dtype=torch.bool)
    for bad in bad_rows:
        sees |= (tokens >= bad) & (sequence_of == sequence_of[bad])
    out = attend(kernels, replace(scene, pages=pages), make_rule(scene))
    out = cut_values(out, geometry)
    assert out.isnan().all(dim=(1, 2)).tolist() == sees.tolist()
    assert bool(out[~sees].isfinite().all())
