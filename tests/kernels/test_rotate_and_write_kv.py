import pytest
import torch

from slora_kernels.batch import KVGeometry, QueryKeyNorm
from slora_kernels.ops import Kernels
from slora_kernels.torch import reference
from tests.kernels.scenes import build_attention, check_close

# (query heads, KV heads, head dim, block tokens, rotated dimensions). Phi-2 rotates 32 of 80, GPT-NeoX a quarter.
HEADS = (
    (2, 2, 64, 16, 64),
    (6, 2, 16, 8, 16),
    (4, 1, 128, 16, 32),
    (3, 1, 80, 16, 32),
    (2, 1, 96, 16, 96),
    (2, 1, 256, 16, 0),
)
# The same with the width of a latent behind them.
LATENTS = ((17, 1, 576, 16, 0, 512), (3, 1, 28, 8, 16, 20))


def make_norms(head_dim: int, dtype: torch.dtype, device: str) -> QueryKeyNorm:
    random = torch.Generator().manual_seed(2)
    query, key = (torch.rand(2, head_dim, generator=random) + 0.5).to(dtype).to(device)
    return QueryKeyNorm(query, key, 1e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("norm_dtype", (None, torch.float32, torch.bfloat16), ids=("plain", "wide", "normed"))
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        *((torch.float32, heads) for heads in (*HEADS, *LATENTS)),
        (torch.bfloat16, HEADS[1]),
        (torch.bfloat16, HEADS[3]),
        pytest.param(torch.float16, HEADS[0], marks=pytest.mark.compiled_late),
    ],
    ids=str,
)
def test_q_is_rotated_and_only_the_slots_of_k_and_v_are_written(
    kernels: Kernels,
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, ...],
    norm_dtype: torch.dtype | None,
) -> None:
    num_heads, num_kv_heads, head_dim, block_tokens, rotated, *latent = heads
    geometry = KVGeometry(3, num_heads, num_kv_heads, head_dim, block_tokens, dtype, latent_width=sum(latent))
    scene = build_attention(geometry, [(1, 1), (1, 17), (5, 21)], device=device)
    random = torch.Generator().manual_seed(1)
    width = (num_heads + geometry.num_sides * num_kv_heads) * head_dim
    qkv = torch.randn(7, width, generator=random).to(dtype).to(device)
    angles = torch.rand(32, rotated // 2, generator=random) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device) if rotated else None
    norms = None if norm_dtype is None else make_norms(head_dim, norm_dtype, device)
    expected_pages = scene.pages.clone()
    expected = reference.rotate_and_write_kv(qkv, cos_sin, expected_pages, geometry, 1, scene.batch, norms)
    step = kernels.prepare_attention(scene.batch)
    q = kernels.rotate_and_write_kv(qkv, cos_sin, scene.pages, geometry, 1, step, norms)
    assert q.shape == (7, num_heads, head_dim)
    check_close(q, expected, units=1)
    # Unwritten values are NaN in both, and the other values are equal.
    actual, wanted = scene.pages.view(dtype), expected_pages.view(dtype)
    assert torch.equal(actual.isnan(), wanted.isnan())
    check_close(actual.nan_to_num(), wanted.nan_to_num(), units=1)


@pytest.mark.parametrize("heads", (HEADS[1], HEADS[3], HEADS[5], LATENTS[1]), ids=str)
def test_a_delta_of_qkv_is_added_first(kernels: Kernels, device: str, heads: tuple[int, ...]) -> None:
    num_heads, num_kv_heads, head_dim, block_tokens, rotated, *latent = heads
    geometry = KVGeometry(
        3, num_heads, num_kv_heads, head_dim, block_tokens, torch.float32, latent_width=sum(latent)
    )
    scene = build_attention(geometry, [(1, 1), (1, 17), (5, 21)], device=device)
    width = (num_heads + geometry.num_sides * num_kv_heads) * head_dim
    qkv, delta = torch.randn(2, 7, width, device=device)
    cos_sin = torch.rand(32, rotated, device=device) if rotated else None
    pages, step = scene.pages.clone(), kernels.prepare_attention(scene.batch)
    expected = kernels.rotate_and_write_kv(qkv + delta, cos_sin, pages, geometry, 1, step)
    q = kernels.rotate_and_write_kv(qkv, cos_sin, scene.pages, geometry, 1, step, None, delta)
    assert torch.equal(q, expected)
    written, wanted = (all_pages.view(torch.float32).nan_to_num() for all_pages in (scene.pages, pages))
    assert torch.equal(written, wanted) and wanted.any()
