"""KV cache in fp8: the code written for each number, the number read from each code, and attention over fp8 pages."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slora_kernels.batch import AttentionRule, KVGeometry, QueryKeyNorm
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import llama_shape
from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from tests.kernels.scenes import AttentionScene, build_attention, check_close, write
from tests.kernels.test_attention import (
    CHUNKS,
    DECODES,
    HEADS,
    MIXED,
    RULES,
    SLOW,
    WINDOW_HEADS,
    WINDOWED,
    attend,
    check_against_twin,
    take_alone,
)

LATE = pytest.mark.compiled_late
# All finite non-negative numbers in ascending order. The last one is 448.
NUMBERS = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
ALL_NUMBERS = torch.cat((-NUMBERS.flip(0), NUMBERS))


def make_geometry(heads: tuple[int, int, int, int], dtype: torch.dtype) -> KVGeometry:
    return KVGeometry(2, *heads, dtype, KVFormat.FP8)


def build(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    chunks: Sequence[tuple[int, int]],
    device: str,
) -> AttentionScene:
    return build_attention(make_geometry(heads, dtype), chunks, device=device)


def nearest(values: Tensor) -> Tensor:
    """The uint8 codes of the nearest numbers, found by comparing all of them. In a tie, the even code is chosen."""
    distances = (values.double().abs()[..., None] - NUMBERS).abs()
    even_first = (distances * 2**20 + torch.arange(0x7F) % 2 * 2**-20).argmin(-1).to(torch.uint8)
    return even_first | torch.where(values.signbit(), 0x80, 0).to(torch.uint8)


def test_every_number_is_rounded_to_the_nearest_and_ties_to_even(kernels: Kernels, device: str) -> None:
    ties = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    beside = [torch.nextafter(ties.float(), torch.full_like(ties.float(), end)) for end in (0.0, 448.0)]
    values = torch.cat((NUMBERS.float(), ties.float(), *beside))
    values = torch.cat((values, -values))
    tokens, heads, head_dim = -(-len(values) // (2 * 63)), 2, 64
    scene = build((heads, heads, head_dim, 16), torch.float32, [(tokens, tokens)], device)
    # A vector that contains 448 has a scale of one.
    v = torch.full((tokens, heads, head_dim), 448.0)
    v[..., 1:] = torch.nn.functional.pad(values, (0, tokens * heads * 63 - len(values))).view(
        tokens, heads, 63
    )
    pages = write(kernels, scene, (2.0 * v).to(device), v.to(device)).cpu()
    written = reference.view_layer(pages, scene.geometry, scene.layer).view(torch.uint8)
    scales = reference.view_scales(pages, scene.geometry, scene.layer)
    for token, slot in enumerate(scene.batch.kv_slots.tolist()):
        page, offset = divmod(slot, 16)
        assert scales[page, :, :, offset].tolist() == [[2.0, 2.0], [1.0, 1.0]]
        assert torch.equal(written[page, 0, :, offset], nearest(v[token]))
        assert torch.equal(written[page, 1, :, offset], nearest(v[token]))


def test_every_code_is_read_as_its_number(kernels: Kernels, device: str) -> None:
    """A token that attends only to itself gets its own V."""
    scene = build((2, 2, 64, 16), torch.float32, [(1, 1), (1, 1)], device)
    for side, (page, offset) in enumerate(divmod(slot, 16) for slot in scene.batch.kv_slots.tolist()):
        numbers = reference.view_layer(scene.pages, scene.geometry, scene.layer)[page, 1, :, offset]
        half = torch.nn.functional.pad(ALL_NUMBERS[127 * side :][:127], (0, 1))
        numbers.copy_(half.float().view(2, 64).to(device))
        reference.view_scales(scene.pages, scene.geometry, scene.layer)[page, 1, :, offset] = 0.75
    expected = reference.attend(
        scene.q, scene.pages, scene.geometry, scene.layer, scene.batch, AttentionRule(0.1)
    )
    assert len(expected.unique()) == 253
    assert torch.equal(attend(kernels, scene, AttentionRule(0.1)), expected)


@pytest.mark.parametrize("size", (1e-38, 3e-6, 1.0, 1e5, 3e38))
def test_a_scale_is_the_least_that_clips_nothing(kernels: Kernels, device: str, size: float) -> None:
    scene = build((2, 2, 64, 16), torch.float32, [(5, 5), (1, 17)], device)
    random = torch.Generator().manual_seed(4)
    k, v = (torch.rand(2, 6, 2, 64, generator=random) * 2 - 1) * size
    v[0] = 0.0
    expected = scene.pages.clone()
    slots = scene.batch.kv_slots
    reference.write_kv(
        expected, scene.geometry, scene.layer, slots, k.to(device).double(), v.to(device).double()
    )
    pages = write(kernels, scene, k.to(device), v.to(device))
    wanted, scales = (reference.view_scales(x.cpu(), scene.geometry, scene.layer) for x in (expected, pages))
    assert torch.equal(scales.nan_to_num(), wanted.nan_to_num())
    for token, slot in enumerate(scene.batch.kv_slots.tolist()):
        page, offset = divmod(slot, 16)
        for side, exact in enumerate((k, v)):
            scale = scales[page, side, :, offset].double()[:, None]
            read = reference.view_layer(pages.cpu(), scene.geometry, scene.layer)[
                page, side, :, offset
            ].double()
            # Half a step at four significant bits, or half a step of the smallest numbers.
            error = (read * scale - exact[token].double()).abs()
            assert bool((error <= (exact[token].double().abs() / 16).maximum(scale * 2**-10) * 1.0001).all())


def check_pages(pages: Tensor, expected: Tensor, geometry: KVGeometry) -> None:
    """Checks that pages are equal, except for single steps where float32 rounds a tie differently. Unwritten bytes
    are NaN."""
    for layer in range(geometry.num_layers):
        scales, wanted = (reference.view_scales(x, geometry, layer) for x in (pages, expected))
        assert torch.equal(scales.isnan(), wanted.isnan())
        check_close(scales.nan_to_num(), wanted.nan_to_num(), units=1, size=0)
        codes, wanted_codes = (
            reference.view_layer(x, geometry, layer).view(torch.uint8).int() for x in (pages, expected)
        )
        # Zeros may have either sign.
        apart = (codes - wanted_codes).abs() * ((codes | wanted_codes) & 0x7F != 0)
        assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.01
    end = geometry.layout.num_bytes
    rest = pages.view(len(pages), geometry.num_layers, end)[:, :, geometry.layout.scales_start :]
    padding = rest[:, :, 4 * geometry.num_kv_heads * geometry.block_tokens :]
    assert bool((padding == 0xFF).all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("normed", (False, True), ids=("plain", "normed"))
@pytest.mark.parametrize(
    ("dtype", "heads", "rotated"),
    [
        (torch.float32, (6, 2, 16, 8), 16),
        (torch.float32, (3, 1, 80, 16), 32),
        (torch.float32, (2, 1, 24, 16), 0),
        pytest.param(torch.bfloat16, (4, 1, 128, 16), 128, marks=LATE),
    ],
    ids=str,
)
def test_rotated_k_and_v_are_written_with_their_scales_and_nothing_else_is(
    kernels: Kernels,
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    rotated: int,
    *,
    normed: bool,
) -> None:
    geometry = make_geometry(heads, dtype)
    scene = build_attention(geometry, [(1, 1), (1, 17), (5, 21)], device=device)
    random = torch.Generator().manual_seed(1)
    width = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
    qkv = torch.randn(7, width, generator=random).to(dtype).to(device)
    angles = torch.rand(32, rotated // 2, generator=random) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device) if rotated else None
    query, key = (torch.rand(2, geometry.head_dim, generator=random) + 0.5).to(device)
    norms = QueryKeyNorm(query, key, 1e-6) if normed else None
    expected_pages = scene.pages.clone()
    expected = reference.rotate_and_write_kv(qkv, cos_sin, expected_pages, geometry, 1, scene.batch, norms)
    step = kernels.prepare_attention(scene.batch)
    q = kernels.rotate_and_write_kv(qkv, cos_sin, scene.pages, geometry, 1, step, norms)
    check_close(q, expected, units=1)
    check_pages(scene.pages.cpu(), expected_pages.cpu(), geometry)


@LATE
def test_the_written_kv_of_a_token_does_not_depend_on_the_batch(kernels: Kernels, device: str) -> None:
    scene = build(HEADS[1], torch.bfloat16, MIXED, device)
    count, (_, num_kv_heads, head_dim, block_tokens) = len(scene.batch.kv_slots), HEADS[1]
    k, v = torch.randn(2, count, num_kv_heads, head_dim).to(torch.bfloat16).to(device)
    pages = write(kernels, scene, k, v)
    for b in (0, 2, 4):
        first, last = scene.batch.query_starts[b : b + 2].tolist()
        alone = write(kernels, take_alone(scene, b), k[first:last], v[first:last])
        ids = torch.tensor(
            sorted({slot // block_tokens for slot in scene.batch.kv_slots[first:last].tolist()})
        )
        assert torch.equal(alone[ids], pages[ids])


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "chunks", (DECODES, pytest.param(CHUNKS, marks=SLOW), MIXED), ids=("decode", "prefill", "mixed")
)
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        (torch.float32, HEADS[1]),
        (torch.float32, HEADS[3]),
        pytest.param(torch.bfloat16, HEADS[2], marks=LATE),
    ],
    ids=str,
)
def test_attention_over_fp8_pages_matches_its_twin(
    kernels: Kernels,
    device: str,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    chunks: tuple[tuple[int, int], ...],
) -> None:
    check_against_twin(kernels, device, make_geometry(heads, dtype), chunks)


@LATE
def test_v_too_small_for_half_precision_keeps_its_bits(kernels: Kernels, device: str) -> None:
    """The scales of a float16 model may be smaller than the smallest float16."""
    scene = build(HEADS[0], torch.float16, MIXED, device)
    reference.view_scales(scene.pages, scene.geometry, scene.layer)[:, 1].mul_(2.0**-12)
    expected = reference.attend(scene.q, scene.pages, scene.geometry, 1, scene.batch, AttentionRule(0.1))
    check_close(attend(kernels, scene, AttentionRule(0.1)), expected, units=1, size=2.0**-12)


@pytest.mark.interpreted_slowly
@pytest.mark.parametrize("dtype", (torch.float32, pytest.param(torch.bfloat16, marks=(LATE, SLOW))))
def test_windows_and_caps_hold_over_fp8_pages(
    kernels: Kernels, device: str, dtype: torch.dtype, soak: bool
) -> None:
    pairs = [(rule, heads) for rule in RULES for heads in WINDOW_HEADS]
    for (window, softcap), heads in pairs if soak else pairs[2 :: 2 * len(WINDOW_HEADS) + 1]:
        check_against_twin(kernels, device, make_geometry(heads, dtype), WINDOWED, window, softcap)


def test_a_page_of_fp8_holds_almost_twice_the_tokens() -> None:
    llama = llama_shape(32, 4096, 32, 8, 128, 14336, 128256, 2)
    assert llama.layer_page_bytes(16) == 65536
    assert llama.layer_page_bytes(16, KVFormat.FP8) == 32768 + 2 * 8 * 16 * 2
    # 4096 numbers and 32 scales, padded to whole segments for any number of heads.
    narrow = llama_shape(1, 128, 2, 1, 128, 256, 100, 2)
    assert narrow.layer_page_bytes(16, KVFormat.FP8) == 4096 + 256
    assert llama_shape(1, 48, 4, 1, 12, 72, 100, 4).layer_page_bytes(2, KVFormat.FP8) == 256
