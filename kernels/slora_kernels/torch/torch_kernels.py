"""Kernels in plain torch: they need no compiler and run on any device.

Attention cuts the queries of a step into tiles. All tiles go through their contexts together, `COLUMN_TOKENS` tokens at
a time, with an online softmax. Tiles are sorted by context length, longest first, so the unfinished tiles are always
the first ones. LoRA computes one tile after the other.

On a CPU, the bits of a token's attention do not depend on its tile or on the batch: the columns begin at multiples of
`COLUMN_TOKENS` of the sequence, all columns are equally wide, and all products have `_BLOCK_ROWS` rows.
"""

import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.batch import (
    Activation,
    AdapterTables,
    AttentionBatch,
    AttentionRule,
    AttentionStep,
    KVGeometry,
    LoraStep,
    LoraTiles,
    QueryKeyNorm,
    TileLimits,
    TokenRows,
)
from slora_kernels.coded_weight import CodedWeight
from slora_kernels.layout import LARGEST_E4M3, SCALE_BYTES, LoraSite
from slora_kernels.sampling_tensors import SamplingTensors
from slora_kernels.torch.grouped_matmuls import grouped_linear
from slora_kernels.torch.lora_matmuls import (
    HostLoraTile,
    add_delta,
    apply_affine,
    expand_tiles,
    plan_tiles,
    shrink_embedding,
    shrink_tiles,
    write_delta,
)
from slora_kernels.torch.quantized_matmuls import coded_linear, quantized_linear
from slora_kernels.torch.row_blocks import multiply_batches
from slora_kernels.torch.token_rows import token_logits
from slora_kernels.torch.token_sampling import find_argmax, mask_logits, sample_tokens

# Context tokens per iteration: enough to amortise a dozen torch calls, few enough to fit the CPU caches.
COLUMN_TOKENS = 256
# Query tokens per tile of a prefill chunk.
TILE_QUERIES = 64
# Rows (queries times heads of a group) of a product on a CPU. One decoding token fills at least one such block.
_BLOCK_ROWS = 16
# Initial value of a running maximum.
LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class TilePass:
    """n tiles of Q query tokens each, sorted by the length of their walks, longest first.

    A tile's walk is the range of tokens that the tile reads. It begins with the column of the first token that its
    first query sees, and ends with the last token that its last query sees.

    tokens: int64 [n, Q], token index of each query. A tile with fewer than Q queries repeats its last token.
    limits: int64 [n, Q], number of tokens from the start of the tile's walk to the last token that the query sees. With
    a window, the query sees the last `window` of these tokens.
    page_ids: int64 [n, W], page ids of each tile's walk. W is the number of pages in the longest walk, rounded up to
    whole columns. Entries past the end of a walk are any valid ids.
    walks: number of tokens in each tile's walk.
    keep: bool [n, Q], whether a query is real and not a repetition. None: all are real.
    """

    tokens: Tensor
    limits: Tensor
    page_ids: Tensor
    walks: list[int]
    keep: Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tile passes of a batch, by (window, tokens per block). An entry is computed on first use."""

    passes: dict[tuple[int | None, int], list[TilePass]]


@dataclass(frozen=True, slots=True)
class LoraPlan:
    tiles: list[HostLoraTile]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tokens of one sequence in a step.

    row: the sequence's row in the block tables.
    first: index of the chunk's first token in the batch.
    tokens: number of tokens.
    before: number of earlier tokens whose KV is in pages.
    """

    row: int
    first: int
    tokens: int
    before: int


def _count_column_blocks(block_tokens: int) -> int:
    """Number of blocks of KV in a column."""
    return max(1, COLUMN_TOKENS // block_tokens)


def _plan_pass(
    chunks: list[_Chunk], queries: int, block_tables: Tensor, window: int | None, block_tokens: int
) -> TilePass:
    """Cuts chunks into tiles of `queries` query tokens."""
    device, column_blocks = block_tables.device, _count_column_blocks(block_tokens)
    tiles = []
    for chunk in chunks:
        for at in range(0, chunk.tokens, queries):
            size = min(queries, chunk.tokens - at)
            before = chunk.before + at
            block = 0 if window is None else max(0, before + 1 - window) // block_tokens
            block -= block % column_blocks
            walk = before + size - block * block_tokens
            tiles.append((walk, chunk.row, chunk.first + at, size, block))
    tiles.sort(key=lambda tile: (-tile[0], tile[2]))
    walks, rows, firsts, sizes, blocks = torch.tensor(tiles, dtype=torch.int64).T[..., None]
    offsets = torch.arange(queries)[None]
    num_columns = -(-tiles[0][0] // (column_blocks * block_tokens))
    columns = blocks + torch.arange(num_columns * column_blocks)
    columns.clamp_(max=block_tables.shape[1] - 1)
    inside = torch.minimum(offsets, sizes - 1)
    return TilePass(
        tokens=(firsts + inside).to(device),
        limits=(walks - sizes + 1 + inside).to(device),
        page_ids=block_tables[rows.to(device), columns.to(device)].long(),
        walks=[tile[0] for tile in tiles],
        keep=None if all(tile[3] == queries for tile in tiles) else (offsets < sizes).to(device),
        window=window,
    )


def _plan_attention(batch: AttentionBatch, window: int | None, block_tokens: int) -> list[TilePass]:
    """Plans one pass for sequences with a single query (decode) and one for longer chunks (prefill)."""
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    chunks = [_Chunk(b, starts[b], size, contexts[b] - size) for b, size in enumerate(sizes) if size]
    tile_queries = min(TILE_QUERIES, batch.max_query_len)
    work = ((1, [c for c in chunks if c.tokens == 1]), (tile_queries, [c for c in chunks if c.tokens > 1]))
    tables = batch.block_tables
    return [_plan_pass(part, queries, tables, window, block_tokens) for queries, part in work if part]


def _view_scales(shares: Tensor, geometry: KVGeometry) -> Tensor:
    """Views the scales of gathered blocks of one layer: uint8 [n, block_bytes] -> bfloat16 [n, 2, Hk, block_tokens]."""
    sizes = geometry.num_sides, geometry.num_kv_heads, geometry.block_tokens
    scales = shares[:, geometry.layout.scales_start :][:, : SCALE_BYTES * math.prod(sizes)]
    return scales.view(torch.bfloat16).view(-1, *sizes)


def _view_elements(shares: Tensor, geometry: KVGeometry) -> Tensor:
    """Views K and V of gathered blocks of one layer: uint8 [n, block_bytes] -> [n, 2, Hk, block_tokens, D].

    If values are in keys, there is one side instead of 2.
    """
    elements = shares[:, : geometry.layout.scales_start].view(geometry.element_dtype)
    sizes = geometry.num_sides, geometry.num_kv_heads, geometry.block_tokens, geometry.head_dim
    return elements.view(-1, *sizes)


def _quantize_kv(sides: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes float32 [T, 2, Hk, D] -> (float8 of the same shape, bfloat16 scales [T, 2, Hk])."""
    largest = sides.abs().amax(-1)
    # The upper half of a float32 is a bfloat16. Adding 0xFFFF before taking it rounds up.
    codes = (((largest / LARGEST_E4M3).view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)
    scales = codes.view(torch.bfloat16).clamp_min(torch.finfo(torch.bfloat16).tiny)
    return (sides / scales.float()[..., None]).to(torch.float8_e4m3fn), scales


def _replace_wrong(sides: Tensor) -> Tensor:
    """Replaces K by NaN and V by 0 where K or V is not finite. sides: K and V [T, 2, Hk, D].

    If there is one side, only its last element becomes NaN, see `KVGeometry.latent_width`.
    """
    wrong = ~sides.isfinite().all(-1, keepdim=True).all(1, keepdim=True)
    instead = sides.new_tensor((torch.nan, 0.0))[:, None, None]
    if sides.shape[1] == 1:
        instead = F.pad(sides.new_zeros(sides.shape[3] - 1), (0, 1), value=torch.nan)
    return torch.where(wrong, instead, sides)


def _gather_column(shares: Tensor, block_ids: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
    """Gathers K and V of the blocks `block_ids` [n, C] -> two tensors float32 [Hk, n, C * block_tokens, D].

    shares: uint8 [num_blocks, block_bytes], one layer of one page in each row. `shares` has to be contiguous,
    because index_select over a strided view would first copy the whole pool.
    """
    n, columns = block_ids.shape
    gathered = shares.index_select(0, block_ids.flatten())
    sides = _view_elements(gathered, geometry).float()
    if geometry.has_scales:
        sides.mul_(_view_scales(gathered, geometry).float()[..., None])
    sides = sides.view(n, columns, *sides.shape[1:]).permute(2, 3, 0, 1, 4, 5)
    sides = sides.reshape(len(sides), sides.shape[1], n, columns * geometry.block_tokens, geometry.head_dim)
    return sides[0], sides[-1]


class _OnlineSoftmax:
    """The online softmax of n tiles with M rows per KV head: maximum score, sum of weights and weighted sum of V.

    The tiles are sorted by length, longest first. Each `add` updates only the first tiles, which still have tokens
    to attend to.
    """

    def __init__(self, rows: tuple[int, int, int], head_dim: int, device: torch.device) -> None:
        # The initial maximum is finite, so that a row without visible tokens in a column adds 0 and not NaN.
        self.peak = torch.full((*rows, 1), LOWEST, device=device)
        self.total = torch.zeros((*rows, 1), device=device)
        self.values = torch.zeros((*rows, head_dim), device=device)

    def add(self, scores: Tensor, v: Tensor) -> None:
        """Adds N tokens to each of the first `active` tiles.

        scores: [Hk, active, M, N], -inf where a token is not visible. v: [Hk, active, N, D].
        """
        active = scores.shape[1]
        peak, total, values = (x[:, :active] for x in (self.peak, self.total, self.values))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        decay = torch.exp(peak - new_peak)
        weights = torch.exp(scores.sub_(new_peak))
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        values.mul_(decay).add_(_multiply(weights, v, transposes=False))
        peak.copy_(new_peak)


def _attend_pass(
    work: TilePass, q: Tensor, shares: Tensor, geometry: KVGeometry, layer: int, rule: AttentionRule
) -> Tensor:
    """Attention of one pass: queries q [n, Q, Hk, G, D] -> float32 of the same shape.

    `shares`: see `_gather_column`.
    """
    n, queries, kv_heads, group, head_dim = q.shape
    block_tokens, window = geometry.block_tokens, work.window
    num_rows = queries * group
    rows = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, n, num_rows, head_dim).float() * rule.scale
    limits = work.limits.repeat_interleave(group, dim=1)[..., None]
    state = _OnlineSoftmax((kv_heads, n, num_rows), head_dim, q.device)
    block_ids = work.page_ids * geometry.num_layers + layer
    width = _count_column_blocks(block_tokens)
    column = width * block_tokens
    for start in range(0, work.walks[0], column):
        active = sum(walk > start for walk in work.walks)
        first = start // block_tokens
        places = start + torch.arange(column, device=q.device)
        k, v = _gather_column(shares, block_ids[:active, first : first + width], geometry)
        hidden = places >= limits[:active]
        # Pages may hold old data, even NaN, past the context or outside the window. V is set to 0 there, because a
        # weight of 0 times NaN is NaN. K may be the same tensor, and its scores there are masked.
        whole = sum(walk >= start + column for walk in work.walks[:active])
        v[:, whole:].masked_fill_((places >= work.limits[whole:active, -1:])[..., None], 0.0)
        if window is not None:
            hidden |= places < limits[:active] - window
            v.masked_fill_((places < work.limits[:active, :1] - window)[..., None], 0.0)
        scores = _multiply(rows[:, :active], k, transposes=True)
        if rule.softcap is not None:
            scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        state.add(scores.masked_fill_(hidden, -torch.inf), v)
    if rule.sinks is not None:
        sinks = rule.sinks.view(kv_heads, 1, 1, group).expand(-1, -1, queries, -1).flatten(2)[..., None]
        state.total.add_(torch.exp(sinks - state.peak))
    out = state.values / state.total
    return out.view(kv_heads, n, queries, group, head_dim).permute(1, 2, 0, 3, 4)


def _multiply(x: Tensor, y: Tensor, *, transposes: bool) -> Tensor:
    """x [Hk, n, M, K] times y [Hk, n, K, N], or y [Hk, n, N, K] transposed -> [Hk, n, M, N]. All are float32."""
    if x.device.type != "cpu":
        return torch.matmul(x, y.mT if transposes else y)
    heads, tiles, num_rows, _ = x.shape
    padded = F.pad(x, (0, 0, 0, -num_rows % _BLOCK_ROWS)).flatten(0, 1)
    other = y.flatten(0, 1)
    products = [
        multiply_batches(block, other, transposes=transposes)
        for block in torch.split(padded, _BLOCK_ROWS, dim=1)
    ]
    return torch.cat(products, dim=1)[:, :num_rows].reshape(heads, tiles, num_rows, -1)


def apply_activation(gate: Tensor, activation: Activation) -> Tensor:
    """Applies an activation to float32 elements. On a CPU, torch's own silu and gelu round by an element's place."""
    if activation == "silu":
        return gate / (1 + torch.exp(-gate))
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
        return 0.5 * gate * (1 + torch.tanh(inner))
    return 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5)))


def _norm_heads(heads: Tensor, num_heads: int, norms: QueryKeyNorm) -> Tensor:
    """RMS norm of the heads. heads float32 [T, Hq + Hk, D], query heads first."""
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + norms.eps)
    query = norms.query.float().expand(num_heads, -1)
    key = norms.key.float().expand(heads.shape[1] - num_heads, -1)
    return heads * scale * torch.cat((query, key))


def _rotate_heads(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotates the first R dimensions of heads float32 [T, num, D] by angles [T, R], cosines then sines."""
    half = angles.shape[1] // 2
    cos, sin = angles[:, None].chunk(2, dim=-1)
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class TorchKernels:
    """The torch implementation of `Kernels`. The shrink output is [T, max_group_rank], rounded to the model dtype."""

    name = "torch"
    # A tile is one matmul, so longer tiles are more efficient.
    tile_limits = TileLimits(1 << 30)

    @staticmethod
    def on(device: torch.device) -> "TorchKernels":
        """Returns kernels, which are the same for every device."""
        return TorchKernels()

    def warm_up(self, geometry: KVGeometry) -> float:
        """Returns 0: there is nothing to compile."""
        return 0.0

    def collecting_jobs(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        return AttentionStep(batch, AttentionPlan({}))

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        return LoraStep(tiles, tables, LoraPlan(plan_tiles(tiles, tables)))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        residual.add_(add_delta(x, delta))
        return self.rms_norm(residual, weight, eps)

    def act_mul(self, gate_up: Tensor, activation: Activation, delta: Tensor | None = None) -> Tensor:
        gate, up = add_delta(gate_up, delta).chunk(2, dim=-1)
        return (apply_activation(gate.float(), activation) * up.float()).to(gate_up.dtype)

    def quantized_linear(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_linear(x, values, scales, bias)

    def coded_linear(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        return coded_linear(x, weight, bias)

    def grouped_linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor) -> Tensor:
        return grouped_linear(x, weight, scales, starts)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor | None,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        norms: QueryKeyNorm | None = None,
        delta: Tensor | None = None,
    ) -> Tensor:
        qkv = add_delta(qkv, delta)
        heads = qkv.view(qkv.shape[0], qkv.shape[1] // geometry.head_dim, geometry.head_dim)
        turning = geometry.num_heads + geometry.num_kv_heads
        turned = heads[:, :turning]
        if norms is not None:
            turned = _norm_heads(turned.float(), geometry.num_heads, norms)
        if cos_sin is not None:
            turned = _rotate_heads(turned.float(), cos_sin[step.batch.positions])
        keys, values = turned[:, geometry.num_heads :], heads[:, turning:].to(turned.dtype)
        sides = torch.stack((keys, values)[: geometry.num_sides], dim=1)
        page = step.batch.kv_slots // geometry.block_tokens
        offset = step.batch.kv_slots % geometry.block_tokens
        first = layer * geometry.layout.num_bytes
        shares = pages[:, first : first + geometry.layout.num_bytes]
        if geometry.has_scales:
            elements, scales = _quantize_kv(_replace_wrong(sides.float()))
            _view_scales(shares, geometry).permute(0, 3, 1, 2).index_put_((page, offset), scales)
            # The bytes are written, because torch cannot index_put float8.
            into = _view_elements(shares, geometry).view(torch.uint8)
            into.permute(0, 3, 1, 2, 4).index_put_((page, offset), elements.view(torch.uint8))
        else:
            into = _view_elements(shares, geometry).permute(0, 3, 1, 2, 4)
            into.index_put_((page, offset), _replace_wrong(sides.to(geometry.dtype)))
        return turned[:, : geometry.num_heads].to(qkv.dtype)

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> Tensor:
        plan = step.plan
        assert isinstance(plan, AttentionPlan)
        key = (rule.window, geometry.block_tokens)
        if key not in plan.passes:
            plan.passes[key] = _plan_attention(step.batch, *key)
        out = torch.empty(q.shape[0], geometry.num_heads * geometry.head_dim, dtype=q.dtype, device=q.device)
        shares = pages.view(-1, geometry.layout.num_bytes)
        packed = q.reshape(-1, geometry.num_kv_heads, geometry.group_heads, geometry.head_dim)
        for work in plan.passes[key]:
            result = _attend_pass(work, packed[work.tokens], shares, geometry, layer, rule)
            flat = result.to(q.dtype).flatten(2)
            if work.keep is None:
                out[work.tokens] = flat
            else:
                out[work.tokens[work.keep]] = flat[work.keep]
        return out

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        mask_logits(logits, rows, masks)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return find_argmax(logits)

    def sample(self, logits: Tensor, max_logits: Tensor, sampling: SamplingTensors) -> Tensor:
        return sample_tokens(logits, max_logits, sampling)

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Tensor:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        # Not empty: expand reads parts of these rows, and what is beside them must be numbers (see `even_terms`).
        shrunk = torch.zeros(x.shape[0], step.tiles.max_group_rank, dtype=x.dtype, device=x.device)
        shrink_tiles(x, shrunk, pages, plan.tiles, site)
        return shrunk

    def shrink_embedding(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Tensor:
        return shrink_embedding(token_ids, pages, site, step, dtype)

    def token_logits(self, hidden: Tensor, rows: TokenRows) -> Tensor:
        return token_logits(hidden, rows)

    def write_delta(
        self, delta: Tensor, shrunk: Tensor, pages: Tensor, site: LoraSite, step: LoraStep
    ) -> None:
        write_delta(self, delta, shrunk, pages, site, step)

    def expand(self, out: Tensor, shrunk: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        expand_tiles(out, shrunk, pages, plan.tiles, site)

    def apply_affine(self, out: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        apply_affine(out, pages, plan.tiles, site)
