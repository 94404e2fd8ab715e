"""Checks the directory of the base model: its config, its tokenizer, and the headers of its weights."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slora.byte_text import format_bytes
from slora.errors import ConfigError
from slora.models.model_spec import ELEMENT_BYTES
from slora.weights.checkpoint import Checkpoint
from slora_api.doctor.finding import Finding, fine
from slora_api.doctor.shared_fact import SharedFact
from slora_api.server.base_model_files import BaseModelFiles
from slora_api.settings import Settings

__all__ = ["MODEL_LIMIT_S", "Model", "check_model", "find_model"]

# The check takes longer if slora's decoder does not support the model's family. The model is then built once with torch
# to find its structure.
MODEL_LIMIT_S = 120.0
_UNQUANTIZED = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Model:
    """The facts about the base model. num_tensors: the number of tensors in the checkpoint. num_bytes: the approximate
    memory that its weights take.
    """

    files: BaseModelFiles
    num_tensors: int
    num_bytes: int


def find_model(settings: Settings) -> Model:
    """Reads the files of the base model that a server reads before it starts its engine. Raises ConfigError."""
    if not settings.engine.model.is_dir():
        raise ConfigError(
            f"{settings.engine.model} is not a directory; give the base model's directory in --model (SLORA_MODEL)"
        )
    files = BaseModelFiles(settings)
    checkpoint = Checkpoint(settings.engine.model)
    element_bytes = ELEMENT_BYTES[files.dtype]
    num_tensors = num_bytes = 0
    for name in checkpoint:
        tensor = checkpoint.find(name)
        num_tensors += 1
        if tensor.dtype not in _UNQUANTIZED:
            num_bytes += tensor.num_bytes
        elif settings.engine.quantization != "auto" and name.endswith("proj.weight"):
            num_bytes += math.prod(tensor.shape)
        else:
            num_bytes += math.prod(tensor.shape) * element_bytes
    return Model(files, num_tensors, num_bytes)


def check_model(model: SharedFact[Model]) -> Iterator[Finding]:
    found = model.get()
    spec = found.files.config
    decoder = "slora's decoder" if spec.decoder else "transformers' classes"
    yield fine(
        f"{found.files.name}: {spec.family}, computed by {decoder} in {found.files.dtype}; {found.num_tensors} "
        f"tensors, {format_bytes(found.num_bytes)}"
    )
