"""Chooses the implementation of the kernels at start.

Only the chosen implementation is imported, so triton and numba need not be installed on every machine.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import cast

import torch

from slora_kernels.cpu_isa import check_cpu_isa, find_cpu_isa
from slora_kernels.kernel_cache import prepare_triton_cache
from slora_kernels.ops import Kernels

_CLASSES = {
    "triton": ("slora_kernels.gpu.triton_kernels", "TritonKernels"),
    "torch": ("slora_kernels.torch.torch_kernels", "TorchKernels"),
    "cpu": ("slora_kernels.cpu.kernels", "CpuKernels"),
}


def kernel_class(name: str) -> type:
    """The class of the implementation `name`. Raises KeyError for an unknown name."""
    module, class_name = _CLASSES[name]
    return cast(type, getattr(importlib.import_module(module), class_name))


def _choose(device: torch.device) -> str:
    if device.type != "cpu":
        return "triton"
    return "cpu" if _has_workers() else "torch"


def _has_workers() -> bool:
    has_workers: bool = importlib.import_module("slora_kernels.cpu.machine_code").has_workers()
    return has_workers


def find_tile_weights() -> ModuleType | None:
    """The module with the weights for our own products. None if this CPU has neither AMX nor AVX-512 BF16, or if there
    is no machine code for it.
    """
    if find_cpu_isa() not in ("avx512_bf16", "amx") or not _has_workers():
        return None
    return importlib.import_module("slora_kernels.cpu.tile_weights")


def find_token_recurrence() -> ModuleType | None:
    """The module that computes one token of recurrent layers by machine code. None if there is none for this CPU."""
    return importlib.import_module("slora_kernels.cpu.token_recurrence") if _has_workers() else None


def select_kernels(name: str, device: torch.device) -> Kernels:
    """Loads the implementation `name`. "auto" selects triton on a GPU, and on a CPU the kernels "cpu" if there
    is machine code for them, or numba to compile it, else torch.

    Raises ValueError for an unknown name, for an implementation that cannot run on `device`, and for an instruction set
    that could not be forced.
    """
    check_cpu_isa()
    chosen = _choose(device) if name == "auto" else name
    if chosen not in _CLASSES:
        raise ValueError(f"there are no kernels named {name!r}; choose one of auto, {', '.join(_CLASSES)}")
    if chosen == "cpu" and device.type != "cpu":
        raise ValueError(f"the kernels 'cpu' run only on a CPU, not on {device}; choose auto or triton")
    if chosen == "cpu" and not _has_workers():
        raise ValueError(
            "this installation has no machine code of the kernels 'cpu' for this CPU, so they need the package numba: "
            "pip install numba"
        )
    if chosen == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("the kernels 'triton' need the package triton: pip install 'slora[gpu]'")
    if chosen == "triton":
        prepare_triton_cache()
    return cast(Kernels, kernel_class(chosen).on(device))  # type: ignore[attr-defined]
