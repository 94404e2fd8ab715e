"""Attention of sequences that compute one token. The context is split, so that one long sequence can use a whole GPU.

A program handles one sequence, one KV head and one split of the visible context. The rows of its `tl.dot` are the query
heads of the KV head, or some of them if pages hold latents. How a context is split depends only on its length, so a
result does not depend on the batch. If a context has one split, the program writes the output directly. Otherwise the
programs write partial sums, and a second kernel merges them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AttentionBatch, AttentionRule, KVGeometry
from slora_kernels.gpu.launch import Launch, dot_dtype
from slora_kernels.gpu.paged_attention_loop import (
    ITERATION_BYTES,
    LOG2_E,
    attend_pages,
    base_two_cap,
    count_iteration_tokens,
    first_visible,
    pad_head_dim,
    pad_rest,
    view_pages,
    weigh_sinks,
)

# Context tokens per iteration of the loop.
ITERATION_TOKENS = 64
# MIN_SPLIT_TOKENS is enough to amortise the merge. MAX_SPLITS lets one sequence with 8 KV heads start 128 programs. An
# H100 or H200 has about as many multiprocessors.
MIN_SPLIT_TOKENS = 128
# Query heads of a program, and bytes of latents that an iteration reads. All heads of latents share one KV head, and no
# values are read beside the keys. With 32 rows, sums of 512 numbers would spill registers on sm_90 with 4 warps and on
# gfx942 with 8, and so would twice the bytes with 4 (known from ahead-of-time compilation).
LATENT_ROWS = 16
LATENT_ITERATION_BYTES = 32 * 1024
MAX_SPLITS = 16


@triton.jit
def _measure_split(visible, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens per split of a context with `visible` visible tokens: a multiple of BLOCK_N, at least MIN_SPLIT."""
    share = tl.cdiv(tl.cdiv(visible, MAX_SPLITS), BLOCK_N) * BLOCK_N
    return tl.maximum(share, MIN_SPLIT)


@triton.jit(
    do_not_specialize=["query_starts", "context_lens", "block_tables", "layer", "num_splits", "table_stride"]
)
def _paged_attention_decode_kernel(
    q,
    pages,
    scales,
    out,
    partial_values,
    partial_sums,
    sinks,
    query_starts,
    context_lens,
    block_tables,
    scale,
    layer,
    num_splits,
    page_stride,
    table_stride,
    q_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_LATENTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    LAYER_ELEMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    # Programs that read the same tokens have consecutive ids, so that most of their loads come from the cache.
    b, kv_head, part = tl.program_id(0) // HEAD_TILES, tl.program_id(1), tl.program_id(2)
    token = tl.load(query_starts + b)
    context = tl.load(context_lens + b)
    behind = first_visible(context, WINDOW)
    split = _measure_split(context - behind, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    begin = behind + part * split
    if (tl.load(query_starts + b + 1) - token != 1) | (begin >= context):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SIDE: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    rows = tl.program_id(0) % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    mask = (rows[:, None] < GROUP) & (lanes[None, :] < VALUE_DIM)
    source = q + token * q_stride + heads[:, None] * HEAD_DIM + lanes[None, :]
    rows_q = tl.load(source, mask=mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
    rest_q = None
    if HAS_LATENTS:
        rest = VALUE_DIM + tl.arange(0, BLOCK_REST)
        rest_source = q + token * q_stride + heads[:, None] * HEAD_DIM + rest[None, :]
        rest_mask = (rows[:, None] < GROUP) & (rest[None, :] < HEAD_DIM)
        rest_q = tl.load(rest_source, mask=rest_mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
    layer_start, head_tokens = layer * LAYER_ELEMENTS, kv_head * BLOCK_TOKENS
    acc, peak, total = attend_pages(
        rows_q,
        rest_q,
        tl.full((BLOCK_M,), context, tl.int32),
        pages,
        scales,
        block_tables + b * table_stride,
        layer_start + head_tokens * HEAD_DIM,
        layer_start // 2 + (SIDE // 2 if HAS_LATENTS else SIDE) + head_tokens,
        page_stride,
        begin,
        tl.minimum(begin + split, context),
        scale,
        SIDE,
        BLOCK_TOKENS,
        HEAD_DIM,
        VALUE_DIM,
        WINDOW,
        CAP,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_REST,
        DOT_DTYPE,
    )
    if context - behind <= split:
        if sinks is not None:
            total += weigh_sinks(sinks, heads, rows < GROUP, peak)
        target = out + (token * HEADS + heads)[:, None] * HEAD_DIM + lanes[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        place = (b * HEADS + heads) * num_splits + part
        tl.store(partial_values + place[:, None] * VALUE_DIM + lanes[None, :], acc, mask=mask)
        tl.store(partial_sums + place * 2, peak, mask=rows < GROUP)
        tl.store(partial_sums + place * 2 + 1, total, mask=rows < GROUP)


@triton.jit(do_not_specialize=["query_starts", "context_lens", "num_splits"])
def _merge_splits_kernel(
    out,
    partial_values,
    partial_sums,
    sinks,
    query_starts,
    context_lens,
    num_splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + b)
    context = tl.load(context_lens + b)
    visible = context - first_visible(context, WINDOW)
    split = _measure_split(visible, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    if (tl.load(query_starts + b + 1) - token != 1) | (visible <= split):
        return
    parts = tl.arange(0, MAX_SPLITS)
    lanes = tl.arange(0, BLOCK_D)
    used = parts * split < visible
    place = (b * HEADS + head) * num_splits + parts
    peaks = tl.load(partial_sums + place * 2, mask=used, other=-float("inf"))
    totals = tl.load(partial_sums + place * 2 + 1, mask=used, other=0.0)
    peak = tl.max(peaks, 0)
    decay = tl.exp2(peaks - peak)
    total = tl.sum(totals * decay, 0)
    if sinks is not None:
        total += weigh_sinks(sinks, head, None, peak)
    source = partial_values + place[:, None] * VALUE_DIM + lanes[None, :]
    values = tl.load(source, mask=used[:, None] & (lanes[None, :] < VALUE_DIM), other=0.0)
    merged = tl.sum(values * decay[:, None], 0) / total
    target = out + (token * HEADS + head) * HEAD_DIM + lanes
    tl.store(target, merged.to(out.dtype.element_ty), mask=lanes < VALUE_DIM)


def _count_iteration_tokens(geometry: KVGeometry) -> int:
    """Returns the number of context tokens per iteration of the loop.

    Head dims that are not a power of two, such as 96, need masks, which an MI300 keeps in scalar registers. Such head
    dims get half as many tokens per iteration, so that these registers do not spill.
    """
    whole = geometry.value_width == triton.next_power_of_2(geometry.value_width)
    num_bytes = LATENT_ITERATION_BYTES if geometry.latent_width else ITERATION_BYTES
    return count_iteration_tokens(geometry, ITERATION_TOKENS if whole else ITERATION_TOKENS // 2, num_bytes)


def _count_warps(geometry: KVGeometry) -> int:
    """With 4 warps, converting latents of 512 numbers from fp8 would spill registers."""
    is_wide = geometry.latent_width > 0 and geometry.has_scales
    return 4 if geometry.dtype.itemsize == 2 and not is_wide else 8


def count_splits(most_visible: int) -> int:
    """Maximum number of splits of a context with `most_visible` visible tokens: one per 128 tokens, at most 16."""
    return min(MAX_SPLITS, -(-most_visible // MIN_SPLIT_TOKENS))


def bind_paged_attention_decode(
    q: Tensor,
    pages: Tensor,
    out: Tensor,
    geometry: KVGeometry,
    layer: int,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> list[Launch]:
    """Binds the kernel to q [T, Hq, D] and out [T, Hq * D]. Rows of sequences with several queries are not written."""
    sequences = batch.context_lens.shape[0]
    splits = count_splits(rule.count_visible(batch.max_context_len))
    parts = (sequences, geometry.num_heads, splits)
    values = torch.empty(*parts, geometry.value_width, dtype=torch.float32, device=q.device)
    sums = torch.empty(*parts, 2, dtype=torch.float32, device=q.device)
    elements, scales = view_pages(pages, geometry)
    rows = max(16, triton.next_power_of_2(geometry.group_heads))
    if geometry.latent_width:
        rows = min(rows, LATENT_ROWS)
    head_tiles = -(-geometry.group_heads // rows)
    shared: dict[str, object] = {
        "out": out,
        "partial_values": values,
        "partial_sums": sums,
        "sinks": rule.sinks,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "num_splits": splits,
    }
    sizes: dict[str, object] = {
        "HEADS": geometry.num_heads,
        "HEAD_DIM": geometry.head_dim,
        "VALUE_DIM": geometry.value_width,
        "WINDOW": rule.window,
        "MIN_SPLIT": MIN_SPLIT_TOKENS,
        "MAX_SPLITS": MAX_SPLITS,
        "BLOCK_N": _count_iteration_tokens(geometry),
        "BLOCK_D": pad_head_dim(geometry),
    }
    walk = Launch(
        _paged_attention_decode_kernel,
        (sequences * head_tiles, geometry.num_kv_heads, splits),
        shared
        | {
            "q": q,
            "pages": elements,
            "scales": scales,
            "block_tables": batch.block_tables,
            "scale": rule.scale * LOG2_E,
            "layer": layer,
            "page_stride": elements.stride(0),
            "table_stride": batch.block_tables.stride(0),
            "q_stride": q.stride(0),
        },
        sizes
        | {
            "KV_HEADS": geometry.num_kv_heads,
            "HAS_LATENTS": geometry.latent_width > 0,
            "BLOCK_TOKENS": geometry.block_tokens,
            "LAYER_ELEMENTS": geometry.layer_elements,
            "CAP": base_two_cap(rule),
            "HEAD_TILES": head_tiles,
            "BLOCK_M": rows,
            "BLOCK_REST": pad_rest(geometry),
            "DOT_DTYPE": dot_dtype(geometry.dtype),
        },
        num_warps=_count_warps(geometry),
    )
    # One warp: with four, merging 64 sequences took 2.6 times as long (H200).
    merge = Launch(_merge_splits_kernel, (sequences, geometry.num_heads), shared, sizes, num_warps=1)
    return [walk, merge] if splits > 1 else [walk]
