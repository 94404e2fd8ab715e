import pytest
import torch

from slora_kernels import reference
from slora_kernels.batch import KVGeometry
from slora_kernels.ops import Kernels
from tests.kernels.scenes import build_attention, check_close


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("heads", ((2, 2, 64, 16), (6, 2, 16, 8), (4, 1, 128, 16)), ids=str)
def test_q_is_rotated_and_only_the_slots_of_k_and_v_are_written(
    kernels: Kernels, device: str, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim, block_tokens = heads
    geometry = KVGeometry(3, num_heads, num_kv_heads, head_dim, block_tokens, dtype)
    scene = build_attention(geometry, [(1, 1), (1, 17), (5, 21)], device=device)
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(7, (num_heads + 2 * num_kv_heads) * head_dim, generator=random).to(dtype).to(device)
    angles = torch.rand(32, head_dim // 2, generator=random) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    expected_pages = scene.pages.clone()
    expected = reference.rotate_and_write_kv(qkv, cos_sin, expected_pages, geometry, 1, scene.batch)
    step = kernels.prepare_attention(scene.batch)
    q = kernels.rotate_and_write_kv(qkv, cos_sin, scene.pages, geometry, 1, step)
    assert q.shape == (7, num_heads, head_dim)
    check_close(q, expected, units=1)
    # NaN where nobody wrote, and the same values elsewhere.
    actual, wanted = scene.pages.view(dtype), expected_pages.view(dtype)
    assert torch.equal(actual.isnan(), wanted.isnan())
    check_close(actual.nan_to_num(), wanted.nan_to_num(), units=1)
