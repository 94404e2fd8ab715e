"""The part of a model that one rank computes: its weights, its kernels and the sizes of its pages.

With tensor parallelism, each rank of a group has one. Otherwise rank 0 is alone and its part is the whole model.
"""

import os
from functools import partial

import torch

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.memory.device_memory import DeviceMemory
from slora.memory.pool_sizing import MAX_SLOTS, find_full_page_bytes
from slora.models.affine import compute_affine
from slora.models.collectives import Collectives
from slora.models.float8_support import check_float8_kv
from slora.models.model import LoadModel, Model, load_model
from slora.models.model_spec import ModelSpec
from slora.models.step_batch import StepArrays
from slora_adapters.peft.validation import MAX_LABELS
from slora_kernels.batch import KVGeometry
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import MAX_ADDED_ROWS, Affine, lay_out_adapter
from slora_kernels.machine_limits import machine_limits
from slora_kernels.ops import Kernels


class ModelPart:
    """Loads the rank's part of the model. Raises ConfigError if it can't be served.

    shape: sizes of this rank's part. long_rows: first row of longrope's long factors in the rotary table. The rows of
    the short factors come before them.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, load: LoadModel, collectives: Collectives
    ) -> None:
        self.device = find_device(config, collectives.rank)
        self.dtype_name = spec.resolve_dtype(config.dtype)
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.kernels = load_kernels(config.kernels, self.device)
        if config.kv_format is KVFormat.FP8:
            check_float8_kv(self.device)
        spec.check_length(config.max_model_len)
        if spec.states and config.prompt_lookup_tokens:
            raise ConfigError(
                f"prompt_lookup_tokens is {config.prompt_lookup_tokens}, but this model ({spec.family}) has recurrent "
                "layers, whose state cannot return to the token before a wrong guess; set prompt_lookup_tokens to 0"
            )
        self.long_rows = wanted_len = config.max_model_len or spec.max_positions
        self.shape = spec.partition(self.dtype_name, collectives.size).rank_shape
        if collectives.size > 1:
            load = partial(load_model, collectives=collectives)
        self.model: Model = load(config, spec, dtype, self.device, wanted_len)
        self.geometry = KVGeometry.of(self.shape, config.block_tokens, dtype, config.kv_format)
        self.full_page_bytes = find_full_page_bytes(self.shape, config)
        self.footprint = spec.footprint(config.block_tokens, self.dtype_name, self.full_page_bytes)
        self._continues_states = spec.continues_states
        self._collectives = collectives
        num_modules = self.shape.num_modules
        affine = dict.fromkeys(range(num_modules), Affine(has_magnitude=True, replaces_bias=True))
        num_rows = spec.vocab_size + MAX_ADDED_ROWS
        rows = (num_rows, num_rows, MAX_LABELS)
        largest = lay_out_adapter(
            self.shape, [config.max_lora_rank] * num_modules, affine, rows, range(len(self.shape.norms))
        )
        self._max_adapter_pages = -(-largest.num_bytes // self.full_page_bytes)

    def make_memory(
        self, num_pages: int, num_host_pages: int = 0, num_slots: int = MAX_SLOTS
    ) -> DeviceMemory:
        return DeviceMemory(
            self.geometry,
            self.shape,
            self.full_page_bytes,
            num_pages,
            num_slots,
            self._max_adapter_pages,
            self.device,
            num_host_pages,
            self.footprint.state_pages,
            continues_states=self._continues_states,
        )

    def finish_adapters(self, memory: DeviceMemory, arrays: StepArrays) -> None:
        """Computes the final scales and offsets of a step's adapters, before it is the first step that uses them."""
        if not memory.has_unfinished:
            return
        for slot, adapter in memory.find_unfinished(arrays.slots).items():
            find_weight = partial(self.model.find_weight, kernels=self.kernels)
            memory.finish(slot, compute_affine(adapter, memory, self.shape, find_weight, self._collectives))


def find_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank. With several ranks, rank r computes on the r-th GPU."""
    device = resolve_device(config.device, config.kernels)
    is_divided = config.tensor_parallel_size > 1
    return torch.device("cuda", rank) if device.type == "cuda" and is_divided else device


def load_kernels(name: str, device: torch.device) -> Kernels:
    try:
        return select_kernels(name, device)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def limit_torch_threads() -> None:
    """Gives torch no more threads than the control group lets compute at once. Torch itself counts only the cores.

    The variables with which an operator sets the number of threads have precedence.
    """
    if not any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        torch.set_num_threads(min(torch.get_num_threads(), machine_limits().num_threads))


def resolve_device(name: str, kernels: str = "auto") -> torch.device:
    """Returns the device for the name `auto`, `cpu` or `cuda`.

    `auto` is a GPU if there is one, unless the kernels run only on a CPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; it must be auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and kernels != "cpu" else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; choose cpu or auto")
    return torch.device(name)
