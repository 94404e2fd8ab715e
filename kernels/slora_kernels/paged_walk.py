"""The walk that decode and prefill attention share: a block of query rows over a stretch of a sequence's
pages.

Online softmax (arXiv 2205.14135) in base 2, fp32. Slots past the stretch are never loaded: they hold whatever
the page's last user left there.
"""

import triton
import triton.language as tl


@triton.jit
def walk_pages(
    q,
    limits,
    pages,
    table,
    head_start,
    page_stride,
    begin,
    end,
    scale,
    SIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """q [M, D]; limits int32 [M], tokens that a row sees; each row must see `begin`. scale includes log2(e).

    head_start: elements from a page's start to this layer's and head's K; V lies SIDE elements further.
    Returns unscaled values [M, D], peaks [M] (base 2) and totals [M].
    """
    lanes = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + tokens // BLOCK_TOKENS, mask=tokens < end, other=0)
        base = page.to(tl.int64) * page_stride + head_start + (tokens % BLOCK_TOKENS) * HEAD_DIM
        place = pages + base[:, None] + lanes[None, :]
        mask = (tokens[:, None] < end) & (lanes[None, :] < HEAD_DIM)
        k = tl.load(place, mask=mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
        v = tl.load(place + SIDE, mask=mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(tokens[None, :] < limits[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT_DTYPE), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total
