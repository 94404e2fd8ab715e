"""One of the ranks of a tensor-parallel group that are not the leader: it obeys the commands of rank 0.

Rank 0 schedules and samples. The other ranks hold the same pages with their own parts of the KV and of the adapters,
and compute their parts of the model. They make the same calls to the collectives in the same order as rank 0. A failed
command ends the rank, and with it the group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora.core.engine_config import EngineConfig
from slora.memory.device_memory import AdapterSlice, DeviceMemory
from slora.models.collectives import Collectives
from slora.models.lora_deltas import LoraDeltas
from slora.models.model import load_model
from slora.models.model_spec import ModelSpec
from slora.models.step_batch import LayerArrays, StepArrays, StepBatch
from slora.runner.model_part import ModelPart
from slora.scheduler.step_plan import StepPlan
from slora_kernels.batch import LoraTiles


@dataclass(frozen=True, slots=True)
class Allocate:
    """Replaces the page pool and the host pages."""

    num_pages: int
    num_host_pages: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The copies of a step. See `StepPlan`."""

    swaps_out: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    swaps_in: list[tuple[int, int]]
    loads: list[AdapterSlice]

    @staticmethod
    def cut(plan: StepPlan, full_page_bytes: int, rank: int) -> "Transfer":
        loads = [AdapterSlice.cut(load, full_page_bytes, rank) for load in plan.loads]
        return Transfer(plan.swaps_out, plan.copies, plan.swaps_in, loads)


@dataclass(frozen=True, slots=True)
class Compute:
    """Computes the hidden states of a step. The first `num_sampled` rows are those to sample from."""

    arrays: StepArrays
    num_sampled: int


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Computes the logits of rows of the last step. layers: LoRA at the output head."""

    first_row: int
    num_rows: int
    layers: tuple[LayerArrays, ...]


@dataclass(frozen=True, slots=True)
class ComputeLogits:
    """Computes the logits of the rows to sample from."""


@dataclass(frozen=True, slots=True)
class Zero:
    """Overwrites free pages with zeros."""

    pages: list[int]
    host_pages: list[int]


@dataclass(frozen=True, slots=True)
class FinishLoads:
    """Waits until the host's copies of the loaded adapters are no longer read. The rank then answers."""


Command = Allocate | Transfer | Compute | ScoreRows | ComputeLogits | Zero | FinishLoads


class Rank:
    """Loads the rank's part of the model. Raises ConfigError if it can't be served."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, collectives: Collectives) -> None:
        self._part = ModelPart(config, spec, load_model, collectives)
        self._part.kernels.warm_up(self._part.geometry)
        self._part.model.warm_up(self._part.kernels)
        # The ranks compute the check together.
        self._part.model.check(self._part.geometry, self._part.kernels)
        self._memory: DeviceMemory | None = None
        self._step: tuple[StepBatch, Tensor, int] | None = None

    @torch.inference_mode()
    def obey(self, command: Command) -> None:
        """Runs one command. Raises the error of the computation."""
        if isinstance(command, Allocate):
            self._memory = None
            self._memory = self._part.make_memory(command.num_pages, command.num_host_pages)
            return
        assert self._memory is not None, "the first command allocates the pool"
        match command:
            case Transfer():
                self._transfer(command, self._memory)
            case Compute(arrays, num_sampled):
                batch = arrays.upload(self._part.device)
                self._part.finish_adapters(self._memory, arrays)
                hidden = self._part.model.forward(batch, self._memory, self._part.kernels)
                self._step = batch, hidden, num_sampled
            case ScoreRows(first_row, num_rows, layers):
                tiles = [layer.upload(self._part.device) for layer in layers]
                self._compute_logits(self._memory, first_row, num_rows, tiles)
            case ComputeLogits():
                assert self._step is not None, "a step precedes its logits"
                batch, _, num_sampled = self._step
                self._compute_logits(self._memory, 0, num_sampled, batch.head_lora)
            case Zero(pages, host_pages):
                self._memory.zero(pages, host_pages)
            case FinishLoads():
                self._memory.wait()

    def _transfer(self, command: Transfer, memory: DeviceMemory) -> None:
        memory.swap_out(command.swaps_out)
        if command.copies:
            memory.copy(command.copies)
        memory.swap_in(command.swaps_in)
        for part in command.loads:
            memory.load_slice(part)

    def _compute_logits(
        self,
        memory: DeviceMemory,
        first_row: int,
        num_rows: int,
        tiles: list[LoraTiles] | tuple[LoraTiles, ...],
    ) -> None:
        assert self._step is not None, "a step precedes its logits"
        hidden = self._step[1][first_row : first_row + num_rows]
        self._part.model.logits(hidden, LoraDeltas(tiles, memory, self._part.kernels))
