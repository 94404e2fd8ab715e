"""Every kernel test runs on every implementation. Triton runs natively on a GPU and in its interpreter elsewhere."""

import os
from collections.abc import Iterator

import pytest
import torch

from slora_kernels.cpu.machine_code import has_workers
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.ops import Kernels

# Deterministic mode (see `poisoned_memory`) needs this variable before the GPU's first matmul.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

NAMES = ("torch", "triton") + (("cpu",) if has_workers() else ())


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select_kernels(request.param, torch.device("cpu"))


@pytest.fixture
def device(kernels: Kernels) -> str:
    """The device of the kernels under test: a GPU if there is one, except for CPU kernels."""
    return "cuda" if torch.cuda.is_available() and kernels.name != "cpu" else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills new tensors with NaN, so that a result that depends on uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
