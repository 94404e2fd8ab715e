"""The fast CPU path: kernels that numba compiles at run time, so no compiler is needed at install or at run time.

Tiles of few tokens and attention run in our own workers on torch's threads; a long tile, a prefill's, is a matmul
over rows copied out of the pages, which torch does better.
"""

import struct
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numba import types
from torch import Tensor

from slora_kernels import numba_attention, numba_elementwise, numba_lora
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
)
from slora_kernels.layout import SEGMENT_BYTES, LoraSite, TileLimits
from slora_kernels.lora_gather import gather_columns
from slora_kernels.lora_matmuls import TileRanks, expand_tiles, plan_tiles, shrink_tiles
from slora_kernels.numba_attention import TILE_ROWS
from slora_kernels.numba_language import compile_worker
from slora_kernels.quantized_matmuls import quantized_linear
from slora_kernels.thread_team import ThreadTeam

# A tile of so many tokens goes through torch's matmuls. Our own loops are 2 to 5 times faster at 8 tokens (no
# copy of the weights), and level at 64 (rank 8 to 64, bf16, one Zen 5 thread).
MATMUL_TOKENS = 64
# Reading fewer numbers than this takes less time than waking a second thread (about 10 us).
SERIAL_NUMBERS = 65536
# Items of a LoRA job are made smaller until there are this many for each thread.
ITEMS_PER_THREAD = 4
SHRINK_ROWS = (16, 4)
EXPAND_COLUMNS = (1024, 256)

_CARRIERS = {torch.float32: types.float32, torch.bfloat16: types.uint16, torch.float16: types.int16}
_WORKERS = (
    numba_elementwise.rms_norm_worker,
    numba_elementwise.act_mul_worker,
    numba_elementwise.rotate_and_write_kv_worker,
    numba_attention.attend_worker,
    numba_lora.shrink_worker,
    numba_lora.expand_worker,
)
# In place of a tensor that is not there.
_NOTHING = torch.empty(0)
Worker = Callable[[Any], None]
Field = Tensor | int | float


@cache
def _compile(worker: Worker, dtype: torch.dtype) -> Any:
    return compile_worker(worker, _CARRIERS[dtype])


def _pack(field: Field) -> tuple[int, int, int]:
    """The three words of a field; see `numba_language`. Numbers first: asking whether they are tensors is slow."""
    if isinstance(field, int):
        return field, 0, 0
    if isinstance(field, float):
        return struct.unpack("q", struct.pack("d", field))[0], 0, 0
    if field.dim() == 1:
        return field.data_ptr(), 1, field.shape[0]
    assert field.stride(-1) == 1, f"rows of stride {field.stride(-1)}"
    return field.data_ptr(), field.shape[0], field.stride(0)


@cache
def _cut_columns(widths: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor]:
    """Blocks of expand, int32 [n, 4]: member of the group, first column in out, in the member, and columns.

    Beside them the widths, int32 [1, members].
    """
    blocks, start = [], 0
    for member, width in enumerate(widths):
        blocks += [(member, start + c, c, min(columns, width - c)) for c in range(0, width, columns)]
        start += width
    return torch.tensor(blocks, dtype=torch.int32), torch.tensor([widths], dtype=torch.int32)


def _cut_queries(batch: AttentionBatch, tile_queries: int) -> Tensor:
    """Tiles of attention, int32 [n, 4]: sequence, first token, tokens, KV tokens before; the longest first."""
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    tiles = []
    for b, context in enumerate(contexts):
        tokens = starts[b + 1] - starts[b]
        for at in range(0, tokens, tile_queries):
            tiles.append((b, starts[b] + at, min(tile_queries, tokens - at), context - tokens + at))
    tiles.sort(key=lambda tile: -tile[2] * (tile[3] + tile[2]))
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4)


def _share_heads(num_tiles: int, num_heads: int, group: int, max_query: int) -> int:
    """KV heads of one item. Where all decode, as many as leave work for all threads: their keys lie side by side."""
    if max_query > 1:
        return 1
    fitting = [
        heads for heads in range(1, num_heads + 1) if num_heads % heads == 0 and heads * group <= TILE_ROWS
    ]
    enough = ITEMS_PER_THREAD * torch.get_num_threads()
    return max((heads for heads in fitting if num_tiles * num_heads // heads >= enough), default=1)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """queries: int32 [n, 4], see `_cut_queries`, by heads per KV head, cut when first asked for."""

    queries: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """short: the tiles of few tokens; long: those that are matmuls."""

    short: LoraTiles | None
    long: list[TileRanks]


def _split_tiles(tiles: LoraTiles, tables: AdapterTables) -> LoraPlan:
    is_long = tiles.tiles[:, 2] >= MATMUL_TOKENS
    if not is_long.any():
        return LoraPlan(tiles, [])
    long = LoraTiles(tiles.tiles[is_long], tiles.weights[is_long], tiles.max_group_rank)
    short = LoraTiles(tiles.tiles[~is_long], tiles.weights[~is_long], tiles.max_group_rank)
    return LoraPlan(short if len(short.weights) else None, plan_tiles(long, tables))


class NumbaKernels:
    """See `Kernels`. The bridge is float32 [T, max_group_rank]. Tensors are a CPU's, with contiguous rows.

    One caller at a time: scratch memory is shared by all calls. A token's LoRA result is the same to the bit alone
    and in a batch as long as its sequence's chunk is as long, or short of MATMUL_TOKENS; attention's always is.
    """

    name = "numba"
    # Of one sequence, the longer the better: from MATMUL_TOKENS on it is a matmul. Those that decode never are.
    tile_limits = TileLimits(alone=1 << 30, shared=MATMUL_TOKENS // 2)

    def __init__(self, team: ThreadTeam | None = None) -> None:
        self._team = team or ThreadTeam()
        self._scratch = torch.empty(0)

    def warm_up(self, geometry: KVGeometry) -> float:
        """Compiles, or loads from numba's cache, all workers for the geometry's dtype; returns the seconds."""
        start = time.perf_counter()
        for worker in _WORKERS:
            _compile(worker, geometry.dtype)
        return time.perf_counter() - start

    def _run(
        self, worker: Worker, dtype: torch.dtype, items: int, fields: tuple[Field, ...], *, numbers: int
    ) -> None:
        """Runs a worker over its items; `numbers` is about how many numbers it reads, all together."""
        if items == 0:
            return
        job = array("q", (0, 0, items))
        for field in fields:
            job.extend(_pack(field))
        threads = 1 if numbers < SERIAL_NUMBERS else min(torch.get_num_threads(), items)
        self._team.run(_compile(worker, dtype).address, job.buffer_info()[0], threads)

    def _reserve(self, numbers: int) -> Tensor:
        """Scratch of `numbers` float32 for each thread, [threads, numbers or more]."""
        threads = torch.get_num_threads()
        if self._scratch.numel() < threads * numbers:
            self._scratch = torch.empty(threads * numbers)
        return self._scratch[: threads * numbers].view(threads, numbers)

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        return AttentionStep(batch, AttentionPlan({}))

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        return LoraStep(tiles, tables, _split_tiles(tiles, tables))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm((x, x), weight, eps, adds=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm((x, residual), weight, eps, adds=True)

    def _norm(self, rows: tuple[Tensor, Tensor], weight: Tensor, eps: float, *, adds: bool) -> Tensor:
        x = rows[0]
        out = torch.empty(x.shape, dtype=x.dtype)
        is_wide = weight.dtype == torch.float32
        fields = (*rows, weight, out, eps, int(adds), int(is_wide))
        self._run(numba_elementwise.rms_norm_worker, x.dtype, x.shape[0], fields, numbers=x.numel())
        return out

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        fields = (gate_up, out, numba_elementwise.ACTIVATIONS.index(activation))
        worker, tokens = numba_elementwise.act_mul_worker, gate_up.shape[0]
        self._run(worker, gate_up.dtype, tokens, fields, numbers=gate_up.numel())
        return out

    def quantized_linear(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_linear(x, values, scales, bias)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor | None,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        norms: QueryKeyNorm | None = None,
    ) -> Tensor:
        normed = () if norms is None else (norms.query.float(), norms.key.float(), norms.eps)
        fields = (
            qkv,
            _NOTHING if cos_sin is None else cos_sin,
            pages.view(geometry.dtype),
            step.batch.positions,
            step.batch.kv_slots,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.block_tokens,
            layer * geometry.block_elements,
            int(norms is not None),
            *normed,
        )
        worker = numba_elementwise.rotate_and_write_kv_worker
        self._run(worker, geometry.dtype, qkv.shape[0], fields, numbers=qkv.numel())
        return qkv.view(qkv.shape[0], -1, geometry.head_dim)[:, : geometry.num_heads]

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
        group = geometry.group_heads
        if group not in plan.queries:
            plan.queries[group] = _cut_queries(step.batch, max(1, TILE_ROWS // group))
        tiles = plan.queries[group]
        item_heads = _share_heads(len(tiles), geometry.num_kv_heads, group, step.batch.max_query)
        out = torch.empty(q.shape[0], geometry.num_heads * geometry.head_dim, dtype=q.dtype)
        assert q.stride(1) == geometry.head_dim and q.stride(2) == 1
        fields = (
            q,
            pages.view(geometry.dtype),
            out,
            tiles,
            step.batch.block_tables,
            self._reserve(numba_attention.count_scratch(geometry.head_dim)),
            geometry.num_kv_heads,
            group,
            geometry.head_dim,
            geometry.block_tokens,
            layer * geometry.block_elements,
            rule.scale,
            numba_attention.NO_WINDOW if rule.window is None else rule.window,
            rule.softcap or 0.0,
            item_heads,
        )
        items = tiles.shape[0] * geometry.num_kv_heads // item_heads
        numbers = q.numel() * rule.count_visible(step.batch.max_context)
        self._run(numba_attention.attend_worker, geometry.dtype, items, fields, numbers=numbers)
        return out

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Tensor:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        bridge = torch.empty(x.shape[0], step.tiles.max_group_rank)
        if plan.short is not None:
            self._shrink_short(x, bridge, pages, step.tables, site, plan.short)
        shrink_tiles(x, bridge, pages, plan.long, site)
        return bridge

    def _shrink_short(
        self,
        x: Tensor,
        bridge: Tensor,
        pages: Tensor,
        tables: AdapterTables,
        site: LoraSite,
        tiles: LoraTiles,
    ) -> None:
        num_tiles, rank = tiles.tiles.shape[0], tiles.max_group_rank
        coarse, fine = SHRINK_ROWS
        enough = num_tiles * -(-rank // coarse) >= ITEMS_PER_THREAD * torch.get_num_threads()
        rows = coarse if enough else fine
        blocks = -(-rank // rows)
        groups = tables.groups.flatten(1)[:, site.group * 2 :]
        fields = (
            x,
            pages.view(x.dtype),
            bridge,
            tiles.tiles,
            tables.page_table,
            groups,
            x.shape[1],
            SEGMENT_BYTES // x.element_size(),
            blocks,
            rows,
        )
        numbers = num_tiles * rank * x.shape[1]
        self._run(numba_lora.shrink_worker, x.dtype, num_tiles * blocks, fields, numbers=numbers)

    def look_up(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Tensor:
        return gather_columns(token_ids, pages, site, step, dtype).float()

    def expand(self, out: Tensor, bridge: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        if plan.short is not None:
            self._expand_short(out, bridge, pages, step.tables, site, plan.short)
        expand_tiles(out, bridge, pages, plan.long, site)

    def _expand_short(
        self,
        out: Tensor,
        bridge: Tensor,
        pages: Tensor,
        tables: AdapterTables,
        site: LoraSite,
        tiles: LoraTiles,
    ) -> None:
        num_tiles, widths = tiles.tiles.shape[0], site.widths
        coarse, fine = EXPAND_COLUMNS
        enough = num_tiles * -(-max(widths) // coarse) >= ITEMS_PER_THREAD * torch.get_num_threads()
        columns = coarse if enough else fine
        blocks, width_row = _cut_columns(widths, columns)
        fields = (
            out,
            pages.view(out.dtype),
            bridge,
            tiles.tiles,
            tiles.weights,
            tables.page_table,
            tables.modules.flatten(1)[:, site.first_module * 3 :],
            tables.scales[:, site.first_module :],
            blocks,
            width_row,
            self._reserve(MATMUL_TOKENS * columns),
            SEGMENT_BYTES // out.element_size(),
        )
        items = num_tiles * blocks.shape[0]
        numbers = num_tiles * tiles.max_group_rank * max(widths)
        self._run(numba_lora.expand_worker, out.dtype, items, fields, numbers=numbers)
