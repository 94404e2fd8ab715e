"""The oracle of the tests: every kernel in plain torch, written to be obviously correct, not fast.

All arithmetic is float64, and each result is rounded once to the input's dtype. A difference from these results is
therefore the rounding error, or a bug, of the tested implementation. Functions read only the bytes that a kernel may
read.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.batch import (
    Activation,
    AdapterTables,
    AttentionBatch,
    AttentionRule,
    KVGeometry,
    LoraTiles,
    QueryKeyNorm,
)
from slora_kernels.coded_weight import CodedWeight
from slora_kernels.layout import LARGEST_E4M3, SCALE_BYTES, SEGMENT_BYTES, LoraSite
from slora_kernels.sampling_tensors import SamplingTensors


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] -> [T, H]; arXiv 1910.07467."""
    exact = x.double()
    norm = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (norm * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then returns the RMS norm of the new residual."""
    residual.copy_(residual.double() + x.double())
    return rms_norm(residual, weight, eps)


def apply_activation(gate: Tensor, activation: Activation) -> Tensor:
    """Applies the activation to float64 of any shape. silu: arXiv 1702.03118. gelu and gelu_tanh: arXiv 1606.08415."""
    match activation:
        case "silu":
            return gate * torch.sigmoid(gate)
        case "gelu":
            return gate * 0.5 * torch.erfc(-gate / 2**0.5)
        case "gelu_tanh":
            return gate * torch.sigmoid((8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (apply_activation(gate, activation) * up).to(gate_up.dtype)


def quantized_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times (values [N, K] * scales [N, 1]) transposed, plus bias [N] -> [T, N] of x's dtype."""
    weight = values.double() * scales.double()[:, None]
    out = x.double() @ weight.T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """x [T, K] times a weight [N, K] transposed, plus bias [N] -> [T, N] of x's dtype."""
    out = x.double() @ weight.decode().double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def grouped_linear(x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor) -> Tensor:
    """x [S, K], weight [E, N, K] (times scales [E, N, 1]), starts [E + 1] -> [S, N]: each row by its group's weight."""
    exact = weight.double() if scales is None else weight.double() * scales.double()[..., None]
    group_of_row = torch.repeat_interleave(torch.arange(len(weight), device=x.device), starts.diff())
    return torch.einsum("sk,snk->sn", x.double(), exact[group_of_row]).to(x.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R of D dimensions. heads float64 [T, num, D]; cos and sin [T, R/2], of the tokens' positions.

    arXiv 2104.09864. As in Llama, dimension i is paired with i + R/2.
    """
    half = cos.shape[1]
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head. heads float64 [T, num, D] -> the same shape."""
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.double()


def view_layer(pages: Tensor, geometry: KVGeometry, layer: int) -> Tensor:
    """Returns one layer as a view: pages uint8 [num_pages, full_page_bytes] -> [num_pages, 2, Hk, block_tokens, D].

    If values are in keys, there is one side instead of 2.
    """
    first = layer * geometry.layout.num_bytes
    numbers = pages[:, first : first + geometry.layout.scales_start].view(geometry.element_dtype)
    sizes = geometry.num_sides, geometry.num_kv_heads, geometry.block_tokens, geometry.head_dim
    return numbers.view(-1, *sizes)


def view_scales(pages: Tensor, geometry: KVGeometry, layer: int) -> Tensor:
    """One layer's scales in the same pages, as a view -> bfloat16 [num_pages, 2, Hk, block_tokens]."""
    first = layer * geometry.layout.num_bytes + geometry.layout.scales_start
    sizes = geometry.num_sides, geometry.num_kv_heads, geometry.block_tokens
    scales = pages[:, first : first + SCALE_BYTES * math.prod(sizes)].view(torch.bfloat16)
    return scales.view(-1, *sizes)


def round_scale_up(largest: Tensor) -> Tensor:
    """Converts magnitudes, float64, to scales, bfloat16.

    A scale is the smallest normal bfloat16 that is at least magnitude / 448.
    """
    exact = largest / LARGEST_E4M3
    near = exact.to(torch.bfloat16)
    above = torch.nextafter(near, torch.tensor(torch.inf, dtype=torch.bfloat16, device=near.device))
    return torch.where(near.double() < exact, above, near).clamp_min(torch.finfo(torch.bfloat16).tiny)


def write_kv(pages: Tensor, geometry: KVGeometry, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k and v, float64 [T, Hk, D], of T tokens to their slots, int64 [T].

    `KVFormat` describes how values that are not finite are stored.
    """
    sides = torch.stack((k, v)[: geometry.num_sides], dim=1)
    stored = sides if geometry.has_scales else sides.to(geometry.dtype)
    wrong = ~stored.isfinite().all(-1).all(1)
    if geometry.num_sides > 1:
        sides[:, 0][wrong], sides[:, 1][wrong] = torch.nan, 0.0
    else:
        sides[wrong], sides[..., -1][wrong] = 0.0, torch.nan
    page, offset = slots // geometry.block_tokens, slots % geometry.block_tokens
    if geometry.has_scales:
        scales = round_scale_up(sides.abs().amax(-1))
        view_scales(pages, geometry, layer)[page, :, :, offset] = scales
        sides = sides / scales.double()[..., None]
    # torch cannot write float8 through an index, so the bytes are written.
    numbers = sides.to(geometry.element_dtype).view(torch.uint8)
    view_layer(pages, geometry, layer).view(torch.uint8)[page, :, :, offset] = numbers


def rotate_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor | None,
    pages: Tensor,
    geometry: KVGeometry,
    layer: int,
    batch: AttentionBatch,
    norms: QueryKeyNorm | None = None,
) -> Tensor:
    """Returns normed and rotated q [T, Hq, D] as a new tensor; mutates pages."""
    heads = qkv.view(qkv.shape[0], -1, geometry.head_dim)
    q, k, v = (
        heads[:, : geometry.num_heads],
        heads[:, geometry.num_heads :],
        heads[:, -geometry.num_kv_heads :],
    )
    k = k[:, : geometry.num_kv_heads]
    q, k = q.double(), k.double()
    if norms is not None:
        q, k = norm_heads(q, norms.query, norms.eps), norm_heads(k, norms.key, norms.eps)
    if cos_sin is not None:
        cos, sin = cos_sin[batch.positions].chunk(2, dim=-1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    write_kv(pages, geometry, layer, batch.kv_slots, k, v.double())
    return q.to(qkv.dtype)


def read_context(
    pages: Tensor, geometry: KVGeometry, layer: int, block_table: Tensor, begin: int, end: int
) -> tuple[Tensor, Tensor]:
    """Reads K and V of tokens [begin, end) of a sequence -> two float64 tensors [end - begin, Hk, D]."""
    tokens = torch.arange(begin, end, device=pages.device)
    page, offset = block_table[tokens // geometry.block_tokens].long(), tokens % geometry.block_tokens
    numbers = view_layer(pages, geometry, layer).view(torch.uint8)[page, :, :, offset]
    rows = numbers.view(geometry.element_dtype).double()
    if geometry.has_scales:
        rows *= view_scales(pages, geometry, layer)[page, :, :, offset].double()[..., None]
    return rows[:, 0], rows[:, -1]


def attend(
    q: Tensor, pages: Tensor, geometry: KVGeometry, layer: int, batch: AttentionBatch, rule: AttentionRule
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq * D]; query head h reads KV head h // group_heads."""
    out = torch.empty_like(q)
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for b, context in enumerate(contexts):
        before = context - (starts[b + 1] - starts[b])
        first = before + 1 - rule.count_visible(before + 1)
        sides = read_context(pages, geometry, layer, batch.block_tables[b], first, context)
        k_all, v_all = (x.repeat_interleave(geometry.group_heads, dim=1) for x in sides)
        for token in range(starts[b], starts[b + 1]):
            end = before + 1 + token - starts[b]
            seen = slice(end - rule.count_visible(end) - first, end - first)
            k, v = k_all[seen], v_all[seen]
            scores = torch.einsum("hd,thd->ht", q[token].double(), k) * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            if rule.sinks is not None:
                scores = torch.cat((scores, rule.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(v)]
            out[token] = torch.einsum("ht,thd->hd", weights, v).to(q.dtype)
    return out.flatten(1)


def read_rows(
    pages: Tensor, page_ids: list[int], first_segment: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Reads rows [rows, width] of a packed adapter, segment by segment through its pages."""
    row_segments = -(-width * dtype.itemsize // SEGMENT_BYTES)
    result = torch.empty(rows, width, dtype=dtype, device=pages.device)
    for r in range(rows):
        start = (first_segment + r * row_segments) * SEGMENT_BYTES
        segments = []
        for offset in range(start, start + row_segments * SEGMENT_BYTES, SEGMENT_BYTES):
            page, at = divmod(offset, pages.shape[1])
            segments.append(pages[page_ids[page], at : at + SEGMENT_BYTES])
        result[r] = torch.cat(segments).view(dtype)[:width]
    return result


def shrink(x: Tensor, pages: Tensor, tables: AdapterTables, site: LoraSite, tiles: LoraTiles) -> Tensor:
    """x [T, in] -> float64 [T, max_group_rank]. Columns past a tile's rank and rows in no tile are 0."""
    shrunk = torch.zeros(x.shape[0], tiles.max_group_rank, dtype=torch.float64, device=x.device)
    for slot, first, tokens in tiles.tiles.tolist():
        rank, segment = tables.groups[slot, site.group].tolist()
        a = read_rows(pages, tables.page_table[slot].tolist(), segment, rank, x.shape[1], x.dtype)
        shrunk[first : first + tokens, :rank] = x[first : first + tokens].double() @ a.double().T
    return shrunk


def shrink_embedding(
    token_ids: Tensor,
    pages: Tensor,
    tables: AdapterTables,
    site: LoraSite,
    tiles: LoraTiles,
    dtype: torch.dtype,
) -> Tensor:
    """Shrink of one-hot rows: token_ids int64 [T] -> float64 [T, max_group_rank]."""
    return shrink(F.one_hot(token_ids, site.in_width).to(dtype), pages, tables, site, tiles)


def expand(
    out: Tensor,
    shrunk: Tensor,
    pages: Tensor,
    tables: AdapterTables,
    site: LoraSite,
    tiles: LoraTiles,
) -> None:
    """out [T, sum(site.widths)] += weight * scale * shrunk @ B, in place, rounded once."""
    for (slot, first, tokens), weight in zip(tiles.tiles.tolist(), tiles.weights.tolist(), strict=True):
        start = 0
        for module, width in enumerate(site.widths, site.first_module):
            rank, row, segment = tables.modules[slot, module].tolist()
            b = read_rows(pages, tables.page_table[slot].tolist(), segment, rank, width, out.dtype)
            scale = weight * tables.scales[slot, module].item()
            target = out[first : first + tokens, start : start + width]
            delta = shrunk[first : first + tokens, row : row + rank].double() @ b.double() * scale
            target.copy_(target.double() + delta)
            start += width


def apply_affine(out: Tensor, pages: Tensor, tables: AdapterTables, site: LoraSite, tiles: LoraTiles) -> None:
    """out [T, sum(site.widths)] = out * scales + weight * offsets, in place, rounded once."""
    for (slot, first, tokens), weight in zip(tiles.tiles.tolist(), tiles.weights.tolist(), strict=True):
        start = 0
        for module, width in enumerate(site.widths, site.first_module):
            is_affine, segment = tables.affine[slot, module, :2].tolist()
            if is_affine:
                table = tables.page_table[slot].tolist()
                scales, offsets = read_rows(pages, table, segment, 2, width, torch.float32).double()
                target = out[first : first + tokens, start : start + width]
                target.copy_(target.double() * scales + offsets * weight)
            start += width


def token_weights(logits: Tensor, max_logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """float64 [N, V]: exp((l - max_logit) / temperature) in units of 2**-42, not rounded to whole numbers.

    NaN becomes 0.
    """
    below = (logits.double() - max_logits.double()[:, None])[sampling.rows] / sampling.temperature.double()[
        :, None
    ]
    return below.exp().nan_to_num(nan=0.0) * 2.0**42


def token_cutoffs(weights: Tensor, sampling: SamplingTensors) -> list[int]:
    """The smallest weight that each row keeps, found by sorting. weights: [N, V], whole numbers.

    The sums are Python integers, so they cannot overflow.
    """
    cutoffs = []
    columns = sampling.top_k.tolist(), sampling.top_p.tolist(), sampling.min_p.tolist()
    for row, top_k, top_p, min_p in zip(weights.tolist(), *columns, strict=True):
        ordered = sorted((int(weight) for weight in row), reverse=True)
        least = ordered[top_k - 1] if top_k <= len(ordered) else 0
        left = float(sum(weight for weight in ordered if weight >= least))
        nucleus, before = 0, 0
        for weight in ordered:
            # A token is kept while the mass before it is below the row's top_p share, so the first token is always
            # kept.
            if top_p == 1 or float(before) >= top_p * left:
                break
            nucleus, before = weight, before + weight
        cutoffs.append(max(least, nucleus, math.ceil(min_p * 2.0**42)))
    return cutoffs


def gumbel_sample(weights: Tensor, cutoffs: list[int], keys: Tensor, block: int) -> list[int]:
    """Samples one token for each row of `weights`.

    weights: [N, width], whole numbers. width: a multiple of `block`. keys: int64 [N], the seed of each row.
    """
    tokens = []
    for row, cutoff, key in zip(weights.tolist(), cutoffs, keys.tolist(), strict=True):
        kept = [int(weight) if weight >= cutoff else 0 for weight in row]
        sums = [sum(kept[first : first + block]) for first in range(0, len(kept), block)]
        first = block * _sample_index(sums, key, len(kept))
        tokens.append(first + _sample_index(kept[first : first + block], key, first))
    return tokens


def _sample_index(weights: list[int], key: int, first: int) -> int:
    """Samples an index of `weights` by the Gumbel-max trick: the probability of an index is proportional to its weight.

    The score of index i is weights[i] / -log(u), where u is `_uniform(key, first + i)`. The index with the greatest
    score is sampled. Of several equal scores, the first wins.
    """
    scores = [weight / -math.log(_uniform(key, first + i)) for i, weight in enumerate(weights)]
    return scores.index(max(scores))


def _uniform(key: int, number: int) -> float:
    """Returns a float in (0, 1): the output of SplitMix64 (Steele et al., 2014) at index `number`, with seed `key`."""
    state = (key + number * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    state ^= state >> 31
    return ((state >> 12) + 0.5) * 2.0**-52
