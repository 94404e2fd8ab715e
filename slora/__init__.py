"""The engine of slora: many LoRA adapters over one base model, through one paged pool.

`LLM` is loaded when it is first asked for, so that processes that need no tensors never import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from slora.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slora.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return importlib.import_module("slora.llm").LLM
    raise AttributeError(f"module 'slora' has no attribute {name!r}")
