"""Runs a step on the device: moves pages, loads adapters, builds the batch, runs the model and samples tokens."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from slora.core.cost_model import CostModel
from slora.core.engine_config import EngineConfig
from slora.core.errors import DeviceFailed, SloraError
from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from slora.memory.device_memory import DeviceMemory
from slora.memory.kv_cache import BlockTable
from slora.memory.pool_sizing import (
    MAX_SLOTS,
    choose_pool_bytes,
    count_pages,
    count_swap_pages,
    find_max_model_len,
)
from slora.memory.residency import AdapterLoad
from slora.memory.tenant_account import TenantAccount
from slora.models.decoder import Decoder
from slora.models.lora_deltas import LoraDeltas
from slora.models.model import LoadModel, load_model
from slora.models.model_spec import ModelSpec
from slora.models.step_batch import StepArrays, StepBatch, tile_prompt_rows
from slora.runner.cost_measurement import measure_costs
from slora.runner.learned_costs import LearnedCosts, bound_costs
from slora.runner.model_part import ModelPart
from slora.runner.process_group import NO_GROUP, RankGroup
from slora.runner.rank import Allocate, Compute, ComputeLogits, ScoreRows, Transfer, Zero
from slora.runner.step_graphs import StepGraphs, capture_cuda
from slora.sampling.prompt_rows import compute_prompt_logprobs, pool_hidden_states
from slora.sampling.sampler import sample
from slora.sampling.sampling_table import SamplingTable
from slora.sampling.token_masks import TokenMasks
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan
from slora_kernels.batch import LoraTiles
from slora_kernels.host_copies import upload
from slora_kernels.machine_limits import machine_limits
from slora_kernels.torch.lora_matmuls import read_rows


class PageTransferFailed(SloraError):
    """A step could not move pages or load adapters. The content of all pages that the step was to write is invalid."""


class LoadStream:
    """A CUDA stream that copies adapters while the GPU computes a step that does not need them.

    The step is launched first and the copies after it, so a wait for copies from pageable memory does not delay the
    step. The copies start when all work before the step is done, because that work may still use their target pages. A
    step calls `mark`, and then `copy` if adapters load in parallel. The next step calls `wait` first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marked, self._copied = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Marks the point in the device's work from which copies may start."""
        self._marked.record(torch.cuda.current_stream(self._device))

    def copy(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Launches copies that wait for the mark, but not for later work. The event occurs when they are done."""
        self._stream.wait_event(self._marked)
        with torch.cuda.stream(self._stream):
            work()
        # Each step has an event of its own, because the next step may record one before this step's is waited for.
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(self._stream)
        return self._copied

    def wait(self) -> None:
        """Makes all later work wait for the copies."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)


def split_loads(plan: StepPlan) -> tuple[list[AdapterLoad], list[AdapterLoad]]:
    """Splits a step's loads into (loads of slots that the step uses, loads that may run in parallel)."""
    used = {slot for chunk in plan.chunks for slot, _, _ in chunk.slots}
    needed: list[AdapterLoad] = []
    beside: list[AdapterLoad] = []
    for load in plan.loads:
        (beside if plan.chunks and load.resident.slot not in used else needed).append(load)
    return needed, beside


# The results of one step: one token for each of the chunks' `sampled_sequences`.
ReadTokens = Callable[[], list[SampledToken]]
_DEFERRED = SampledToken(None, is_deferred=True)


@dataclass(slots=True)
class RunningStep:
    """A launched step, which the device may still compute."""

    read: ReadTokens = list
    # Seconds that the step needed to swap pages and to load adapters. On a GPU they include only the launch of the
    # copies.
    swap_s: float = 0.0
    load_s: float = 0.0
    # Seconds for the scales and offsets of adapters that the step uses first.
    finish_s: float = 0.0
    # Whether it was not replayed, because its shape was new. It then took many times as long as later ones.
    was_delayed: bool = False
    events: list[torch.cuda.Event] = field(default_factory=list)
    finish_loads: Callable[[], None] | None = None

    def wait(self) -> list[SampledToken]:
        """Waits for the device. Returns one token for each sequence in the chunks' `sampled_sequences`, in order.

        Afterwards, the host's copies of the adapters that the step loads are no longer read.
        """
        for event in self.events:
            event.synchronize()
        if self.finish_loads is not None:
            self.finish_loads()
        return self.read()


class Runner:
    """The model and the bytes of the page pool on one device.

    num_swap_pages: number of host pages for swapped KV.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSpec,
        load: LoadModel = load_model,
        group: RankGroup = NO_GROUP,
    ) -> None:
        self.model = model
        self._group = group
        # Whether this rank is within a computation of the group. It stays True if the computation fails.
        self._is_computing = False
        part = self._part = ModelPart(config, model, load, group.collectives)
        self.device, self.dtype_name, self.kernels = part.device, part.dtype_name, part.kernels
        self.decoder, self._shape, self._geometry = part.model, part.shape, part.geometry
        self.full_page_bytes = part.full_page_bytes
        self.kernels.warm_up(self._geometry)
        self.decoder.warm_up(self.kernels)
        self.decoder.check(self._geometry, self.kernels)
        self.num_slots = MAX_SLOTS
        self._sampling = SamplingTable(config.max_num_seqs, model.vocab_size, self.device)
        # The token that was last sampled in each row of the sampling table.
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        budget = config.token_budget(self.device.type)
        self.memory = self._memory(2)
        self._graphs: StepGraphs | None = None
        self._last_arrays: StepArrays | None = None
        self.load_stream = LoadStream(self.device) if self.device.type == "cuda" else None
        self._run_largest_step(budget, config.max_num_seqs)
        if self.kernels.name == "triton" and self.device.type == "cuda":
            self.compile_lora(budget)
        num_pages = self._num_pages(config)
        # Each rank has as many host pages.
        free_bytes = machine_limits().free_memory_bytes() // group.collectives.size
        self.num_swap_pages = count_swap_pages(config, num_pages, self.full_page_bytes, free_bytes)
        self.memory = self._memory(num_pages, self.num_swap_pages)
        self.footprint = part.footprint
        self.max_model_len = find_max_model_len(
            config, num_pages, self.full_page_bytes, model.max_positions, part.footprint
        )
        self._largest_step = budget, config.max_num_seqs
        self._graphs = self._make_graphs(config)

    @property
    def can_embed(self) -> bool:
        return self.decoder.can_embed

    @property
    def loads_beside(self) -> bool:
        """Whether the device copies adapters while it computes a step that does not use them."""
        return self.load_stream is not None

    def learn_costs(self) -> LearnedCosts:
        """Measures the costs of steps and returns a cost model that learns from later steps.

        No page may be in use: measuring writes to many pages.
        """
        on_gpu = self.device.type != "cpu"
        bounds = bound_costs(self._shape, self.full_page_bytes, self._geometry.block_tokens, on_gpu=on_gpu)
        return LearnedCosts(self.measure_costs(), bounds)

    def measure_costs(self) -> CostModel:
        """Measures the costs of steps and copies. No page may be in use: measuring writes to many pages.

        The cost of attention in a prefill is derived from its FLOP, because steps that are short enough to be measured
        at start hardly show it.
        """
        costs = measure_costs(self.run, self.memory, *self._largest_step, self.max_model_len)
        flop_s = costs.token_s / max(1, 2 * self._shape.num_weights)
        return replace(costs, prefill_context_s=flop_s * self._shape.attention_flop)

    def run(self, plan: StepPlan) -> list[SampledToken]:
        """Runs one step and waits for its results. See `launch`."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """Launches one step. A GPU may still compute the step before, whose tokens this step continues.

        Prompt logprobs and embeddings are stored on the sequences, which waits for the device. Raises
        PageTransferFailed, or the error of the computation. The host's copies of the adapters are then no longer read.
        """
        try:
            return self._launch(plan)
        except BaseException:
            if plan.loads:
                self.memory.wait()
                # After a failed computation the other ranks may wait for this one, so they would not answer.
                if not self._is_computing:
                    self._group.finish_loads()
            raise

    def _launch(self, plan: StepPlan) -> RunningStep:
        step = RunningStep(finish_loads=self._group.finish_loads if plan.loads else None)
        with _transferring_pages():
            beside = self._transfer_pages(plan, step)
        num_delayed = self.num_delayed
        try:
            computed = self._compute(plan, step)
        finally:
            # Load even after a failed computation, because the next slices of these adapters must follow these slices.
            with _transferring_pages():
                self._load_in_parallel(beside, step)
        step.was_delayed = self.num_delayed > num_delayed
        if computed is not None:
            step.read = self._sample_tokens(*computed)
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            step.events.append(event)
        return step

    def zero(self, pages: list[int], host_pages: list[int]) -> None:
        """Overwrites free pages of the pool and of the host with zeros, on all ranks."""
        self._group.send(lambda rank: Zero(pages, host_pages))
        self.memory.zero(pages, host_pages)

    @torch.inference_mode()
    def probe(self) -> None:
        """Computes a token of the base model on two pages of its own. Raises DeviceFailed if that fails.

        If one rank of a group fails within a computation, the others wait for it in vain. So that failure is always
        DeviceFailed. After other failures, a group is not tested.
        """
        if self._group.collectives.size > 1:
            if self._is_computing:
                raise DeviceFailed("a step of the tensor-parallel group failed: all ranks must start again")
            return
        try:
            memory = self._part.make_memory(2, num_slots=1)
            memory.pages.zero_()
            batch = StepBatch.build(
                StepPlan(chunks=[_scratch_chunk(memory)]),
                memory,
                self.kernels.tile_limits,
            )
            hidden = self.decoder.forward(batch, memory, self.kernels)
            self.decoder.logits(hidden, LoraDeltas((), memory, self.kernels)).sum().item()
        except Exception as error:
            raise DeviceFailed(
                f"{self.device} no longer computes: {type(error).__name__}: {error}"
            ) from error

    def _compute(self, plan: StepPlan, step: RunningStep) -> tuple[StepBatch, Tensor] | None:
        """Returns the batch and its hidden states [B', H], or None for a plan that only moves pages."""
        for sequence in plan.rows_to_write:
            self._sampling.write(sequence.row, sequence)
        if not plan.chunks:
            return None
        arrays = StepArrays.build(
            plan, self.memory, self.kernels.tile_limits, self._part.long_rows, self._last_arrays
        )
        self._last_arrays = arrays
        batch = arrays.upload(self.device)
        if arrays.has_pending:
            ids = batch.token_ids
            known = torch.where(ids < 0, self._last_tokens[(-1 - ids).clamp_min(0)], ids)
            batch = replace(batch, token_ids=known)
        with self._computing_together(lambda: Compute(arrays.without_sequences(), len(batch.sampling))):
            started_s = time.perf_counter()
            self._part.finish_adapters(self.memory, arrays)
            step.finish_s = time.perf_counter() - started_s
            return batch, self._forward(batch)

    def _sample_tokens(self, batch: StepBatch, hidden: Tensor) -> ReadTokens:
        num_sampled = len(batch.sampling)
        num_scored = sum(len(rows.tokens) for rows in batch.prompts)
        sampled, scored, pooled = hidden.tensor_split([num_sampled, num_sampled + num_scored])
        num_done = num_sampled

        def score(rows: Tensor, sequence: Sequence) -> Tensor:
            nonlocal num_done
            num_done += len(rows)
            return self._score(rows, num_done - len(rows), sequence)

        compute_prompt_logprobs(scored, batch.prompts, score)
        pool_hidden_states(pooled, batch.pooled, self._classify)
        if not num_sampled:
            return list
        deltas = LoraDeltas(batch.head_lora, self.memory, self.kernels)
        with self._computing_together(ComputeLogits):
            logits = self.decoder.logits(sampled, deltas)
        own = [place for place, sequence in enumerate(batch.sampling) if sequence.num_added]
        if not own:
            return self._sample_rows(batch, logits, [*range(num_sampled)])
        # Rows with added tokens have more columns. All other rows are sampled without these, as in other batches.
        plain = sorted({*range(num_sampled)}.difference(own))
        reads = [self._sample_rows(batch, logits[:, : self.model.vocab_size], plain)] if plain else []
        reads.append(self._sample_rows(batch, logits, own))

        def read() -> list[SampledToken]:
            (first, *others) = (part() for part in reads)
            return [
                max(found, key=lambda one: not one.is_deferred) for found in zip(first, *others, strict=True)
            ]

        return read

    def _sample_rows(self, batch: StepBatch, logits: Tensor, places: list[int]) -> ReadTokens:
        """Samples the rows `places` of the batch. All other rows are read as deferred.

        logits: [rows of the batch, V].
        """
        num_sampled, sequences = len(batch.sampling), [batch.sampling[place] for place in places]
        # The masks are computed after the launch of the model's head, because uploading them waits until the device has
        # computed the logits.
        # A deferred sequence computes its last token again, which a recurrent state has passed.
        may_defer = not self.memory.num_state_pages
        masks = TokenMasks.compute(sequences, logits.shape[1], self.device, may_defer=may_defer)
        if masks is not None:
            places = [places[kept] for kept in masks.kept]
        if len(places) == num_sampled:
            rows = sample(logits, self._sampling, batch.sampling, self.kernels, masks)
            self._last_tokens[batch.sampling_rows] = rows.choice
            return rows.read
        index = upload(np.array(places, np.int64), self.device)
        kept = [batch.sampling[place] for place in places]
        rows = sample(logits[index].contiguous(), self._sampling, kept, self.kernels, masks)
        self._last_tokens[batch.sampling_rows[index]] = rows.choice

        def read() -> list[SampledToken]:
            tokens = [_DEFERRED] * num_sampled
            for place, token in zip(places, rows.read(), strict=True):
                tokens[place] = token
            return tokens

        return read

    def _transfer_pages(self, plan: StepPlan, step: RunningStep) -> list[AdapterLoad]:
        """Swaps pages out, copies shared pages, swaps pages in and loads adapters, in this order.

        In this order every page is read before another copy overwrites it. Returns the loads that may run in parallel
        with the step.
        """
        if plan.loads or plan.swaps_out or plan.copies or plan.swaps_in:
            self._group.send(lambda rank: Transfer.cut(plan, self.full_page_bytes, rank))
        if self.load_stream is not None:
            self.load_stream.wait()
        started_s = time.perf_counter()
        self.memory.swap_out(plan.swaps_out)
        swapped_out_s = time.perf_counter()
        if plan.copies:
            self.memory.copy(plan.copies)
        copied_s = time.perf_counter()
        self.memory.swap_in(plan.swaps_in)
        swapped_in_s = time.perf_counter()
        needed, beside = (plan.loads, []) if self.load_stream is None else split_loads(plan)
        for load in needed:
            self.memory.load(load)
        step.swap_s = swapped_out_s - started_s + swapped_in_s - copied_s
        step.load_s = time.perf_counter() - swapped_in_s
        if beside and self.load_stream is not None:
            self.load_stream.mark()
        return beside

    def _load_in_parallel(self, loads: list[AdapterLoad], step: RunningStep) -> None:
        def copy() -> None:
            for load in loads:
                self.memory.load(load)

        if loads and self.load_stream is not None:
            step.events.append(self.load_stream.copy(copy))

    @property
    def num_delayed(self) -> int:
        """See `StepGraphs.num_delayed`."""
        return self._graphs.num_delayed if self._graphs is not None else 0

    def _forward(self, batch: StepBatch) -> Tensor:
        shape = self._graphs.find_shape(batch) if self._graphs is not None else None
        if self._graphs is not None and shape is not None:
            return self._graphs.run(batch, shape)
        return self.decoder.forward(batch, self.memory, self.kernels)

    def _make_graphs(self, config: EngineConfig) -> StepGraphs | None:
        """Makes CUDA graphs for our own decoder with Triton's kernels, which never wait for a value from the device."""
        if not config.cuda_graphs or self.kernels.name != "triton" or self.device.type != "cuda":
            return None
        # Graphs with NCCL's collectives were never tried.
        if not isinstance(self.decoder, Decoder) or self._group.collectives.size > 1:
            return None
        return StepGraphs(
            lambda batch: self.decoder.forward(batch, self.memory, self.kernels),
            config,
            self.max_model_len,
            self.device,
            capture_cuda(),
        )

    def _score(self, hidden: Tensor, first_row: int, sequence: Sequence) -> Tensor:
        """Returns the logits of rows of a prompt. hidden: the step's hidden states from `first_row` on."""
        layers = tile_prompt_rows(sequence, len(hidden), self.kernels.tile_limits.tokens)
        deltas = LoraDeltas([layer.upload(self.device) for layer in layers], self.memory, self.kernels)
        with self._computing_together(lambda: ScoreRows(first_row, len(hidden), layers)):
            return self.decoder.logits(hidden, deltas)

    def _classify(self, hidden: Tensor, sequence: Sequence) -> Tensor:
        """Returns the logits, float32 [labels], of a hidden state, float32 [H]. All ranks have the whole head."""
        rows = self.memory.find_rows(sequence.residents[0].slot, 2)
        assert rows is not None, "a request to classify was admitted without a head"
        dtype = self._geometry.dtype
        weight = read_rows(rows.pages, rows.page_ids, rows.first_row, rows.count, len(hidden), dtype)
        return weight.float() @ hidden

    @contextmanager
    def _computing_together(self, make: Callable[[], Compute | ComputeLogits | ScoreRows]) -> Iterator[None]:
        """Sends each of the other ranks a command. The caller then computes this rank's part of the same work."""
        self._group.send(lambda rank: make())
        self._is_computing = True
        yield
        self._is_computing = False

    def _memory(self, num_pages: int, num_host_pages: int = 0) -> DeviceMemory:
        self._group.send(lambda rank: Allocate(num_pages, num_host_pages))
        return self._part.make_memory(num_pages, num_host_pages)

    def _num_pages(self, config: EngineConfig) -> int:
        free, on_gpu = 0, self.device.type == "cuda"
        if config.pool_bytes is None and on_gpu:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            free -= torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        elif config.pool_bytes is None:
            free = machine_limits().free_memory_bytes() // self._group.collectives.size
        return count_pages(choose_pool_bytes(config, free, on_gpu=on_gpu), self.full_page_bytes)

    def _run_largest_step(self, num_tokens: int, num_rows: int) -> None:
        """Runs the largest step once on scratch pages, to compile the kernels and to measure the memory of activations.

        Every token is a sequence of its own on page 0. The result is not used.
        """
        count = min(num_tokens, 16) if self.device.type == "cpu" else num_tokens
        plan = StepPlan()
        for number in range(count):
            chunk = _scratch_chunk(self.memory)
            if number < num_rows:
                chunk.sequence.row = number
                plan.rows_to_write.append(chunk.sequence)
            plan.chunks.append(chunk._replace(samples=number < num_rows))
        self.memory.pages.zero_()
        self.run(plan)

    @torch.inference_mode()
    def compile_lora(self, num_tokens: int) -> None:
        """Runs steps whose rows belong to a slot without an adapter. Their kernels are those of all adapters, unless
        `slora_kernels.gpu.lora_sizes` has other sizes for higher ranks.

        Otherwise, all streams would wait for the compiler when the first request with an adapter comes. The steps are
        one of decode rows, one of decode rows and a prompt, and one of `num_tokens` tokens. One device only.
        """
        limits = self.kernels.tile_limits
        decode, chunk = limits.decode_tokens, limits.tokens
        if self._group.collectives.size > 1 or decode is None:
            return
        rows = [0, 0, decode]
        for count in sorted({decode, decode + chunk, max(num_tokens, decode + chunk)}):
            tiles = [rows, [0, decode, chunk]] if count > decode else [rows]
            plan = StepPlan(chunks=[_scratch_chunk(self.memory)] * count)
            lora = LoraTiles(
                torch.tensor(tiles, dtype=torch.int32, device=self.device),
                torch.ones(len(tiles), device=self.device),
                max_group_rank=1,
                max_tokens=max(size for _, _, size in tiles),
                num_decodes=1,
            )
            batch = replace(StepBatch.build(plan, self.memory, limits), lora=(lora,))
            self.decoder.forward(batch, self.memory, self.kernels)


def _scratch_chunk(memory: DeviceMemory) -> Chunk:
    """A chunk of one token on page 0, for a sequence without a request. Its recurrent state is on page 1."""
    request = EngineRequest("trial", "", [0], (), SamplingParams(top_p=0.9))
    blocks = BlockTable(memory.geometry.block_tokens, memory.num_state_pages)
    sequence = Sequence(request, TenantAccount("trial"), 1, frozenset(), 0, blocks)
    sequence.blocks.extend([1] * memory.num_state_pages + [0])
    return Chunk(sequence, 0, 1, samples=True, slots=())


@contextmanager
def _transferring_pages() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PageTransferFailed(f"pages could not be copied: {type(error).__name__}: {error}") from error
