"""Kernels in plain torch: no compiler, any device. Correct everywhere, and batched rather than looped.

Attention cuts the queries of a step into tiles and walks all contexts together, a column of pages at a time,
with an online softmax: tiles are sorted by what they see, so those that still have context are a prefix, and
only pages that somebody reads are gathered. LoRA loops over tiles, one per distinct adapter in the batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.batch import AdapterTables, AttentionBatch, AttentionStep, KVGeometry, LoraStep, LoraTiles
from slora_kernels.layout import LoraSite
from slora_kernels.lora_matmuls import TileRanks, expand_tiles, plan_tiles, shrink_tiles
from slora_kernels.quantized_matmuls import quantized_linear

# Context tokens per step of the walk: enough to pay for a dozen torch calls, small enough for the caches.
COLUMN_TOKENS = 256
# Query tokens per tile of a chunk being prefilled.
TILE_QUERIES = 64


@dataclass(frozen=True, slots=True)
class TilePass:
    """Tiles of one size, longest sight first: n tiles of Q query tokens.

    tokens: int64 [n, Q], token of each query; a tile's missing queries repeat its last token.
    limits: int64 [n, Q], KV tokens that each query sees.
    rows: int64 [n], row of the block tables. sights: KV tokens that each tile's last query sees.
    keep: bool [n, Q], which queries are real; None when all are.
    """

    tokens: Tensor
    limits: Tensor
    rows: Tensor
    sights: list[int]
    keep: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    passes: list[TilePass]


@dataclass(frozen=True, slots=True)
class LoraPlan:
    tiles: list[TileRanks]


def _plan_pass(sequences: list[tuple[int, int, int, int]], queries: int, device: torch.device) -> TilePass:
    """Cuts sequences (row, first token, tokens, context) into tiles of `queries`."""
    tiles = []
    for row, first, tokens, context in sequences:
        before = context - tokens
        for at in range(0, tokens, queries):
            size = min(queries, tokens - at)
            tiles.append((before + at + size, row, first + at, size))
    tiles.sort(key=lambda tile: (-tile[0], tile[2]))
    table = torch.tensor(tiles, dtype=torch.int64)
    sights, rows, firsts, sizes = table.T[..., None]
    offsets = torch.arange(queries)[None]
    inside = torch.minimum(offsets, sizes - 1)
    return TilePass(
        tokens=(firsts + inside).to(device),
        limits=(sights - sizes + 1 + inside).to(device),
        rows=rows[:, 0].to(device),
        sights=[tile[0] for tile in tiles],
        keep=None if all(tile[3] == queries for tile in tiles) else (offsets < sizes).to(device),
    )


def _plan_attention(batch: AttentionBatch) -> list[TilePass]:
    """One pass for sequences with a single query (decode), one for longer chunks (prefill)."""
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    sequences = [
        (b, starts[b], starts[b + 1] - starts[b], context)
        for b, context in enumerate(contexts)
        if starts[b + 1] > starts[b]
    ]
    device = batch.query_starts.device
    decode = [s for s in sequences if s[2] == 1]
    prefill = [s for s in sequences if s[2] > 1]
    passes = []
    if decode:
        passes.append(_plan_pass(decode, 1, device))
    if prefill:
        passes.append(_plan_pass(prefill, min(TILE_QUERIES, batch.max_query), device))
    return passes


def _view_layer(pages: Tensor, geometry: KVGeometry, layer: int) -> Tensor:
    """K and V of one layer, [2, Hk, num_pages, block_tokens, D], a view."""
    size = geometry.block_elements
    blocks = pages.view(geometry.dtype)[:, layer * size : (layer + 1) * size]
    sides = blocks.view(-1, 2, geometry.num_kv_heads, geometry.block_tokens, geometry.head_dim)
    return sides.permute(1, 2, 0, 3, 4)


def _gather_column(blocks: Tensor, block_ids: Tensor, geometry: KVGeometry) -> Tensor:
    """blocks [num_blocks, block_elements], block_ids [n, C] -> K and V, float32 [2, Hk, n, C * block_tokens, D].

    `blocks` is contiguous on purpose: index_select over a strided view would first copy the whole pool.
    """
    n, columns = block_ids.shape
    gathered = blocks.index_select(0, block_ids.flatten())
    sides = gathered.view(n, columns, 2, geometry.num_kv_heads, geometry.block_tokens, geometry.head_dim)
    return (
        sides.permute(2, 3, 0, 1, 4, 5)
        .float()
        .reshape(2, geometry.num_kv_heads, n, columns * geometry.block_tokens, geometry.head_dim)
    )


class _OnlineSoftmax:
    """Running maximum, sum and weighted values of [Hk, n, M] rows; a prefix of the tiles advances at a
    time."""

    def __init__(self, rows: tuple[int, int, int], head_dim: int, device: torch.device) -> None:
        self.peak = torch.full((*rows, 1), -torch.inf, device=device)
        self.total = torch.zeros((*rows, 1), device=device)
        self.values = torch.zeros((*rows, head_dim), device=device)

    def add(self, scores: Tensor, v: Tensor) -> None:
        """scores [Hk, active, M, N] with -inf where unseen, v [Hk, active, N, D]."""
        active = scores.shape[1]
        peak, total, values = (x[:, :active] for x in (self.peak, self.total, self.values))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        decay = torch.exp(peak - new_peak)
        weights = torch.exp(scores.sub_(new_peak))
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        values.mul_(decay).add_(torch.matmul(weights, v))
        peak.copy_(new_peak)


def _attend_pass(
    work: TilePass, q: Tensor, blocks: Tensor, block_tables: Tensor, geometry: KVGeometry, scale: float
) -> Tensor:
    """q [n, Q, Hk, G, D] of the tiles -> float32 [n, Q, Hk, G, D]. blocks and block_tables as in `_gather_column`."""
    n, queries, kv_heads, group, head_dim = q.shape
    block_tokens = geometry.block_tokens
    rows = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, n, queries * group, head_dim).float() * scale
    limits = work.limits.repeat_interleave(group, dim=1)
    state = _OnlineSoftmax((kv_heads, n, queries * group), head_dim, q.device)
    column = max(1, COLUMN_TOKENS // block_tokens) * block_tokens
    for start in range(0, work.sights[0], column):
        active = sum(sight > start for sight in work.sights)
        width = -(-min(column, work.sights[0] - start) // block_tokens)
        first = start // block_tokens
        block_ids = block_tables[work.rows[:active], first : first + width]
        seen = start + torch.arange(width * block_tokens, device=q.device)
        k, v = _gather_column(blocks, block_ids, geometry)
        hidden = seen >= limits[:active, :, None]
        scores = torch.matmul(rows[:, :active], k.mT).masked_fill_(hidden, -torch.inf)
        # A weight of 0 does not silence a NaN, and what lies past a context is anybody's old page.
        whole = sum(sight >= start + width * block_tokens for sight in work.sights[:active])
        v[:, whole:].masked_fill_((seen >= limits[whole:active, -1:])[..., None], 0.0)
        state.add(scores, v)
    out = state.values / state.total
    return out.view(kv_heads, n, queries, group, head_dim).permute(1, 2, 0, 3, 4)


class TorchKernels:
    """See `Kernels`. The bridge is [T, max_group_rank] in the model dtype, as matmuls round to."""

    name = "torch"
    # A tile is a matmul: the longer the better.
    tile_tokens = 1 << 30

    def warm_up(self, geometry: KVGeometry) -> float:
        """Nothing to compile."""
        return 0.0

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        return AttentionStep(batch, AttentionPlan(_plan_attention(batch)))

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        return LoraStep(tiles, tables, LoraPlan(plan_tiles(tiles, tables)))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)

    def quantized_linear(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_linear(x, values, scales, bias)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
    ) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, geometry.head_dim)
        turning = geometry.num_heads + geometry.num_kv_heads
        cos, sin = cos_sin[step.batch.positions][:, None].chunk(2, dim=-1)
        a, b = heads[:, :turning].float().chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype)
        k, v = turned[:, geometry.num_heads :], heads[:, turning:]
        page = step.batch.kv_slots // geometry.block_tokens
        offset = step.batch.kv_slots % geometry.block_tokens
        sides = _view_layer(pages, geometry, layer).permute(0, 2, 3, 1, 4)
        sides[0].index_put_((page, offset), k)
        sides[1].index_put_((page, offset), v)
        return turned[:, : geometry.num_heads]

    def attend(
        self, q: Tensor, pages: Tensor, geometry: KVGeometry, layer: int, step: AttentionStep, scale: float
    ) -> Tensor:
        plan = step.plan
        assert isinstance(plan, AttentionPlan)
        out = torch.empty(q.shape[0], geometry.num_heads * geometry.head_dim, dtype=q.dtype, device=q.device)
        blocks = pages.view(geometry.dtype).view(-1, geometry.block_elements)
        block_tables = step.batch.block_tables.long() * geometry.num_layers + layer
        packed = q.reshape(-1, geometry.num_kv_heads, geometry.group_heads, geometry.head_dim)
        for work in plan.passes:
            result = _attend_pass(work, packed[work.tokens], blocks, block_tables, geometry, scale)
            flat = result.to(q.dtype).flatten(2)
            if work.keep is None:
                out[work.tokens] = flat
            else:
                out[work.tokens[work.keep]] = flat[work.keep]
        return out

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Tensor:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        bridge = torch.empty(x.shape[0], step.tiles.max_group_rank, dtype=x.dtype, device=x.device)
        shrink_tiles(x, bridge, pages, plan.tiles, site)
        return bridge

    def expand(self, out: Tensor, bridge: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        expand_tiles(out, bridge, pages, plan.tiles, site)
