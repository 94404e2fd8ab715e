"""A small random adapter that the server accepts. Its shapes come from the server's list of adaptable modules."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# NumPy would import this module on first use, and that import swallows a KeyboardInterrupt.
from numpy.random import default_rng
from safetensors.numpy import save

__all__ = ["RandomAdapter", "make_adapter"]

# With alpha 16, the adapter adds about 0.8 to the outputs of the modules. This changes the answers of a model in
# bfloat16, and is far from overflow.
_ALPHA, _B_SCALE = 16, 0.05


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    config: bytes
    weights: bytes

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        """Returns the multipart files of an upload."""
        return {
            "config": ("adapter_config.json", self.config),
            "weights": ("adapter_model.safetensors", self.weights),
        }


def make_adapter(modules: list[Mapping[str, Any]], seed: int) -> RandomAdapter:
    """Makes an adapter of rank 1 for all modules of the first kind, such as all q_proj.

    modules: the answer of GET /v1/adapter-modules.
    """
    name = _last_name(modules[0])
    random = default_rng(seed)
    tensors = {}
    for module in modules:
        if _last_name(module) == name:
            path, width, height = module["path"], module["in_features"], module["out_features"]
            a = random.standard_normal((1, width), np.float32) / np.sqrt(width, dtype=np.float32)
            b = random.standard_normal((height, 1), np.float32) * np.float32(_B_SCALE)
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": _ALPHA, "target_modules": [name]}
    return RandomAdapter(json.dumps(config).encode(), save(tensors))


def _last_name(module: Mapping[str, Any]) -> str:
    name: str = module["path"].rpartition(".")[2]
    return name
