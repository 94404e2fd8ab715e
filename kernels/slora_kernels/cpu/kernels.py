"""The fast CPU implementation of `Kernels`, whose workers are machine code (see `machine_code`).

The workers run on torch's threads. The job fields that all calls of a step share are computed once per step. Preparing
each call from scratch took 2 ms of a decode step of 40 ms.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
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
from slora_kernels.coded_weight import BLOCK_COLUMNS, CodedWeight
from slora_kernels.cpu.attention_plan import AttentionPlan
from slora_kernels.cpu.job_fields import (
    NO_TENSOR,
    JobWords,
    begin_job,
    name_dtype,
    operand_dtype,
    pack_field,
    pack_fields,
    pack_pages,
    pack_row,
    pack_rows,
    share_rows,
)
from slora_kernels.cpu.lora_plan import DeferredShrink, LoraPlan
from slora_kernels.cpu.machine_code import (
    ACT_MUL,
    AFFINE,
    ARGMAX,
    CODED,
    FLOAT8,
    INT8,
    RMS_NORM,
    TOKEN_LOGITS,
    Worker,
    find_attend_worker,
    find_lora_worker,
    find_rotate_worker,
    find_worker,
    list_model_workers,
)
from slora_kernels.cpu.thread_team import ThreadTeam, collecting_jobs, load_workers, refresh_jobs
from slora_kernels.cpu.worker_sizes import (
    ACTIVATIONS,
    CODE_COLUMNS,
    CODED_ITEM_ROWS,
    HAS_TILES,
    ITEM_ROWS,
    LOGIT_ROWS,
    NUM_ITEMS,
    TILE_TOKENS,
)
from slora_kernels.layout import SEGMENT_BYTES, LoraSite
from slora_kernels.sampling_tensors import SamplingTensors
from slora_kernels.torch.grouped_matmuls import grouped_linear, multiply_groups
from slora_kernels.torch.lora_matmuls import add_delta, shrink_embedding, write_delta
from slora_kernels.torch.quantized_matmuls import quantized_linear
from slora_kernels.torch.token_sampling import mask_logits, sample_tokens

# Reading fewer elements than this takes less time than waking a second thread (about 10 us).
SERIAL_ELEMENTS = 65536
_ANY_THREADS = 1 << 30
assert CODE_COLUMNS == BLOCK_COLUMNS


@cache
def _find(worker: Worker, dtype: torch.dtype) -> int:
    return find_worker(worker, name_dtype(dtype))


class CpuKernels:
    """The CPU implementation of `Kernels`. All tensors are on the CPU and have contiguous rows.

    Calls must not overlap, because all calls share scratch memory. A token's results are bit-identical alone and in a
    batch.
    """

    name = "cpu"
    tile_limits = TileLimits(TILE_TOKENS)

    @staticmethod
    def on(device: torch.device) -> "CpuKernels":
        """Kernels for `device`, which must be a CPU."""
        return CpuKernels()

    def __init__(self, team: ThreadTeam | None = None) -> None:
        self._team = team or ThreadTeam()
        self._scratch = torch.empty(0)

    def warm_up(self, geometry: KVGeometry) -> float:
        """Loads all workers for the geometry's dtype and KV format, and compiles those that there are not.

        Returns the seconds that this took.
        """
        start = time.perf_counter()
        load_workers(list_model_workers(name_dtype(geometry.dtype), geometry.kv_format, geometry.head_dim))
        return time.perf_counter() - start

    def collecting_jobs(self) -> AbstractContextManager[Callable[[], None] | None]:
        return collecting_jobs()

    def _run(
        self,
        worker: Worker,
        dtype: torch.dtype,
        job: JobWords,
        *operands: object,
        num_elements: int,
        num_rows: int = 0,
        most_threads: int = _ANY_THREADS,
    ) -> None:
        """operands: see `ThreadTeam.run`. num_rows: the number of rows if the items are in the order of rows.
        most_threads: those that have scratch memory of their own.
        """
        items = job[NUM_ITEMS]
        if items:
            threads = 1
            if num_elements >= SERIAL_ELEMENTS:
                threads = min(torch.get_num_threads(), items, most_threads)
            share_rows(job, num_rows, threads)
            self._team.run(_find(worker, dtype), job, threads, *operands)

    def _reserve(self, num_elements: int) -> Tensor:
        """Returns float32 scratch memory for all threads, [threads, num_elements]. Later calls reuse the memory."""
        threads = torch.get_num_threads()
        if self._scratch.numel() < threads * num_elements:
            self._scratch = torch.empty(threads * num_elements)
        return self._scratch[: threads * num_elements].view(threads, num_elements)

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        plan = AttentionPlan(batch, self._reserve)
        refresh_jobs(plan.refresh)
        return AttentionStep(batch, plan)

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        plan = LoraPlan(tiles, tables, self._reserve)
        refresh_jobs(plan.refresh)
        return LoraStep(tiles, tables, plan)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm((x, x), weight, eps, adds=False)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        x = add_delta(x, delta)
        return self._norm((x, residual), weight, eps, adds=True)

    def _norm(self, rows: tuple[Tensor, Tensor], weight: Tensor, eps: float, *, adds: bool) -> Tensor:
        x, residual = rows
        # When the CPU caches are cold, empty_like takes half the time of torch.empty.
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        job = begin_job(
            x.shape[0],
            *pack_rows(x),
            *pack_rows(residual),
            *pack_row(weight),
            *pack_rows(out),
            *pack_field(eps),
            *(adds, 0, 0),
            *(weight.dtype is torch.float32, 0, 0),
        )
        self._run(RMS_NORM, x.dtype, job, x, residual, weight, out, num_elements=x.numel(), num_rows=len(x))
        return out

    def act_mul(self, gate_up: Tensor, activation: Activation, delta: Tensor | None = None) -> Tensor:
        gate_up = add_delta(gate_up, delta)
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        kind = ACTIVATIONS.index(activation)
        job = begin_job(gate_up.shape[0], *pack_rows(gate_up), *pack_rows(out), *(kind, 0, 0))
        self._run(ACT_MUL, gate_up.dtype, job, gate_up, out, num_elements=gate_up.numel(), num_rows=len(out))
        return out

    def quantized_linear(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.bfloat16 and HAS_TILES:
            # torch's products of widened tiles are many times faster for many rows than float32 products.
            return quantized_linear(x, values, scales, bias)
        (num_rows, width), rows = values.shape, x.float().contiguous()
        # Not empty: the kernel adds to it.
        sums = torch.zeros(len(x), num_rows)
        job = begin_job(
            -(-num_rows // ITEM_ROWS),
            *pack_rows(rows),
            *pack_rows(sums),
            *pack_rows(values),
            *(width, 0, 0),
            *(num_rows, 0, 0),
        )
        worker = INT8 if values.dtype == torch.int8 else FLOAT8
        self._run(worker, torch.float32, job, num_elements=values.numel())
        out = sums * scales
        if bias is not None:
            out += bias
        return out.to(x.dtype)

    def coded_linear(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        (num_rows, width), rows = weight.shape, x.float().contiguous()
        scratch = self._reserve(CODED_ITEM_ROWS * width)
        # Not empty: the kernel adds to it.
        sums = torch.zeros(len(x), num_rows)
        is_half, has_minimums = weight.scales.dtype == torch.float16, weight.minimums.numel() > 0
        scales, minimums = pack_rows(weight.scales), NO_TENSOR
        if has_minimums:
            minimums = pack_rows(weight.minimums)
        absent = (NO_TENSOR, NO_TENSOR)
        floats, halves = (absent, (scales, minimums)) if is_half else ((scales, minimums), absent)
        job = pack_fields(
            *(pack_rows(rows), pack_rows(sums), pack_rows(weight.codes), width, num_rows),
            *(pack_row(weight.table), weight.group, *floats, *halves, is_half, has_minimums),
            pack_rows(scratch),
        )
        job = begin_job(-(-num_rows // CODED_ITEM_ROWS), *job)
        self._run(CODED, torch.float32, job, num_elements=weight.codes.numel())
        if bias is not None:
            sums += bias
        return sums.to(x.dtype)

    def grouped_linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor) -> Tensor:
        if scales is None:
            return grouped_linear(x, weight, None, starts)
        return multiply_groups(
            x, starts, lambda group, rows: self.quantized_linear(rows, weight[group], scales[group], None)
        )

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
        plan = step.plan
        assert isinstance(plan, AttentionPlan)
        job = plan.make_rotate_job(qkv, cos_sin, pages, geometry, layer, norms)
        worker = find_rotate_worker(geometry.kv_format)
        self._run(worker, geometry.dtype, job, qkv, *plan.norms, num_elements=qkv.numel(), num_rows=len(qkv))
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
        job, num_elements = plan.make_attend_job(q, out, pages, geometry, layer, rule)
        worker = find_attend_worker(name_dtype(geometry.dtype), geometry.kv_format, geometry.head_dim)
        threads = plan.num_threads
        self._run(worker, geometry.dtype, job, q, out, num_elements=num_elements, most_threads=threads)
        return out

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        mask_logits(logits, rows, masks)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        if logits.stride(0) < width:  # the rows overlap, as after Tensor.expand: a job cannot describe them
            logits = logits.contiguous()
        best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        job = begin_job(rows, *pack_rows(logits), *pack_row(best), *pack_row(tokens), *(width, 0, 0))
        self._run(ARGMAX, logits.dtype, job, num_elements=logits.numel())
        return best, tokens

    def sample(self, logits: Tensor, max_logits: Tensor, sampling: SamplingTensors) -> Tensor:
        return sample_tokens(logits, max_logits, sampling)

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> DeferredShrink:
        """Stores x. `expand` also computes the shrink, so that threads synchronise once per site instead of twice."""
        return DeferredShrink(x)

    def shrink_embedding(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Tensor:
        return shrink_embedding(token_ids, pages, site, step, dtype).to(operand_dtype(dtype))

    def write_delta(
        self,
        delta: Tensor,
        shrunk: DeferredShrink | Tensor,
        pages: Tensor,
        site: LoraSite,
        step: LoraStep,
    ) -> None:
        write_delta(self, delta, shrunk, pages, site, step)

    def apply_affine(self, out: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        self._run(AFFINE, out.dtype, plan.make_affine_job(out, pages, site), out, num_elements=out.numel())

    def token_logits(self, hidden: Tensor, rows: TokenRows) -> Tensor:
        out = torch.empty(len(hidden), rows.count, dtype=hidden.dtype)
        table, element_bytes = torch.tensor(rows.page_ids, dtype=torch.int32), hidden.element_size()
        scratch = self._reserve(TILE_TOKENS * LOGIT_ROWS)
        for first in range(0, len(hidden), TILE_TOKENS):
            x, target = (matrix[first : first + TILE_TOKENS] for matrix in (hidden, out))
            job = pack_fields(
                *(x, target, pack_pages(rows.pages, element_bytes), table, rows.first_row, rows.count),
                *(hidden.shape[1], SEGMENT_BYTES // element_bytes, scratch),
            )
            job = begin_job(-(-rows.count // LOGIT_ROWS), *job)
            self._run(TOKEN_LOGITS, hidden.dtype, job, num_elements=rows.count * hidden.shape[1])
        return out

    def expand(
        self, out: Tensor, shrunk: DeferredShrink | Tensor, pages: Tensor, site: LoraSite, step: LoraStep
    ) -> None:
        plan = step.plan
        assert isinstance(plan, LoraPlan)
        job, num_elements = plan.make_job(out, shrunk, pages, site)
        worker, threads = find_lora_worker(name_dtype(out.dtype)), plan.num_threads
        self._run(worker, out.dtype, job, out, shrunk, num_elements=num_elements, most_threads=threads)
