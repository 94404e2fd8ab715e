"""Rotates q in place and writes rotated k, and v, into their pages: one read of qkv between GEMM and
attention.

A program takes one token and one KV head: its query heads, its k and its v.
"""

import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AttentionBatch, KVGeometry
from slora_kernels.launch import Launch


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_write_kv_kernel(
    qkv,
    cos_sin,
    pages,
    positions,
    kv_slots,
    layer,
    qkv_stride,
    page_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token, kv_head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    SIDE: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    lanes = tl.arange(0, BLOCK_D)
    inside = lanes < HALF
    angles = cos_sin + tl.load(positions + token) * HEAD_DIM + lanes
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + HALF, mask=inside, other=0.0)
    row = qkv + token * qkv_stride

    members = tl.arange(0, BLOCK_G)
    source = row + (kv_head * GROUP + members)[:, None] * HEAD_DIM + lanes[None, :]
    mask = (members[:, None] < GROUP) & inside[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(source, (a * cos[None, :] - b * sin[None, :]).to(qkv.dtype.element_ty), mask=mask)
    tl.store(source + HALF, (b * cos[None, :] + a * sin[None, :]).to(qkv.dtype.element_ty), mask=mask)

    slot = tl.load(kv_slots + token)
    start = slot // BLOCK_TOKENS * page_stride + layer * (2 * SIDE) + kv_head * BLOCK_TOKENS * HEAD_DIM
    target = pages + start + (slot % BLOCK_TOKENS) * HEAD_DIM + lanes
    key = row + (HEADS + kv_head) * HEAD_DIM + lanes
    a = tl.load(key, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(key + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (a * cos - b * sin).to(pages.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (b * cos + a * sin).to(pages.dtype.element_ty), mask=inside)
    value = key + KV_HEADS * HEAD_DIM
    tl.store(target + SIDE, tl.load(value, mask=inside, other=0.0), mask=inside)
    tl.store(target + SIDE + HALF, tl.load(value + HALF, mask=inside, other=0.0), mask=inside)


def bind_rotate_and_write_kv(
    qkv: Tensor, cos_sin: Tensor, pages: Tensor, geometry: KVGeometry, layer: int, batch: AttentionBatch
) -> Launch:
    """qkv [T, (Hq + 2 Hk) * D] has its q rotated in place; pages uint8 [num_pages, full_page_bytes] get k and
    v.

    cos_sin float32 [max_positions, D]; kv_slots and positions are int64 [T].
    """
    elements = pages.view(geometry.dtype)
    return Launch(
        _rotate_and_write_kv_kernel,
        (qkv.shape[0], geometry.num_kv_heads),
        {
            "qkv": qkv,
            "cos_sin": cos_sin,
            "pages": elements,
            "positions": batch.positions,
            "kv_slots": batch.kv_slots,
            "layer": layer,
            "qkv_stride": qkv.stride(0),
            "page_stride": elements.stride(0),
        },
        {
            "HEADS": geometry.num_heads,
            "KV_HEADS": geometry.num_kv_heads,
            "HEAD_DIM": geometry.head_dim,
            "BLOCK_TOKENS": geometry.block_tokens,
            "BLOCK_G": triton.next_power_of_2(geometry.group_heads),
            "BLOCK_D": triton.next_power_of_2(geometry.head_dim // 2),
        },
    )
