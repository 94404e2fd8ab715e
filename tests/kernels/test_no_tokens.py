"""A batch without tokens is valid: results are empty, and nothing else changes."""

import pytest
import torch

from slora_kernels.batch import AttentionBatch, AttentionRule, KVGeometry
from slora_kernels.layout import llama_shape
from slora_kernels.ops import Kernels
from tests.kernels.scenes import build_adapters, build_tiles

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 16


def test_norms_and_activations_of_no_rows_are_empty(kernels: Kernels, device: str) -> None:
    none, weight = torch.empty(0, HIDDEN, device=device), torch.ones(HIDDEN, device=device)
    assert kernels.rms_norm(none, weight, 1e-6).shape == (0, HIDDEN)
    assert kernels.add_rms_norm(none, none.clone(), weight, 1e-6).shape == (0, HIDDEN)
    assert kernels.act_mul(none, "silu").shape == (0, HIDDEN // 2)


def test_attention_of_no_sequences_is_empty_and_writes_no_page(kernels: Kernels, device: str) -> None:
    if kernels.name == "cpu":
        pytest.skip("a step without tokens is never planned, and these views would need a look of their own")
    geometry = KVGeometry(1, HEADS, KV_HEADS, HEAD_DIM, 8, torch.float32)
    pages = torch.full((3, geometry.layout.num_bytes), 0xFF, dtype=torch.uint8, device=device)
    ints = {"dtype": torch.int32, "device": device}
    longs = {"dtype": torch.int64, "device": device}
    batch = AttentionBatch(
        torch.zeros(1, **ints),
        torch.empty(0, **ints),
        torch.empty(0, 1, **ints),
        torch.empty(0, **longs),
        torch.empty(0, **longs),
        max_query_len=1,
        max_context_len=1,
    )
    step = kernels.prepare_attention(batch)
    qkv = torch.empty(0, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device)
    angles = torch.zeros(8, HEAD_DIM, device=device)
    q = kernels.rotate_and_write_kv(qkv, angles, pages, geometry, 0, step)
    assert q.shape == (0, HEADS, HEAD_DIM)
    out = kernels.attend(q, pages, geometry, 0, step, AttentionRule(0.25))
    assert out.shape == (0, HEADS * HEAD_DIM)
    assert bool((pages == 0xFF).all())


def test_adapters_beside_no_token_change_nothing(kernels: Kernels, device: str) -> None:
    shape = llama_shape(1, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, 64, 100, 4)
    scene = build_adapters(shape, torch.float32, [[4] * 9], device=device)
    site = shape.layer_sites(0)[0]
    for runs in ([], [(0, 0, 0)]):
        step = kernels.prepare_lora(build_tiles(runs, scene.tables), scene.tables)
        shrunk = kernels.shrink(torch.empty(0, HIDDEN, device=device), scene.pages, site, step)
        out = torch.empty(0, sum(site.widths), device=device)
        kernels.expand(out, shrunk, scene.pages, site, step)
        assert out.shape == (0, sum(site.widths))
