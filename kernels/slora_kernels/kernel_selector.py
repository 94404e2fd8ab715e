"""Chooses the implementation of the kernels at start.

Only the chosen implementation is imported, so triton and numba need not be installed on every machine.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import cast

import torch

from slora_kernels.cpu_isa import check_cpu_isa, find_cpu_isa, permits_tiles
from slora_kernels.kernel_cache import prepare_triton_cache
from slora_kernels.ops import Kernels

_CLASSES = {
    "triton": ("slora_kernels.gpu.triton_kernels", "TritonKernels"),
    "torch": ("slora_kernels.torch.torch_kernels", "TorchKernels"),
    "numba": ("slora_kernels.cpu.kernels", "NumbaKernels"),
}
# The extras that bring the packages of these names.
_EXTRAS = {"triton": "gpu", "numba": "cpu"}


def kernel_class(name: str) -> type:
    """The class of the implementation `name`. Raises KeyError for an unknown name."""
    module, class_name = _CLASSES[name]
    return cast(type, getattr(importlib.import_module(module), class_name))


def _choose(device: torch.device) -> str:
    if device.type != "cpu":
        return "triton"
    return "numba" if importlib.util.find_spec("numba") is not None else "torch"


def find_tile_weights() -> ModuleType | None:
    """The module with the weights that the tiles of this CPU (AMX) multiply. None if there are no tiles, or if numba,
    which compiles their kernels, is not installed.
    """
    if find_cpu_isa() != "amx" or not permits_tiles() or importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("slora_kernels.cpu.tile_linear")


def select_kernels(name: str, device: torch.device) -> Kernels:
    """Loads the implementation `name`. "auto" selects triton on a GPU, numba on a CPU if installed, else torch.

    Raises ValueError for an unknown name, for an implementation that cannot run on `device`, and for an instruction set
    that could not be forced.
    """
    check_cpu_isa()
    chosen = _choose(device) if name == "auto" else name
    if chosen not in _CLASSES:
        raise ValueError(f"there are no kernels named {name!r}; choose one of auto, {', '.join(_CLASSES)}")
    if chosen == "numba" and device.type != "cpu":
        raise ValueError(f"the kernels 'numba' run only on a CPU, not on {device}; choose auto or triton")
    if (extra := _EXTRAS.get(chosen)) is not None and importlib.util.find_spec(chosen) is None:
        raise ValueError(f"the kernels {chosen!r} need the package {chosen}: pip install 'slora[{extra}]'")
    if chosen == "triton":
        prepare_triton_cache()
    return cast(Kernels, kernel_class(chosen).on(device))  # type: ignore[attr-defined]
