"""Causal attention of prefill chunks: the tokens of a chunk attend to all earlier pages and to each other.

The pairs of a token of a chunk and a query head of a KV head are cut into tiles, token by token. A program handles one
tile: its pairs are the rows of its `tl.dot`. The program finds its sequence by bisection in the query starts. The size
of the grid is an upper bound of the number of tiles. The host knows the bound without reading the batch from the
device. Sequences of one query token are always left to the decode kernel, so that their sums do not depend on the
batch.
"""

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

# Context tokens per iteration of the loop, and warps of a program. On an H200, 64 tokens reach 272 TFLOP/s for a prompt
# of 4,096 tokens and 241 for 512 tokens behind 4,096; with 32 tokens, these are 281 and 165. Over fp8, 64 would spill
# registers (known from ahead-of-time compilation).
ITERATION_TOKENS, FP8_ITERATION_TOKENS = 64, 32
NUM_WARPS = 8


def _count_rows(geometry: KVGeometry) -> int:
    """The rows of a program's `tl.dot`.

    float32 is only used to check results and is not tuned for speed.
    """
    if geometry.dtype.itemsize == 4:
        return 16
    return 128 if geometry.value_width <= 128 else 64 if geometry.value_width <= 256 else 32


def _count_tokens(geometry: KVGeometry, rule: AttentionRule) -> int:
    """The context tokens per iteration of the loop.

    Windows of layers with sinks are short, so they take few iterations. With more tokens, gfx942 would spill registers.
    It would also spill with 32 latents of 512 numbers in 16 bits. In fp8, 16 of them would spill in float16.
    """
    is_short = rule.window is not None and rule.sinks is not None
    most = FP8_ITERATION_TOKENS if geometry.has_scales or is_short else ITERATION_TOKENS
    num_bytes = 2 * ITERATION_BYTES if geometry.latent_width and geometry.has_scales else ITERATION_BYTES
    return count_iteration_tokens(geometry, most, num_bytes)


@triton.jit
def _find_sequence(query_starts, num_sequences, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Finds the sequence of a tile: the last sequence whose first tile is at or before `tile`.

    The first tile of sequence b has the index query_starts[b] * GROUP // BLOCK_M + b. This reserves enough tiles for
    each sequence.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=[
        "query_starts",
        "context_lens",
        "block_tables",
        "layer",
        "num_sequences",
        "table_stride",
    ]
)
def _paged_attention_prefill_kernel(
    q,
    pages,
    scales,
    out,
    sinks,
    query_starts,
    context_lens,
    block_tables,
    scale,
    layer,
    num_sequences,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    b = _find_sequence(query_starts, num_sequences, tile, GROUP, BLOCK_M)
    first = tl.load(query_starts + b)
    size = tl.load(query_starts + b + 1) - first
    row = (tile - first * GROUP // BLOCK_M - b) * BLOCK_M
    if (size == 1) | (row >= size * GROUP):
        return
    SIDE: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    rows = row + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_D)
    queries = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = queries < size
    mask = real[:, None] & (lanes[None, :] < VALUE_DIM)
    source = q + (first + queries)[:, None] * q_stride + heads[:, None] * HEAD_DIM + lanes[None, :]
    rows_q = tl.load(source, mask=mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
    rest_q = None
    if HAS_LATENTS:
        rest = VALUE_DIM + tl.arange(0, BLOCK_REST)
        rest_source = q + (first + queries)[:, None] * q_stride + heads[:, None] * HEAD_DIM + rest[None, :]
        rest_mask = real[:, None] & (rest[None, :] < HEAD_DIM)
        rest_q = tl.load(rest_source, mask=rest_mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
    layer_start, head_tokens = layer * LAYER_ELEMENTS, kv_head * BLOCK_TOKENS
    before = tl.load(context_lens + b) - size
    begin = first_visible(before + row // GROUP + 1, WINDOW)
    acc, peak, total = attend_pages(
        rows_q,
        rest_q,
        tl.where(real, before + queries + 1, begin + 1),
        pages,
        scales,
        block_tables + b * table_stride,
        layer_start + head_tokens * HEAD_DIM,
        layer_start // 2 + (SIDE // 2 if HAS_LATENTS else SIDE) + head_tokens,
        page_stride,
        begin,
        before + tl.minimum((row + BLOCK_M - 1) // GROUP + 1, size),
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
    if sinks is not None:
        total += weigh_sinks(sinks, heads, None, peak)
    target = out + ((first + queries) * HEADS + heads)[:, None] * HEAD_DIM + lanes[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def bind_paged_attention_prefill(
    q: Tensor,
    pages: Tensor,
    out: Tensor,
    geometry: KVGeometry,
    layer: int,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> Launch:
    """Binds the kernel to q [T, Hq, D] and out [T, Hq * D]. Rows of sequences with a single query are not written."""
    sequences = batch.context_lens.shape[0]
    rows = _count_rows(geometry)
    elements, scales = view_pages(pages, geometry)
    return Launch(
        _paged_attention_prefill_kernel,
        (q.shape[0] * geometry.group_heads // rows + sequences, geometry.num_kv_heads),
        {
            "q": q,
            "pages": elements,
            "scales": scales,
            "out": out,
            "sinks": rule.sinks,
            "query_starts": batch.query_starts,
            "context_lens": batch.context_lens,
            "block_tables": batch.block_tables,
            "scale": rule.scale * LOG2_E,
            "layer": layer,
            "num_sequences": sequences,
            "page_stride": elements.stride(0),
            "table_stride": batch.block_tables.stride(0),
            "q_stride": q.stride(0),
        },
        {
            "HEADS": geometry.num_heads,
            "KV_HEADS": geometry.num_kv_heads,
            "HEAD_DIM": geometry.head_dim,
            "VALUE_DIM": geometry.value_width,
            "HAS_LATENTS": geometry.latent_width > 0,
            "BLOCK_TOKENS": geometry.block_tokens,
            "LAYER_ELEMENTS": geometry.layer_elements,
            "WINDOW": rule.window,
            "CAP": base_two_cap(rule),
            "BLOCK_M": rows,
            "BLOCK_N": _count_tokens(geometry, rule),
            "BLOCK_D": pad_head_dim(geometry),
            "BLOCK_REST": pad_rest(geometry),
            "DOT_DTYPE": dot_dtype(geometry.dtype),
        },
        num_warps=NUM_WARPS,
    )
