"""The loop that decode and prefill attention share: a block of query rows attends to a split of a sequence's pages.

It is an online softmax (arXiv 2205.14135) in base 2 and fp32. KV slots past the split are never loaded, because they
may hold old data of another sequence.

The scales of K and V, if any, multiply the scores and the attention weights. There are fewer scores and weights than
elements of K and V. Scaling K and V instead would also spill registers on sm_100 with 128 query rows (compiled ahead of
time, not run). In float16, V itself is scaled, because a weight times a scale may underflow.
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
# 2 to the difference of the exponents' biases of float32 and e4m3.
_E4M3_FACTOR = tl.constexpr(2.0**120)


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
def _weigh(scores, tokens, limits, peak, total, WINDOW: tl.constexpr, CAP: tl.constexpr):
    """One step of the online softmax. Returns the weights of `tokens` [M, N], the factor that old sums decay by, the
    new maxima and the new sums of weights."""
    if CAP is not None:
        scores = _cap_scores(scores, CAP)
    seen = tokens[None, :] < limits[:, None]
    if WINDOW is not None:
        seen &= tokens[None, :] >= limits[:, None] - WINDOW
    scores = tl.where(seen, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    return weights, decay, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def _split_lanes(x, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Splits x [ROWS, 4 * WORDS] into four tensors [ROWS, WORDS]: the columns 4 w + j for j = 0, 1, 2, 3."""
    even, odd = tl.split(tl.reshape(x, (ROWS, WORDS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _decode_e4m3(words, factors, DOT_DTYPE: tl.constexpr):
    """Decodes the four e4m3 of each int32 as four operands of `tl.dot`, multiplied by `factors` if they are given.

    The 7 low bits of an e4m3 become the low bits of an exponent and the high bits of a mantissa. The exponents' biases
    are 7 and 127, so the result is too small by a factor of 2**120, which multiplies the result of `tl.dot`.
    Subnormals stay subnormal, and nothing is rounded. Only in float16 the operands are the numbers themselves.
    """
    if tl.bfloat16 == DOT_DTYPE:
        # Two elements at a time, with 4 instructions. The code below takes 7 for them.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, number;
            prmt.b32 pair, $4, $5, 0x4000;
            shr.b32 number, pair, 4;
            and.b32 number, number, 0x07f007f0;
            lop3.b32 $0, pair, 0x80008000, number, 0xea;
            prmt.b32 pair, $4, $5, 0x5010;
            shr.b32 number, pair, 4;
            and.b32 number, number, 0x07f007f0;
            lop3.b32 $1, pair, 0x80008000, number, 0xea;
            prmt.b32 pair, $4, $5, 0x6020;
            shr.b32 number, pair, 4;
            and.b32 number, number, 0x07f007f0;
            lop3.b32 $2, pair, 0x80008000, number, 0xea;
            prmt.b32 pair, $4, $5, 0x7030;
            shr.b32 number, pair, 4;
            and.b32 number, number, 0x07f007f0;
            lop3.b32 $3, pair, 0x80008000, number, 0xea;
            }""",
            "=&r,=&r,=&r,=r,r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        first = _decode_byte(words, 0, factors, DOT_DTYPE)
        second = _decode_byte(words, 1, factors, DOT_DTYPE)
        third = _decode_byte(words, 2, factors, DOT_DTYPE)
        fourth = _decode_byte(words, 3, factors, DOT_DTYPE)
    return first, second, third, fourth


@triton.jit
def _decode_byte(words, BYTE: tl.constexpr, factors, DOT_DTYPE: tl.constexpr):
    bits = ((words << (24 - 8 * BYTE)) >> 4) & -0x78100000
    values = bits.to(tl.float32, bitcast=True)
    if tl.float16 == DOT_DTYPE:
        values *= _E4M3_FACTOR
        if factors is not None:
            values *= factors
    return values.to(DOT_DTYPE)


@triton.jit
def attend_pages(
    q,
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
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Computes attention of q [M, D] to tokens [begin, end) of a sequence.

    limits: int32 [M]. Row m sees the WINDOW tokens before position limits[m], or all of them if WINDOW is None.
    scale, CAP: include the factor log2(e).
    begin, end: each token in the range has to be visible to at least one row.
    head_start: elements from the start of a page to K of this layer and head. V begins SIDE elements after K.
    scales, scale_start: unused, because these pages have no scales.

    Returns unnormalised values [M, D], maxima [M] (base 2) and sums of weights [M].
    """
    lanes = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + tokens // BLOCK_TOKENS, mask=tokens < end, other=0).to(tl.int64) * page_stride
        base = page + head_start + (tokens % BLOCK_TOKENS) * HEAD_DIM
        place = pages + base[:, None] + lanes[None, :]
        mask = (tokens[:, None] < end) & (lanes[None, :] < HEAD_DIM)
        k = tl.load(place, mask=mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
        v = tl.load(place + SIDE, mask=mask, other=0.0).to(tl.float32).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        weights, decay, peak, total = _weigh(scores, tokens, limits, peak, total, WINDOW, CAP)
        acc = tl.dot(weights.to(DOT_DTYPE), v, acc * decay[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def attend_e4m3_pages(
    q,
    limits,
    words,
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
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """`attend_pages` for pages in fp8.

    words: the pages viewed as int32, four elements each. page_stride is in words, and head_start and SIDE are in
    elements. As an operand of `tl.dot`, single bytes of V would be read from shared memory one by one. The operands are
    therefore words: byte j of all words is one of four operands, and q and the values are split alike.
    scales: the pages viewed as bfloat16. The scales of K begin at element scale_start of a page, and those of V begin
    SIDE // HEAD_DIM elements later.
    """
    WORDS: tl.constexpr = BLOCK_D // 4
    lanes = tl.arange(0, WORDS)
    peak = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    q_0, q_1, q_2, q_3 = _split_lanes(q, BLOCK_M, WORDS)
    acc_0 = tl.zeros((BLOCK_M, WORDS), tl.float32)
    acc_1 = tl.zeros((BLOCK_M, WORDS), tl.float32)
    acc_2 = tl.zeros((BLOCK_M, WORDS), tl.float32)
    acc_3 = tl.zeros((BLOCK_M, WORDS), tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + tokens // BLOCK_TOKENS, mask=tokens < end, other=0).to(tl.int64) * page_stride
        base = page + head_start // 4 + (tokens % BLOCK_TOKENS) * (HEAD_DIM // 4)
        place = words + base[:, None] + lanes[None, :]
        mask = (tokens[:, None] < end) & (lanes[None, :] < HEAD_DIM // 4)
        k = tl.load(place, mask=mask, other=0)
        v = tl.load(place + SIDE // 4, mask=mask, other=0)
        scale_place = scales + page * 2 + scale_start + tokens % BLOCK_TOKENS
        k_scale = tl.load(scale_place, mask=tokens < end, other=0.0).to(tl.float32)
        v_scale = tl.load(scale_place + SIDE // HEAD_DIM, mask=tokens < end, other=0.0)
        k_0, k_1, k_2, k_3 = _decode_e4m3(tl.trans(k), None, DOT_DTYPE)
        scores = tl.dot(q_0, k_0, input_precision="ieee")
        scores = tl.dot(q_1, k_1, scores, input_precision="ieee")
        scores = tl.dot(q_2, k_2, scores, input_precision="ieee")
        scores = tl.dot(q_3, k_3, scores, input_precision="ieee")
        if tl.float16 != DOT_DTYPE:
            scores *= _E4M3_FACTOR
        scores = scores * scale * k_scale[None, :]
        weights, decay, peak, total = _weigh(scores, tokens, limits, peak, total, WINDOW, CAP)
        if tl.float16 == DOT_DTYPE:  # a weight times a scale may underflow
            factors = _widen(v_scale)[:, None]
        else:
            factors = None
            weights *= v_scale.to(tl.float32)[None, :]
        v_0, v_1, v_2, v_3 = _decode_e4m3(v, factors, DOT_DTYPE)
        weights = weights.to(DOT_DTYPE)
        decay = decay[:, None]
        acc_0 = tl.dot(weights, v_0, acc_0 * decay, input_precision="ieee")
        acc_1 = tl.dot(weights, v_1, acc_1 * decay, input_precision="ieee")
        acc_2 = tl.dot(weights, v_2, acc_2 * decay, input_precision="ieee")
        acc_3 = tl.dot(weights, v_3, acc_3 * decay, input_precision="ieee")
    acc = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3))
    acc = tl.reshape(acc, (BLOCK_M, BLOCK_D))
    if tl.float16 != DOT_DTYPE:
        acc *= _E4M3_FACTOR
    return acc, peak, total


@triton.jit
def first_visible(end, WINDOW: tl.constexpr):
    """Position of the first token that the token at end - 1 sees."""
    first = end * 0
    if WINDOW is not None:
        first = tl.maximum(end - WINDOW, 0)
    return first


def count_iteration_tokens(geometry: KVGeometry, most: int) -> int:
    """Context tokens per iteration of the loop, at most `most`. In 16 bits: 64 for head dim 128, 32 for 256."""
    # In float32, 8-bit elements take four times their bytes once they are decoded.
    bytes_per_element = max(geometry.element_dtype.itemsize, geometry.dtype.itemsize // 2)
    return min(most, ITERATION_BYTES // (pad_head_dim(geometry) * bytes_per_element))


def pad_head_dim(geometry: KVGeometry) -> int:
    """Number of lanes of a program: the head dim rounded up to a power of two, at least 16 because of `tl.dot`."""
    lanes: int = triton.next_power_of_2(geometry.head_dim)
    return max(16, lanes)


def view_pages(pages: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor | None]:
    """Returns two views of pages uint8 [num_pages, full_page_bytes]: K and V, and the scales.

    In fp8, the view of K and V has four elements in each int32. Otherwise the second view is None.
    """
    if not geometry.has_scales:
        return pages.view(geometry.dtype), None
    return pages.view(torch.int32), pages.view(torch.bfloat16)


def base_two_cap(rule: AttentionRule) -> float | None:
    """The soft cap for scores that include log2(e)."""
    return None if rule.softcap is None else rule.softcap * LOG2_E
