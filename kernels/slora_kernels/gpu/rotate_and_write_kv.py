"""Normalises and rotates q in place, and writes k (normalised and rotated) and v to their pages, in one pass over qkv.

A program handles one token and one KV head, with its query heads, its k and its v. The program holds all values of k
and v. It can therefore check that the values are finite (see `KVFormat`) and compute the scales for pages in fp8. If
pages hold latents, there is no v.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AttentionBatch, KVGeometry, QueryKeyNorm
from slora_kernels.gpu.e4m3 import encode_elements, encode_scale, measure_magnitudes
from slora_kernels.gpu.launch import Launch

_INFINITY = tl.constexpr(0x7F800000)
_NAN_SCALE = tl.constexpr(0x7FC0)


@triton.jit
def _load(source, delta, mask):
    """Elements of qkv, plus the delta of each, rounded to the dtype of qkv. delta: pointers, or None."""
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        values += tl.load(delta, mask=mask, other=0.0).to(tl.float32)
        values = values.to(source.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _norm_and_rotate_heads(
    source,
    delta,
    real,
    angles,
    weight,
    eps,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Normalises (if NORMED) and rotates heads. The first 2 * HALF dimensions of a head are rotated.

    source: pointers to the heads [M]. delta: pointers to what is added, or None. real: bool [M], false for padding.
    Returns both halves of the rotated dimensions [M, BLOCK_HALF] and the other dimensions [M, BLOCK_REST], float32.
    """
    halves = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    turning, staying = halves < HALF, rest < HEAD_DIM
    at_a, at_rest = source[:, None] + halves[None, :], source[:, None] + rest[None, :]
    mask_a, mask_rest = real[:, None] & turning[None, :], real[:, None] & staying[None, :]
    if delta is None:
        a = _load(at_a, None, mask_a)
        b = _load(at_a + HALF, None, mask_a)
        c = _load(at_rest, None, mask_rest)
    else:
        delta_a, delta_rest = delta[:, None] + halves[None, :], delta[:, None] + rest[None, :]
        a = _load(at_a, delta_a, mask_a)
        b = _load(at_a + HALF, delta_a + HALF, mask_a)
        c = _load(at_rest, delta_rest, mask_rest)
    if NORMED:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a *= factor * tl.load(weight + halves, mask=turning, other=0.0).to(tl.float32)[None, :]
        b *= factor * tl.load(weight + HALF + halves, mask=turning, other=0.0).to(tl.float32)[None, :]
        c *= factor * tl.load(weight + rest, mask=staying, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(angles + halves, mask=turning, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF + halves, mask=turning, other=0.0).to(tl.float32)[None, :]
    return a * cos - b * sin, b * cos + a * sin, c


@triton.jit
def _store_heads(
    target,
    real,
    a,
    b,
    c,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Stores the results of `_norm_and_rotate_heads` to the heads at pointers `target` [M]."""
    halves = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    to_a, to_rest = target[:, None] + halves[None, :], target[:, None] + rest[None, :]
    mask_a, mask_rest = real[:, None] & (halves < HALF)[None, :], real[:, None] & (rest < HEAD_DIM)[None, :]
    element = target.dtype.element_ty
    tl.store(to_a, a.to(element), mask=mask_a)
    tl.store(to_a + HALF, b.to(element), mask=mask_a)
    tl.store(to_rest, c.to(element), mask=mask_rest)


@triton.jit(do_not_specialize=["positions", "kv_slots", "layer"])
def _rotate_and_write_kv_kernel(
    qkv,
    delta,
    cos_sin,
    query_norm,
    key_norm,
    pages,
    scales,
    positions,
    kv_slots,
    eps,
    layer,
    qkv_stride,
    page_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_LATENTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    LAYER_ELEMENTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SIDES: tl.constexpr = 1 if HAS_LATENTS else 2
    SIDE: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    row = qkv + token * qkv_stride
    angles = cos_sin + tl.load(positions + token) * (2 * HALF)

    members = tl.arange(0, BLOCK_G)
    at_q, real = (kv_head * GROUP + members) * HEAD_DIM, members < GROUP
    q = row + at_q
    if delta is not None:
        delta_row = delta + token * ((HEADS + SIDES * KV_HEADS) * HEAD_DIM)
        delta_q = delta_row + at_q
    else:
        delta_q = None
    if (HALF > 0) | NORMED | (delta is not None):
        a, b, c = _norm_and_rotate_heads(
            q, delta_q, real, angles, query_norm, eps, HALF, HEAD_DIM, NORMED, BLOCK_HALF, BLOCK_REST
        )
        _store_heads(q, real, a, b, c, HALF, HEAD_DIM, BLOCK_HALF, BLOCK_REST)

    slot = tl.load(kv_slots + token)
    page, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    start = page * page_stride + layer * LAYER_ELEMENTS
    one = tl.arange(0, 1)
    # A padding row has slot -1 and writes nothing.
    written = slot + one >= 0
    target = pages + start + (kv_head * BLOCK_TOKENS + offset) * HEAD_DIM + one
    at_key = (HEADS + kv_head) * HEAD_DIM + one
    key = row + at_key
    delta_key = delta_row + at_key if delta is not None else None
    a, b, c = _norm_and_rotate_heads(
        key, delta_key, written, angles, key_norm, eps, HALF, HEAD_DIM, NORMED, BLOCK_HALF, BLOCK_REST
    )
    lanes = tl.arange(0, BLOCK_D)
    inside = (lanes < HEAD_DIM) & written
    at_value = KV_HEADS * HEAD_DIM + lanes
    if HAS_LATENTS:
        value = tl.zeros((BLOCK_D,), tl.float32)
    elif delta is not None:
        value = _load(key + at_value, delta_key + at_value, inside)
    else:
        value = _load(key + at_value, None, inside)
    if scales is None:
        # Round before the check for finite values, because rounding may overflow.
        element = pages.dtype.element_ty
        a, b, c = a.to(element).to(tl.float32), b.to(element).to(tl.float32), c.to(element).to(tl.float32)
    largest_k = tl.maximum(
        tl.maximum(tl.max(measure_magnitudes(a), 1), tl.max(measure_magnitudes(b), 1)),
        tl.max(measure_magnitudes(c), 1),
    )
    largest_v = tl.max(measure_magnitudes(value), 0)
    finite = tl.maximum(largest_k, largest_v) < _INFINITY
    value = tl.where(finite, value, 0.0)
    if scales is None:
        # A latent is also a value, so it becomes 0, and only the last element of the key becomes NaN.
        FIRST_NAN: tl.constexpr = HEAD_DIM - 1 if HAS_LATENTS else 0
        halves, rest = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
        a = tl.where(finite[:, None], a, tl.where(halves >= FIRST_NAN, float("nan"), 0.0)[None, :])
        b = tl.where(finite[:, None], b, tl.where(HALF + halves >= FIRST_NAN, float("nan"), 0.0)[None, :])
        c = tl.where(finite[:, None], c, tl.where(rest >= FIRST_NAN, float("nan"), 0.0)[None, :])
        value = value.to(pages.dtype.element_ty)
    else:
        # `encode_elements` turns numbers over a scale of NaN into finite ones.
        scale_k = tl.where(finite, encode_scale(largest_k), _NAN_SCALE)
        scale_v = encode_scale(tl.where(finite, largest_v, 0))
        a, b, c = (
            encode_elements(a, scale_k[:, None]),
            encode_elements(b, scale_k[:, None]),
            encode_elements(c, scale_k[:, None]),
        )
        value = encode_elements(value, scale_v)
        # Scales follow the elements of the layer and take two bytes each.
        place = scales + start // 2 + SIDES * SIDE // 2 + kv_head * BLOCK_TOKENS + offset + one
        tl.store(place, scale_k.to(tl.int16), mask=written)
        if not HAS_LATENTS:
            tl.store(place + KV_HEADS * BLOCK_TOKENS, scale_v.to(tl.int16), mask=written)
    _store_heads(target, written, a, b, c, HALF, HEAD_DIM, BLOCK_HALF, BLOCK_REST)
    if not HAS_LATENTS:
        tl.store(target + SIDE + lanes, value, mask=inside)


def bind_rotate_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor | None,
    pages: Tensor,
    geometry: KVGeometry,
    layer: int,
    batch: AttentionBatch,
    norms: QueryKeyNorm | None = None,
    delta: Tensor | None = None,
) -> Launch:
    """Rotates q of qkv [T, (Hq + 2 Hk) * D] in place, and writes k and v to pages uint8 [num_pages, full_page_bytes].

    If pages hold latents, qkv is [T, (Hq + Hk) * D].

    delta: of the shape and dtype of qkv, added to it. None: nothing is added.
    cos_sin: float32 [max_positions, R], or None (R = 0). batch.kv_slots and batch.positions: int64 [T]. A token with
    slot -1 writes no KV.
    """
    elements = pages if geometry.has_scales else pages.view(geometry.dtype)
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    return Launch(
        _rotate_and_write_kv_kernel,
        (qkv.shape[0], geometry.num_kv_heads),
        {
            "qkv": qkv,
            "delta": delta,
            # Placeholders for absent tensors are never read.
            "cos_sin": qkv if cos_sin is None else cos_sin,
            "query_norm": qkv if norms is None else norms.query,
            "key_norm": qkv if norms is None else norms.key,
            "pages": elements,
            "scales": pages.view(torch.int16) if geometry.has_scales else None,
            "positions": batch.positions,
            "kv_slots": batch.kv_slots,
            "eps": 0.0 if norms is None else norms.eps,
            "layer": layer,
            "qkv_stride": qkv.stride(0),
            "page_stride": elements.stride(0),
        },
        {
            "HEADS": geometry.num_heads,
            "KV_HEADS": geometry.num_kv_heads,
            "HEAD_DIM": geometry.head_dim,
            "HALF": rotary // 2,
            "NORMED": norms is not None,
            "HAS_LATENTS": geometry.latent_width > 0,
            "BLOCK_TOKENS": geometry.block_tokens,
            "LAYER_ELEMENTS": geometry.layer_elements,
            "BLOCK_G": triton.next_power_of_2(geometry.group_heads),
            "BLOCK_D": triton.next_power_of_2(geometry.head_dim),
            "BLOCK_HALF": triton.next_power_of_2(max(1, rotary // 2)),
            "BLOCK_REST": triton.next_power_of_2(max(1, geometry.head_dim - rotary)),
        },
    )
