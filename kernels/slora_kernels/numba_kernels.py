"""The fast CPU path: kernels that numba compiles at run time, so no compiler is needed at install or at run time.

Our own workers run on torch's threads. Of a decode step of 40 ms, preparing their calls anew each time was 2: what all
calls of a step share is worked out once.
"""

import time
from array import array
from collections.abc import Callable
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
    TileLimits,
)
from slora_kernels.draws import Draws
from slora_kernels.layout import SCALE_BYTES, KVFormat, LoraSite
from slora_kernels.lora_gather import gather_columns
from slora_kernels.numba_attention import TILE_ROWS
from slora_kernels.numba_language import NUM_ITEMS, compile_worker
from slora_kernels.numba_lora_plan import ITEMS_PER_THREAD, TILE_TOKENS, LoraPlan, Unshrunk, bridge_dtype
from slora_kernels.numba_words import NOTHING, Field, Words, as_numbers, begin_job, pack
from slora_kernels.quantized_matmuls import quantized_linear
from slora_kernels.thread_team import ThreadTeam
from slora_kernels.token_draw import draw_tokens

# Reading fewer numbers than this takes less time than waking a second thread (about 10 us).
SERIAL_NUMBERS = 65536

_CARRIERS = {torch.float32: types.float32, torch.bfloat16: types.uint16, torch.float16: types.int16}
_WORKERS = (
    numba_elementwise.rms_norm_worker,
    numba_elementwise.act_mul_worker,
    numba_likeliest.likeliest_worker,
    numba_lora.lora_worker,
)
# Those that know what pages keep K and V as.
_KV_WORKERS = {
    KVFormat.MODEL: (numba_elementwise.rotate_and_write_kv_worker, numba_attention.attend_worker),
    KVFormat.FP8: (numba_elementwise.rotate_and_write_fp8_worker, numba_attention.attend_fp8_worker),
}
Worker = Callable[[Any], None]


@cache
def _compile(worker: Worker, dtype: torch.dtype) -> Any:
    return compile_worker(worker, _CARRIERS[dtype])


def _scale_fields(pages: Tensor, geometry: KVGeometry, layer: int) -> tuple[Field, ...]:
    """The pages once more as scales, and where the layer's begin; nothing where there are none."""
    if not geometry.has_scales:
        return ()
    first_byte = layer * geometry.layout.num_bytes + geometry.layout.scales_start
    return as_numbers(pages, SCALE_BYTES), first_byte // SCALE_BYTES


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


class NumbaKernels:
    """See `Kernels`. Tensors are a CPU's, with contiguous rows.

    One caller at a time: scratch memory is shared by all calls. A token's results are the same to the bit alone and
    in a batch.
    """

    name = "numba"
    tile_limits = TileLimits(TILE_TOKENS)

    @staticmethod
    def on(device: torch.device) -> "NumbaKernels":
        """device: a CPU."""
        return NumbaKernels()

    def __init__(self, team: ThreadTeam | None = None) -> None:
        self._team = team or ThreadTeam()
        self._scratch = torch.empty(0)

    def warm_up(self, geometry: KVGeometry) -> float:
        """Compiles, or loads from numba's cache, all workers for the geometry's formats; returns the seconds."""
        start = time.perf_counter()
        for worker in (*_WORKERS, *_KV_WORKERS[geometry.kv_format]):
            _compile(worker, geometry.dtype)
        return time.perf_counter() - start

    def _run(
        self, worker: Worker, dtype: torch.dtype, items: int, fields: tuple[Field, ...], *, numbers: int
    ) -> None:
        """Runs a worker over its items; `numbers` is about how many numbers it reads, all together."""
        job = begin_job(items)
        for field in fields:
            job.extend(pack(field))
        self._start(worker, dtype, job, numbers=numbers)

    def _start(self, worker: Worker, dtype: torch.dtype, job: "array[int]", *, numbers: int) -> None:
        items = job[NUM_ITEMS]
        if items:
            threads = 1 if numbers < SERIAL_NUMBERS else min(torch.get_num_threads(), items)
            self._team.run(_compile(worker, dtype).address, job.buffer_info()[0], threads)

    def _reserve(self, numbers: int) -> Tensor:
        """Scratch of `numbers` float32 for each thread, [threads, numbers or more]."""
        threads = torch.get_num_threads()
        if self._scratch.numel() < threads * numbers:
            self._scratch = torch.empty(threads * numbers)
        return self._scratch[: threads * numbers].view(threads, numbers)

    def _attention_scratch(self, geometry: KVGeometry) -> tuple[Words, Words]:
        """Float32 numbers of each thread, and behind them numbers of the model's dtype."""
        floats = numba_attention.count_scratch(geometry.head_dim)
        address, threads, pitch = pack(
            self._reserve(floats + numba_attention.count_numbers(geometry.head_dim))
        )
        size = geometry.dtype.itemsize
        return (address, threads, pitch), (address + 4 * floats, threads, 4 * pitch // size)

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        plan = AttentionPlan(pack(batch.positions), pack(batch.kv_slots), pack(batch.block_tables), {})
        return AttentionStep(batch, plan)

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        return LoraStep(tiles, tables, LoraPlan(tiles, tables, self._reserve))

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
        normed: tuple[Field, ...] = (NOTHING, NOTHING, NOTHING)
        if norms is not None:
            normed = (norms.query.float(), norms.key.float(), norms.eps)
        fields = (
            qkv,
            NOTHING if cos_sin is None else cos_sin,
            as_numbers(pages, geometry.number_dtype.itemsize),
            plan.positions,
            plan.kv_slots,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.block_tokens,
            layer * geometry.layer_numbers,
            int(norms is not None),
            *normed,
            *_scale_fields(pages, geometry, layer),
        )
        worker, _ = _KV_WORKERS[geometry.kv_format]
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
            plan.cuts[group, geometry.num_kv_heads] = QueryCut(tiles, pack(tiles), heads)
        cut = plan.cuts[group, geometry.num_kv_heads]
        out = torch.empty(q.shape[0], geometry.num_heads * geometry.head_dim, dtype=q.dtype)
        assert q.stride(1) == geometry.head_dim and q.stride(2) == 1
        fields = (
            q,
            as_numbers(pages, geometry.number_dtype.itemsize),
            out,
            cut.words,
            plan.block_tables,
            *self._attention_scratch(geometry),
            geometry.num_kv_heads,
            group,
            geometry.head_dim,
            geometry.block_tokens,
            layer * geometry.layer_numbers,
            rule.scale,
            numba_attention.NO_WINDOW if rule.window is None else rule.window,
            rule.softcap or 0.0,
            cut.item_heads,
            *_scale_fields(pages, geometry, layer),
        )
        _, worker = _KV_WORKERS[geometry.kv_format]
        items = len(cut.tiles) * geometry.num_kv_heads // cut.item_heads
        numbers = q.numel() * rule.count_visible(step.batch.max_context)
        self._run(worker, geometry.dtype, items, fields, numbers=numbers)
        return out

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        if logits.stride(0) < width:  # one row for many: a job knows no such matrix
            logits = logits.contiguous()
        best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        fields, worker = (logits, best, tokens, width), numba_likeliest.likeliest_worker
        self._run(worker, logits.dtype, rows, fields, numbers=logits.numel())
        return best, tokens

    def draw(self, logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
        return draw_tokens(logits, peaks, draws)

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Unshrunk:
        """Left to `expand`: threads that meet once at a site, not twice, wait less for each other."""
        return Unshrunk(x)

    def look_up(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Tensor:
        return gather_columns(token_ids, pages, site, step, dtype).to(bridge_dtype(dtype))

    def expand(
        self, out: Tensor, bridge: Unshrunk | Tensor, pages: Tensor, site: LoraSite, step: LoraStep
    ) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        job, numbers = plan.make_job(out, bridge, pages, site)
        self._start(numba_lora.lora_worker, out.dtype, job, numbers=numbers)
