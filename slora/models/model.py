"""The interface between the engine's steps and the model, which is our decoder or a class of transformers."""

import importlib
import logging
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.memory.device_memory import DeviceMemory
from slora.models.affine import SiteWeight
from slora.models.collectives import ALONE, Collectives
from slora.models.decoder import Decoder
from slora.models.float8_support import supports_float8
from slora.models.lora_deltas import LoraDeltas
from slora.models.model_config import ModelConfig
from slora.models.model_spec import ModelSpec
from slora.models.step_batch import StepBatch
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.linear import FORMS
from slora.models.weights.weight_reader import WeightReader
from slora_kernels.batch import KVGeometry
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels

_log = logging.getLogger(__name__)


class Model(Protocol):
    @property
    def can_embed(self) -> bool:
        """Whether `forward` accepts batches with prompts to embed."""

    def forward(self, batch: StepBatch, memory: DeviceMemory, kernels: Kernels) -> Tensor:
        """Writes the step's KV into its pages. Returns hidden states [B', H] of the rows in `output_rows`.

        The rows of `pooled` equal transformers' `last_hidden_state`. All other rows are the input of the output head.
        """

    def logits(self, hidden: Tensor, deltas: LoraDeltas) -> Tensor:
        """Computes logits [N, vocab_size] from hidden states [N, H]. deltas: LoRA at the output head.

        If the adapter of a row has added tokens, there are MAX_ADDED_ROWS more columns. They are minus infinity in the
        rows whose adapter does not have them.
        """

    def find_weight(self, site: LoraSite, kernels: Kernels) -> SiteWeight:
        """The base model's weight at a site."""

    def warm_up(self, kernels: Kernels) -> None:
        """Compiles the machine code that only models of this kind need. Called before `check`."""

    def check(self, geometry: KVGeometry, kernels: Kernels) -> None:
        """Called once before the model is served. Raises ConfigError if a computation through pages would be wrong."""


# The type of `load_model`, for callers that create a model's weights instead of reading them.
LoadModel = Callable[[EngineConfig, ModelSpec, torch.dtype, torch.device, int], Model]


def load_model(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    collectives: Collectives = ALONE,
) -> Model:
    """Loads the model in `config.model`. Raises ConfigError if its files do not match its config.json.

    collectives: the group of ranks that this process belongs to. Each rank loads its own part of the model.
    """
    spec.check_quantization(config.quantization)
    if spec.decoder is not None:
        weights = _open_weights(config, spec.decoder, dtype, device)
        return Decoder(spec.decoder, weights, max_model_len, collectives)
    # Imported by name, because importing transformers takes seconds that our own decoder does not need.
    module = importlib.import_module("slora.models.transformers_decoder")
    return cast(Model, module.TransformersDecoder(spec, config.model, dtype, device, collectives))


def _open_weights(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> WeightReader:
    """Opens the checkpoint. Raises ConfigError if the weights can't be quantized as requested, or if this device can't
    multiply with them.
    """
    name, stored = config.quantization, model.quantization
    block = stored.block if stored is not None else None
    by_row = stored.form if stored is not None and block is None else None
    if "fp8" in (name, by_row) and device.type == "cuda" and not supports_float8(device):
        raise ConfigError(
            "weights in fp8 need a GPU of compute capability 8.9 or later; choose --quantization int8"
        )
    if "int4" in (name, by_row) and device.type != "cpu" and model.experts is not None:
        remedy = "choose" if by_row is None else "use the unquantized checkpoint with"
        raise ConfigError(
            f"experts in int4 are multiplied on CPUs only, and this model ({model.family}) has {model.experts.count} "
            f"in a layer; {remedy} --quantization int8 or fp8"
        )
    form = None if name == "auto" or by_row is not None else FORMS[name]
    codes = stored.codes if stored is not None else None
    checkpoint = Checkpoint(config.model)
    if name == "auto" and checkpoint.gguf_types:
        _log.info(
            "the weights are stored as %s and served as numbers of %s, which take as much memory as those of an "
            "unquantized checkpoint. --quantization int4 keeps the numbers of Q4_0, Q4_1 and Q4_K as they are stored, "
            "and int8 rounds all to 8 bits.",
            " and ".join(checkpoint.gguf_types),
            str(dtype).removeprefix("torch."),
        )
    return WeightReader(checkpoint, dtype, device, form=form, block=block, codes=codes)
