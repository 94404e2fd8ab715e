"""Small adapters built without torch or PEFT, valid or with any fault that a test needs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import parse_adapter
from slora_kernels.layout import ModelShape, llama_shape

SHAPE = llama_shape(2, 24, 4, 2, 6, 40, vocab_size=50, element_bytes=4)
Tensors = dict[str, np.ndarray]


def tensor_name(layer: int, module: int, factor: str) -> str:
    return f"base_model.model.model.layers.{layer}.{SHAPE.linears[module].path}.lora_{factor}.weight"


def make_config(**changes: object) -> dict[str, object]:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    return {**config, **changes}


def make_tensors(rank: int = 2, seed: int = 0, shape: ModelShape = SHAPE) -> Tensors:
    """Random tensors for q_proj and down_proj of every layer."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(shape.num_layers):
        for module in (0, 6):
            sizes = {
                "A": (rank, shape.linears[module].in_width),
                "B": (shape.linears[module].out_width, rank),
            }
            for factor, size in sizes.items():
                tensors[tensor_name(layer, module, factor)] = random.standard_normal(size, np.float32)
    return tensors


def make_members(
    config: Mapping[str, object] | None = None, tensors: Tensors | None = None, **extras: str
) -> dict[str, bytes]:
    """The files of an adapter by name. extras: further files; `_dot_` in a keyword stands for the dot of the file
    name."""
    members = {
        "adapter_config.json": json.dumps(make_config() if config is None else config).encode(),
        "adapter_model.safetensors": save(make_tensors() if tensors is None else tensors),
    }
    return members | {name.replace("_dot_", "."): text.encode() for name, text in extras.items()}


def write_directory(directory: Path, members: Mapping[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, raw in members.items():
        (directory / name).write_bytes(raw)
    return directory


def reason_codes(members: Mapping[str, bytes], limits: AdapterLimits | None = None) -> list[str]:
    """Codes of all reasons for a refusal, in order and without repeats. Empty if the adapter is accepted."""
    try:
        parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, limits or AdapterLimits())
    except AdapterInvalid as error:
        return list(dict.fromkeys(reason.code for reason in error.reasons))
    return []


def changed(tensors: Tensors, change: Callable[[Tensors], object]) -> Tensors:
    change(tensors)
    return tensors
