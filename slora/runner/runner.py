"""Runs a step on the device: moves pages, loads adapters, builds the batch, runs the model and samples tokens."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import torch
from torch import Tensor

from slora.cost_model import CostModel
from slora.device.device_memory import DeviceMemory
from slora.device.float8_support import check_float8_kv
from slora.device.load_stream import CudaLoadStream, LoadStream, split_loads
from slora.device.step_batch import StepBatch, tile_prompt_rows
from slora.engine_config import EngineConfig, free_ram_bytes
from slora.errors import ConfigError, DeviceFailed
from slora.models.decoder import Decoder
from slora.models.lora_deltas import LoraDeltas
from slora.models.model import LoadModel, ReferenceModel, load_model
from slora.models.model_spec import ModelSpec
from slora.models.parity_check import check_parity
from slora.pool.pool_sizing import (
    MAX_SLOTS,
    choose_pool_bytes,
    count_pages,
    count_swap_pages,
    find_full_page_bytes,
    find_max_model_len,
)
from slora.pool.tenant_account import TenantAccount
from slora.request import EngineRequest
from slora.runner.cost_bounds import bound_costs
from slora.runner.cost_measurement import measure_costs
from slora.runner.fault_isolation import PageTransferFailed
from slora.runner.learned_costs import LearnedCosts
from slora.runner.step_graphs import StepGraphs, capture_cuda
from slora.sampling.prompt_logprobs import compute_prompt_logprobs
from slora.sampling.prompt_pooling import pool_hidden_states
from slora.sampling.sampler import sample
from slora.sampling.sampling_table import SamplingTable
from slora.sampling.token_masks import TokenMasks
from slora.sampling_params import SamplingParams
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import AdapterLoad, Chunk, SampledToken, StepPlan
from slora_kernels.batch import KVGeometry
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import ModelShape, lay_out_adapter
from slora_kernels.ops import Kernels

_DEFERRED = SampledToken(None, is_deferred=True)
# If the compilation takes at least this long, the kernels were not in the cache.
_LONG_WARM_UP_S = 3.0
_log = logging.getLogger(__name__)


class Runner:
    """The model and the bytes of the page pool on one device.

    num_swap_pages: number of host pages for swapped KV.
    swap_s, load_s: seconds that the last step needed to swap pages and to load adapters. On a GPU they include only the
    launch of the copies.
    """

    def __init__(self, config: EngineConfig, model: ModelSpec, load: LoadModel = load_model) -> None:
        self.device = resolve_device(config.device, config.kernels)
        self.model = model
        self.dtype_name = model.resolve_dtype(config.dtype)
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.kernels = load_kernels(config.kernels, self.device)
        if config.kv_format is KVFormat.FP8:
            check_float8_kv(self.device)
        _check_positions(config, model)
        wanted_len = config.max_model_len or model.max_positions
        # First row of longrope's long factors in the rotary table. The rows of the short factors come before them.
        self._long_rows = wanted_len
        self._model = load(config, model, dtype, self.device, wanted_len)
        self._shape = shape = model.shape(self.dtype_name)
        self._geometry = _geometry(shape, config, dtype)
        _warm_up(self.kernels, self._geometry)
        self.full_page_bytes = find_full_page_bytes(shape, config)
        if isinstance(self._model, ReferenceModel):
            check_parity(self._model, model, self._geometry, self.kernels, self.device)
        self.num_slots = MAX_SLOTS
        largest = lay_out_adapter(shape, [config.max_lora_rank] * shape.num_modules)
        self._max_adapter_pages = -(-largest.num_bytes // self.full_page_bytes)
        self._sampling = SamplingTable(config.max_num_seqs, model.vocab_size, self.device)
        budget = config.token_budget(self.device.type)
        self.memory = self._memory(2)
        self._graphs: StepGraphs | None = None
        self._load_stream: LoadStream | None = (
            CudaLoadStream(self.device) if self.device.type == "cuda" else None
        )
        self._run_largest_step(budget, config.max_num_seqs)
        num_pages = self._num_pages(config)
        self.num_swap_pages = count_swap_pages(config, num_pages, self.full_page_bytes, free_ram_bytes())
        self.memory = self._memory(num_pages, self.num_swap_pages)
        self.max_model_len = find_max_model_len(
            config, num_pages, self.full_page_bytes, model.max_positions, model.window
        )
        self.swap_s = self.load_s = 0.0
        self._largest_step = budget, config.max_num_seqs
        self._graphs = self._make_graphs(config)

    @property
    def can_embed(self) -> bool:
        return self._model.can_embed

    def learn_costs(self) -> LearnedCosts:
        """Measures the costs of steps and returns a cost model that learns from later steps.

        No page may be in use: measuring writes to many pages.
        """
        on_gpu = self.device.type != "cpu"
        bounds = bound_costs(self._shape, self.full_page_bytes, self._geometry.block_tokens, on_gpu=on_gpu)
        return LearnedCosts(self.measure_costs(), bounds)

    def measure_costs(self) -> CostModel:
        """Measures the costs of steps and copies. No page may be in use: measuring writes to many pages."""
        return measure_costs(self.run, self.memory, *self._largest_step, self.max_model_len)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[SampledToken]:
        """Runs one step. Returns one token for each sequence in the chunks' `sampled_sequences`, in order.

        Prompt logprobs and embeddings are stored on the sequences. When this function returns or raises, the host's
        copies of the loaded adapters are no longer read. Raises PageTransferFailed, or the error of the computation.
        """
        try:
            with _transferring_pages():
                beside = self._transfer_pages(plan)
            try:
                computed = self._compute(plan)
            finally:
                # Load even after a failed computation, because the next slices of these adapters must follow these
                # slices.
                with _transferring_pages():
                    self._load_in_parallel(beside)
            return [] if computed is None else self._sample_tokens(*computed)
        finally:
            if plan.loads:
                self.memory.wait()

    @torch.inference_mode()
    def probe(self) -> None:
        """Computes a token of the base model on two pages of its own. Raises DeviceFailed if that fails."""
        try:
            memory = DeviceMemory(
                self._geometry, self._shape, self.full_page_bytes, 2, 1, self._max_adapter_pages, self.device
            )
            memory.pages.zero_()
            batch = StepBatch.build(
                StepPlan(chunks=[_scratch_chunk(self._geometry.block_tokens)]),
                memory,
                self.kernels.tile_limits,
            )
            hidden = self._model.forward(batch, memory, self.kernels)
            self._model.logits(hidden, LoraDeltas((), memory, self.kernels)).sum().item()
        except Exception as error:
            raise DeviceFailed(
                f"{self.device} no longer computes: {type(error).__name__}: {error}"
            ) from error

    def _compute(self, plan: StepPlan) -> tuple[StepBatch, Tensor] | None:
        """Returns the batch and its hidden states [B', H], or None for a plan that only moves pages."""
        for sequence in plan.rows_to_write:
            self._sampling.write(sequence.row, sequence)
        if not plan.chunks:
            return None
        batch = StepBatch.build(plan, self.memory, self.kernels.tile_limits, self._long_rows)
        return batch, self._forward(batch)

    def _sample_tokens(self, batch: StepBatch, hidden: Tensor) -> list[SampledToken]:
        num_sampled = len(batch.sampling)
        num_scored = sum(len(rows.tokens) for rows in batch.prompts)
        sampled, scored, pooled = hidden.tensor_split([num_sampled, num_sampled + num_scored])
        compute_prompt_logprobs(scored, batch.prompts, self._score)
        pool_hidden_states(pooled, batch.pooled)
        if not num_sampled:
            return []
        deltas = LoraDeltas(batch.head_lora, self.memory, self.kernels)
        logits = self._model.logits(sampled, deltas)
        # The masks are computed after the launch of the model's head, because uploading them waits until the device has
        # computed the logits.
        masks = TokenMasks.compute(batch.sampling, self.model.vocab_size, self.device)
        if masks is None or len(masks.kept) == num_sampled:
            return sample(logits, self._sampling, batch.sampling, self.kernels, masks)
        kept = [batch.sampling[row] for row in masks.kept]
        tokens = [_DEFERRED] * num_sampled
        for row, token in zip(
            masks.kept, sample(logits[masks.kept], self._sampling, kept, self.kernels, masks), strict=True
        ):
            tokens[row] = token
        return tokens

    def _transfer_pages(self, plan: StepPlan) -> list[AdapterLoad]:
        """Swaps pages out, copies shared pages, swaps pages in and loads adapters, in this order.

        In this order every page is read before another copy overwrites it. Returns the loads that may run in parallel
        with the step.
        """
        if self._load_stream is not None:
            self._load_stream.wait()
        started_s = time.perf_counter()
        self.memory.swap_out(plan.swaps_out)
        swapped_out_s = time.perf_counter()
        if plan.copies:
            self.memory.copy(plan.copies)
        copied_s = time.perf_counter()
        self.memory.swap_in(plan.swaps_in)
        swapped_in_s = time.perf_counter()
        needed, beside = (plan.loads, []) if self._load_stream is None else split_loads(plan)
        for load in needed:
            self.memory.load(load)
        self.swap_s = swapped_out_s - started_s + swapped_in_s - copied_s
        self.load_s = time.perf_counter() - swapped_in_s
        if beside and self._load_stream is not None:
            self._load_stream.mark()
        return beside

    def _load_in_parallel(self, loads: list[AdapterLoad]) -> None:
        def copy() -> None:
            for load in loads:
                self.memory.load(load)

        if loads and self._load_stream is not None:
            self._load_stream.copy(copy)

    def _forward(self, batch: StepBatch) -> Tensor:
        shape = self._graphs.find_shape(batch) if self._graphs is not None else None
        if self._graphs is not None and shape is not None:
            return self._graphs.run(batch, shape)
        return self._model.forward(batch, self.memory, self.kernels)

    def _make_graphs(self, config: EngineConfig) -> StepGraphs | None:
        """Makes CUDA graphs for our own decoder with Triton's kernels, which never wait for a value from the device."""
        if not config.cuda_graphs or self.kernels.name != "triton" or self.device.type != "cuda":
            return None
        if not isinstance(self._model, Decoder):
            return None
        return StepGraphs(
            lambda batch: self._model.forward(batch, self.memory, self.kernels),
            config.max_num_seqs,
            self.max_model_len,
            config.block_tokens,
            config.max_composed_adapters,
            self.device,
            capture_cuda(self.device),
        )

    def _score(self, hidden: Tensor, sequence: Sequence) -> Tensor:
        """Returns the logits of rows of a prompt. hidden: the hidden states of these rows."""
        layers = tile_prompt_rows(sequence, len(hidden), self.kernels.tile_limits.tokens, self.device)
        return self._model.logits(hidden, LoraDeltas(layers, self.memory, self.kernels))

    def _memory(self, num_pages: int, num_host_pages: int = 0) -> DeviceMemory:
        return DeviceMemory(
            self._geometry,
            self._shape,
            self.full_page_bytes,
            num_pages,
            self.num_slots,
            self._max_adapter_pages,
            self.device,
            num_host_pages,
        )

    def _num_pages(self, config: EngineConfig) -> int:
        free, on_gpu = 0, self.device.type == "cuda"
        if config.pool_bytes is None and on_gpu:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            free -= torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        elif config.pool_bytes is None:
            free = free_ram_bytes()
        return count_pages(choose_pool_bytes(config, free, on_gpu=on_gpu), self.full_page_bytes)

    def _run_largest_step(self, num_tokens: int, num_rows: int) -> None:
        """Runs the largest step once on scratch pages, to compile the kernels and to measure the memory of activations.

        Every token is a sequence of its own on page 0. The result is not used.
        """
        count = min(num_tokens, 16) if self.device.type == "cpu" else num_tokens
        plan = StepPlan()
        for number in range(count):
            chunk = _scratch_chunk(self._geometry.block_tokens)
            if number < num_rows:
                chunk.sequence.row = number
                plan.rows_to_write.append(chunk.sequence)
            plan.chunks.append(chunk._replace(samples=number < num_rows))
        self.memory.pages.zero_()
        self.run(plan)


def _scratch_chunk(block_tokens: int) -> Chunk:
    """A chunk of one token on page 0, for a sequence without a request."""
    request = EngineRequest("trial", "", [0], (), SamplingParams(top_p=0.9))
    sequence = Sequence(request, TenantAccount("trial"), 1, frozenset(), 0, block_tokens)
    sequence.blocks.extend([0])
    return Chunk(sequence, 0, 1, samples=True, slots=())


@contextmanager
def _transferring_pages() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PageTransferFailed(f"pages could not be copied: {type(error).__name__}: {error}") from error


def _warm_up(kernels: Kernels, geometry: KVGeometry) -> None:
    """Compiles the kernels. If that takes long, it logs the reason."""
    about = f"compiling {kernels.name} kernels for {geometry.dtype}, KV in {geometry.element_dtype}"
    slow = Timer(
        _LONG_WARM_UP_S, _log.info, [f"{about}: this takes up to two minutes, only at the first start"]
    )
    slow.daemon = True
    slow.start()
    try:
        kernels.warm_up(geometry)
    finally:
        slow.cancel()


def _geometry(shape: ModelShape, config: EngineConfig, dtype: torch.dtype) -> KVGeometry:
    return KVGeometry(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_tokens=config.block_tokens,
        dtype=dtype,
        kv_format=config.kv_format,
    )


def _check_positions(config: EngineConfig, model: ModelSpec) -> None:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_positions:
        raise ConfigError(
            f"max_model_len is {wanted}, but this model's positions end at {model.max_positions} "
            f"(max_position_embeddings); give at most that"
        )


def load_kernels(name: str, device: torch.device) -> Kernels:
    try:
        return select_kernels(name, device)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def resolve_device(name: str, kernels: str = "auto") -> torch.device:
    """Returns the device for the name `auto`, `cpu` or `cuda`.

    `auto` is a GPU if there is one, unless the kernels run only on a CPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; it must be auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and kernels != "numba" else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; choose cpu or auto")
    return torch.device(name)
