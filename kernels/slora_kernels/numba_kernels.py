"""The fast CPU path: kernels that numba compiles at run time, so no compiler is needed at install or at run time.

Our own workers run on torch's threads. Of a decode step of 40 ms, preparing their calls anew each time was 2: what all
calls of a step share is worked out once.
"""

import struct
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numba import types
from torch import Tensor

from slora_kernels import numba_attention, numba_elementwise, numba_likeliest, numba_lora
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
from slora_kernels.layout import SEGMENT_BYTES, LoraSite
from slora_kernels.lora_gather import gather_columns
from slora_kernels.numba_attention import TILE_ROWS
from slora_kernels.numba_language import compile_worker
from slora_kernels.quantized_matmuls import quantized_linear
from slora_kernels.thread_team import ThreadTeam

# The most tokens of a LoRA tile: what they read and write stays in a core's own cache.
TILE_TOKENS = 64
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
    numba_likeliest.likeliest_worker,
    numba_lora.shrink_worker,
    numba_lora.expand_worker,
)
# In place of a tensor that is not there.
_NOTHING = torch.empty(0)
Worker = Callable[[Any], None]
# A field as a job holds it; see `numba_language`.
Words = tuple[int, int, int]
Field = Words | Tensor | int | float


@cache
def _compile(worker: Worker, dtype: torch.dtype) -> Any:
    return compile_worker(worker, _CARRIERS[dtype])


def _pack(field: Field) -> Words:
    """Numbers first: asking whether they are tensors is slow."""
    if isinstance(field, tuple):
        return field
    if isinstance(field, int):
        return field, 0, 0
    if isinstance(field, float):
        return struct.unpack("q", struct.pack("d", field))[0], 0, 0
    if field.dim() == 1:
        return field.data_ptr(), 1, field.shape[0]
    assert field.stride(-1) == 1, f"rows of stride {field.stride(-1)}"
    return field.data_ptr(), field.shape[0], field.stride(0)


def _bridge_dtype(dtype: torch.dtype) -> torch.dtype:
    """As `numba_language.read_bridge_matrix` has it."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _as_numbers(rows: Tensor, element_bytes: int) -> Words:
    """Rows of something else, the pool's pages say, as the model's numbers."""
    return rows.data_ptr(), rows.shape[0], rows.stride(0) * rows.element_size() // element_bytes


@dataclass(frozen=True, slots=True)
class ColumnBlocks:
    """Blocks of expand, int32 [n, 4]: member of the group, first column in out, in the member, and columns.

    widths: int32 [1, members].
    """

    table: Tensor
    widths: Tensor
    words: tuple[Words, Words]


@cache
def _cut_columns(widths: tuple[int, ...], columns: int) -> ColumnBlocks:
    blocks, start = [], 0
    for member, width in enumerate(widths):
        blocks += [(member, start + c, c, min(columns, width - c)) for c in range(0, width, columns)]
        start += width
    table, row = torch.tensor(blocks, dtype=torch.int32), torch.tensor([widths], dtype=torch.int32)
    return ColumnBlocks(table, row, (_pack(table), _pack(row)))


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
class QueryCut:
    """tiles: int32 [n, 4], see `_cut_queries`. item_heads: KV heads of one item."""

    tiles: Tensor
    words: Words
    item_heads: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Fields that all layers share, as words. cuts: by heads per KV head and KV heads, made when first asked for."""

    positions: Words
    kv_slots: Words
    block_tables: Words
    cuts: dict[tuple[int, int], QueryCut]


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Fields that all sites of a step share, as words. groups, modules, scales: of the first site; pitch: of a slot."""

    num_tiles: int
    rank: int
    tiles: Words
    weights: Words
    page_table: Words
    groups: Words
    modules: Words
    scales: Words


def _shift(field: Words, numbers: int) -> Words:
    """A matrix of 4-byte numbers without its first columns."""
    return field[0] + 4 * numbers, field[1], field[2]


class NumbaKernels:
    """See `Kernels`. The bridge is [T, max_group_rank], see `_bridge_dtype`. Tensors are a CPU's, with contiguous rows.

    One caller at a time: scratch memory is shared by all calls. A token's results are the same to the bit alone and
    in a batch.
    """

    name = "numba"
    tile_tokens = TILE_TOKENS

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
        words = [word for field in fields for word in _pack(field)]
        self._start(worker, dtype, items, words, numbers=numbers)

    def _start(
        self, worker: Worker, dtype: torch.dtype, items: int, words: Sequence[int], *, numbers: int
    ) -> None:
        if items == 0:
            return
        job = array("q", (0, 0, items, *words))
        threads = 1 if numbers < SERIAL_NUMBERS else min(torch.get_num_threads(), items)
        self._team.run(_compile(worker, dtype).address, job.buffer_info()[0], threads)

    def _reserve(self, numbers: int) -> Tensor:
        """Scratch of `numbers` float32 for each thread, [threads, numbers or more]."""
        threads = torch.get_num_threads()
        if self._scratch.numel() < threads * numbers:
            self._scratch = torch.empty(threads * numbers)
        return self._scratch[: threads * numbers].view(threads, numbers)

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        plan = AttentionPlan(_pack(batch.positions), _pack(batch.kv_slots), _pack(batch.block_tables), {})
        return AttentionStep(batch, plan)

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        plan = LoraPlan(
            tiles.tiles.shape[0],
            tiles.max_group_rank,
            *map(_pack, (tiles.tiles, tiles.weights, tables.page_table)),
            *map(_pack, (tables.groups.flatten(1), tables.modules.flatten(1), tables.scales)),
        )
        return LoraStep(tiles, tables, plan)

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
        plan = step.plan
        assert isinstance(plan, AttentionPlan)
        normed = () if norms is None else (norms.query.float(), norms.key.float(), norms.eps)
        fields = (
            qkv,
            _NOTHING if cos_sin is None else cos_sin,
            _as_numbers(pages, qkv.element_size()),
            plan.positions,
            plan.kv_slots,
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
        if (group, geometry.num_kv_heads) not in plan.cuts:
            tiles = _cut_queries(step.batch, max(1, TILE_ROWS // group))
            heads = _share_heads(len(tiles), geometry.num_kv_heads, group, step.batch.max_query)
            plan.cuts[group, geometry.num_kv_heads] = QueryCut(tiles, _pack(tiles), heads)
        cut = plan.cuts[group, geometry.num_kv_heads]
        out = torch.empty(q.shape[0], geometry.num_heads * geometry.head_dim, dtype=q.dtype)
        assert q.stride(1) == geometry.head_dim and q.stride(2) == 1
        fields = (
            q,
            _as_numbers(pages, q.element_size()),
            out,
            cut.words,
            plan.block_tables,
            self._reserve(numba_attention.count_scratch(geometry.head_dim)),
            geometry.num_kv_heads,
            group,
            geometry.head_dim,
            geometry.block_tokens,
            layer * geometry.block_elements,
            rule.scale,
            numba_attention.NO_WINDOW if rule.window is None else rule.window,
            rule.softcap or 0.0,
            cut.item_heads,
        )
        items = len(cut.tiles) * geometry.num_kv_heads // cut.item_heads
        numbers = q.numel() * rule.count_visible(step.batch.max_context)
        self._run(numba_attention.attend_worker, geometry.dtype, items, fields, numbers=numbers)
        return out

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        if logits.stride(0) < width:  # one row for many: a job knows no such matrix
            logits = logits.contiguous()
        best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        fields, worker = (logits, best, tokens, width), numba_likeliest.likeliest_worker
        self._run(worker, logits.dtype, rows, fields, numbers=logits.numel())
        return best, tokens

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Tensor:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        tokens, width, element_bytes = x.shape[0], x.shape[1], x.element_size()
        bridge = torch.empty(tokens, plan.rank, dtype=_bridge_dtype(x.dtype))
        coarse, fine = SHRINK_ROWS
        rows = coarse if self._is_enough(plan.num_tiles * -(-plan.rank // coarse)) else fine
        blocks = -(-plan.rank // rows)
        words = (
            *(x.data_ptr(), tokens, x.stride(0)),
            *_as_numbers(pages, element_bytes),
            *(bridge.data_ptr(), tokens, plan.rank),
            *plan.tiles,
            *plan.page_table,
            *_shift(plan.groups, 2 * site.group),
            *(width, 0, 0),
            *(SEGMENT_BYTES // element_bytes, 0, 0),
            *(blocks, 0, 0),
            *(rows, 0, 0),
            *_pack(self._reserve(TILE_TOKENS * rows)),
        )
        numbers = plan.num_tiles * plan.rank * width
        self._start(numba_lora.shrink_worker, x.dtype, plan.num_tiles * blocks, words, numbers=numbers)
        return bridge

    def look_up(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Tensor:
        return gather_columns(token_ids, pages, site, step, dtype).to(_bridge_dtype(dtype))

    def expand(self, out: Tensor, bridge: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        widest, element_bytes = max(site.widths), out.element_size()
        coarse, fine = EXPAND_COLUMNS
        columns = coarse if self._is_enough(plan.num_tiles * -(-widest // coarse)) else fine
        blocks = _cut_columns(site.widths, columns)
        # Of each thread: where each row begins, 64 bits, then rows that were brought together.
        scratch, threads, pitch = _pack(self._reserve(plan.rank * (2 + numba_lora.PACKED_PITCH)))
        words = (
            *(out.data_ptr(), out.shape[0], out.stride(0)),
            *_as_numbers(pages, element_bytes),
            *(bridge.data_ptr(), bridge.shape[0], bridge.stride(0)),
            *plan.tiles,
            *plan.weights,
            *plan.page_table,
            *_shift(plan.modules, 3 * site.first_module),
            *_shift(plan.scales, site.first_module),
            *blocks.words[0],
            *blocks.words[1],
            *(scratch + 8 * plan.rank, threads, 4 * pitch // element_bytes),
            *(scratch, threads, pitch // 2),
            *(SEGMENT_BYTES // element_bytes, 0, 0),
        )
        numbers = plan.num_tiles * plan.rank * widest
        self._start(
            numba_lora.expand_worker, out.dtype, plan.num_tiles * len(blocks.table), words, numbers=numbers
        )

    def _is_enough(self, items: int) -> bool:
        """Whether all threads stay busy with so many items."""
        return items >= ITEMS_PER_THREAD * torch.get_num_threads()
