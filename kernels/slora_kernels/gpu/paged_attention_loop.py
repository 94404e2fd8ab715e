"""The loop that decode and prefill attention share: a block of query rows attends to a split of a sequence's pages.

It is an online softmax (arXiv 2205.14135) in base 2 and fp32. KV slots past the split are never loaded, because they
may hold old data of another sequence.

The scales of K and V, if any, multiply the scores and the attention weights. There are fewer scores and weights than
elements of K and V. Scaling K and V instead would also spill registers on sm_100 with 128 query rows (compiled ahead of
time, not run). In float16, V itself is scaled, because a weight times a scale may underflow.

A row of latents is cut in two blocks, because 512 and 64 elements would be padded to 1,024 together. The scores are the
sum of two products. The first block, the latent, is loaded once for keys and values.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AttentionRule, KVGeometry

LOG2_E = math.log2(math.e)
# Bytes of K that one iteration of the loop reads, and also its bytes of V. With more bytes, kernels for head dim 256
# spill registers, or exceed the 64 KiB of LDS of an MI300. This is known from compiling them: nothing ran on an MI300.
ITERATION_BYTES = 16 * 1024
# Initial value of the running maximum. It is finite, so that a row without visible tokens in a block adds 0 and not
# NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _cap_scores(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP). Both `scores` and `CAP` include the factor log2(e)."""
    # exp2 of a negative number cannot overflow. 2 log2(e) = 2.885.
    small = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / CAP))
    size = CAP * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0, -size, size)


@triton.jit
def _widen(scales):
    """Converts bfloat16 scales to float32 by shifting their bits.

    After a plain conversion, LLVM narrows the product of a scale and an 8-bit number to float16 before it multiplies.
    LLVM only checks that the mantissas fit, so most scales below 2**-14 lose bits (seen on an H200, Triton 3.6).
    """
    return (scales.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def attend_pages(
    q,
    q_rest,
    limits,
    pages,
    scales,
    table,
    head_start,
    scale_start,
    page_stride,
    begin,
    end,
    scale,
    SIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Computes attention of q [M, D] to tokens [begin, end) of a sequence.

    q_rest: None, or the elements of q behind VALUE_DIM [M, BLOCK_REST]. Then pages hold latents: the first VALUE_DIM
    elements of a key are the value.
    limits: int32 [M]. Row m sees the WINDOW tokens before position limits[m], or all of them if WINDOW is None.
    scale, CAP: include the factor log2(e).
    begin, end: each token in the range has to be visible to at least one row.
    head_start: elements from the start of a page to K of this layer and head. V begins SIDE elements after K.
    scales: None, or the pages viewed as bfloat16. The scales of K begin at element scale_start of a page, and those of
    V begin SIDE // HEAD_DIM elements later.

    Returns unnormalised values [M, BLOCK_D], maxima [M] (base 2) and sums of weights [M].
    """
    lanes = tl.arange(0, BLOCK_D)
    rest_lanes = tl.arange(0, BLOCK_REST)
    peak = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + tokens // BLOCK_TOKENS, mask=tokens < end, other=0).to(tl.int64) * page_stride
        base = page + head_start + (tokens % BLOCK_TOKENS) * HEAD_DIM
        place = pages + base[:, None] + lanes[None, :]
        mask = (tokens[:, None] < end) & (lanes[None, :] < VALUE_DIM)
        k = tl.load(place, mask=mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if q_rest is None:
            v = tl.load(place + SIDE, mask=mask, other=0.0).to(tl.float32)
        else:
            rest_place = pages + base[:, None] + (VALUE_DIM + rest_lanes)[None, :]
            rest_mask = (tokens[:, None] < end) & (VALUE_DIM + rest_lanes < HEAD_DIM)[None, :]
            rest = tl.load(rest_place, mask=rest_mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
            v = k.to(tl.float32)
        scores *= scale
        if scales is not None:
            scale_place = scales + page // 2 + scale_start + tokens % BLOCK_TOKENS
            k_scale = tl.load(scale_place, mask=tokens < end, other=0.0).to(tl.float32)
            if q_rest is None:
                v_scale = tl.load(scale_place + SIDE // HEAD_DIM, mask=tokens < end, other=0.0)
            else:
                # A row that is not finite has a scale of NaN, which must not reach the rows that do not see it.
                v_scale = tl.load(scale_place, mask=tokens < end, other=0.0)
                v_scale = tl.where(k_scale == k_scale, v_scale, 0.0)
            scores *= k_scale[None, :]
            if q.dtype == tl.float16:  # weight * scale may underflow float16
                v *= _widen(v_scale)[:, None]
        if CAP is not None:
            scores = _cap_scores(scores, CAP)
        seen = tokens[None, :] < limits[:, None]
        if WINDOW is not None:
            seen &= tokens[None, :] >= limits[:, None] - WINDOW
        scores = tl.where(seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        if (scales is not None) & (q.dtype != tl.float16):
            weights *= v_scale.to(tl.float32)[None, :]
        acc = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def weigh_sinks(sinks, heads, mask, peak):
    """Returns what the sinks of `heads` add to sums of weights relative to the maxima `peak` (base 2).

    mask: which of the heads there are. None: all.
    """
    # 1.4427 = log2(e).
    return tl.exp2(tl.load(sinks + heads, mask=mask) * 1.4426950408889634 - peak)


@triton.jit
def first_visible(end, WINDOW: tl.constexpr):
    """Position of the first token that the token at end - 1 sees."""
    first = end * 0
    if WINDOW is not None:
        first = tl.maximum(end - WINDOW, 0)
    return first


def count_iteration_tokens(geometry: KVGeometry, most: int, key_bytes: int = ITERATION_BYTES) -> int:
    """Context tokens per iteration of the loop, at most `most`. In 16 bits: 64 for head dim 128, 32 for 256.

    `tl.dot` needs 16 at least.
    """
    return max(16, min(most, key_bytes // (pad_head_dim(geometry) * geometry.dtype.itemsize)))


def pad_head_dim(geometry: KVGeometry) -> int:
    """Lanes of a program's values: their width rounded up to a power of two, at least 16 because of `tl.dot`."""
    lanes: int = triton.next_power_of_2(geometry.value_width)
    return max(16, lanes)


def pad_rest(geometry: KVGeometry) -> int:
    """Lanes of the part of a key behind its value, as in `pad_head_dim`."""
    lanes: int = triton.next_power_of_2(max(1, geometry.head_dim - geometry.value_width))
    return max(16, lanes)


def view_pages(pages: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor | None]:
    """Returns two views of pages uint8 [num_pages, full_page_bytes]: the elements of K and V, and the scales.

    The second view is None if the format has no scales.
    """
    return pages.view(geometry.element_dtype), pages.view(torch.bfloat16) if geometry.has_scales else None


def base_two_cap(rule: AttentionRule) -> float | None:
    """The soft cap for scores that include log2(e)."""
    return None if rule.softcap is None else rule.softcap * LOG2_E
