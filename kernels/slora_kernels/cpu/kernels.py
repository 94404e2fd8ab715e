"""The fast CPU implementation of `Kernels`: numba compiles the kernels at run time, so no C compiler is needed.

The workers run on torch's threads. What all calls of a step share is computed once per step. Preparing each call from
scratch took 2 ms of a decode step of 40 ms.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import types
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
)
from slora_kernels.cpu import attention, elementwise, likeliest, lora
from slora_kernels.cpu.attention_plan import AttentionPlan
from slora_kernels.cpu.language import NUM_ITEMS, compile_worker
from slora_kernels.cpu.lora_plan import TILE_TOKENS, LoraPlan, Unshrunk
from slora_kernels.cpu.thread_team import ThreadTeam
from slora_kernels.cpu.words import JobWords, begin_job, operand_dtype, pack, pack_row, pack_rows
from slora_kernels.draws import Draws
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import LoraSite
from slora_kernels.lora_gather import gather_columns
from slora_kernels.quantized_matmuls import quantized_linear
from slora_kernels.token_draw import draw_tokens

# Reading fewer elements than this takes less time than waking a second thread (about 10 us).
SERIAL_NUMBERS = 65536

_CARRIERS = {torch.float32: types.float32, torch.bfloat16: types.uint16, torch.float16: types.int16}
_WORKERS = (
    elementwise.rms_norm_worker,
    elementwise.act_mul_worker,
    likeliest.likeliest_worker,
    lora.lora_worker,
)
# Workers that depend on the KV format.
_KV_WORKERS = {
    KVFormat.MODEL: (elementwise.rotate_and_write_kv_worker, attention.attend_worker),
    KVFormat.FP8: (elementwise.rotate_and_write_fp8_worker, attention.attend_fp8_worker),
}
Worker = Callable[[Any], None]
NUM_KERNELS = len(_WORKERS) + len(_KV_WORKERS[KVFormat.MODEL])


@cache
def _compile(worker: Worker, dtype: torch.dtype) -> Any:
    return compile_worker(worker, _CARRIERS[dtype])


def compile_kernel(index: int, dtype: torch.dtype) -> None:
    """Compiles one of the `NUM_KERNELS` kernels of a model of `dtype` into numba's cache on disk."""
    _compile(_workers(KVFormat.MODEL)[index], dtype)


def _workers(kv_format: KVFormat) -> tuple[Worker, ...]:
    return (*_WORKERS, *_KV_WORKERS[kv_format])


class NumbaKernels:
    """See `Kernels`. All tensors are on the CPU and have contiguous rows.

    Calls must not overlap, because all calls share scratch memory. A token's results are bit-identical alone and in a
    batch.
    """

    name = "numba"
    tile_limits = TileLimits(TILE_TOKENS)

    @staticmethod
    def on(device: torch.device) -> "NumbaKernels":
        """Kernels for `device`, which must be a CPU."""
        return NumbaKernels()

    def __init__(self, team: ThreadTeam | None = None) -> None:
        self._team = team or ThreadTeam()
        self._scratch = torch.empty(0)

    def warm_up(self, geometry: KVGeometry) -> float:
        """Compiles all workers for the geometry's dtype and KV format, or loads them from numba's cache.

        Returns the seconds.
        """
        start = time.perf_counter()
        for worker in _workers(geometry.kv_format):
            _compile(worker, geometry.dtype)
        return time.perf_counter() - start

    def _start(self, worker: Worker, dtype: torch.dtype, job: JobWords, *, numbers: int) -> None:
        items = job[NUM_ITEMS]
        if items:
            threads = 1 if numbers < SERIAL_NUMBERS else min(torch.get_num_threads(), items)
            self._team.run(_compile(worker, dtype).address, job.buffer_info()[0], threads)

    def _reserve(self, numbers: int) -> Tensor:
        """Scratch of at least `numbers` float32 for each thread: [threads, numbers]. It is reused by later calls."""
        threads = torch.get_num_threads()
        if self._scratch.numel() < threads * numbers:
            self._scratch = torch.empty(threads * numbers)
        return self._scratch[: threads * numbers].view(threads, numbers)

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        return AttentionStep(batch, AttentionPlan(batch, self._reserve))

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        return LoraStep(tiles, tables, LoraPlan(tiles, tables, self._reserve))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm((x, x), weight, eps, adds=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm((x, residual), weight, eps, adds=True)

    def _norm(self, rows: tuple[Tensor, Tensor], weight: Tensor, eps: float, *, adds: bool) -> Tensor:
        x, residual = rows
        out = torch.empty_like(x)  # takes half the time of torch.empty with cold caches
        job = begin_job(
            len(x),
            *pack_rows(x),
            *pack_rows(residual),
            *pack_row(weight),
            *pack_rows(out),
            *pack(eps),
            *(adds, 0, 0),
            *(weight.dtype is torch.float32, 0, 0),
        )
        self._start(elementwise.rms_norm_worker, x.dtype, job, numbers=x.numel())
        return out

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        kind = elementwise.ACTIVATIONS.index(activation)
        job = begin_job(len(gate_up), *pack_rows(gate_up), *pack_rows(out), *(kind, 0, 0))
        self._start(elementwise.act_mul_worker, gate_up.dtype, job, numbers=gate_up.numel())
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
        job = plan.make_rotate_job(qkv, cos_sin, pages, geometry, layer, norms)
        worker, _ = _KV_WORKERS[geometry.kv_format]
        self._start(worker, geometry.dtype, job, numbers=qkv.numel())
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
        assert q.stride(1) == geometry.head_dim
        out = torch.empty(q.shape[0], geometry.num_heads * geometry.head_dim, dtype=q.dtype)
        job, numbers = plan.make_attend_job(q, out, pages, geometry, layer, rule)
        _, worker = _KV_WORKERS[geometry.kv_format]
        self._start(worker, geometry.dtype, job, numbers=numbers)
        return out

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        if logits.stride(0) < width:  # an expanded row: a job cannot describe it
            logits = logits.contiguous()
        best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        job = begin_job(rows, *pack_rows(logits), *pack_row(best), *pack_row(tokens), *(width, 0, 0))
        self._start(likeliest.likeliest_worker, logits.dtype, job, numbers=logits.numel())
        return best, tokens

    def draw(self, logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
        return draw_tokens(logits, peaks, draws)

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Unshrunk:
        """Only stores x: `expand` also shrinks, so that threads synchronise once per site instead of twice."""
        return Unshrunk(x)

    def look_up(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Tensor:
        return gather_columns(token_ids, pages, site, step, dtype).to(operand_dtype(dtype))

    def expand(
        self, out: Tensor, bridge: Unshrunk | Tensor, pages: Tensor, site: LoraSite, step: LoraStep
    ) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        job, numbers = plan.make_job(out, bridge, pages, site)
        self._start(lora.lora_worker, out.dtype, job, numbers=numbers)
