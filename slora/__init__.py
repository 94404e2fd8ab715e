"""The engine of slora: many LoRA adapters on one base model, in one page pool.

Classes that need tensors are imported at their first use, so that processes without a model never import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

import slora_kernels  # noqa: F401  # It forces an instruction set before torch is loaded.
from slora.core.request import Pooling, PoolingKind
from slora.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slora.llm.async_llm import AsyncLLM
    from slora.llm.llm import LLM
    from slora.llm.lora_adapter import LoraAdapter
    from slora.text.answer import Choice, Completion, CompletionDelta

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Completion",
    "CompletionDelta",
    "LoraAdapter",
    "Pooling",
    "PoolingKind",
    "SamplingParams",
]

_MODULES = {
    "AsyncLLM": "slora.llm.async_llm",
    "Choice": "slora.text.answer",
    "Completion": "slora.text.answer",
    "CompletionDelta": "slora.text.answer",
    "LLM": "slora.llm.llm",
    "LoraAdapter": "slora.llm.lora_adapter",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'slora' has no attribute {name!r}")
