"""Every kernel test runs on every implementation: Triton natively on a GPU, in its interpreter elsewhere."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from slora_kernels.ops import Kernels, select_kernels

NAMES = ("torch", "triton") + (("numba",) if importlib.util.find_spec("numba") else ())


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select_kernels(request.param, torch.device("cpu"))


@pytest.fixture
def device(kernels: Kernels) -> str:
    """Where the kernels under test run: a GPU if there is one, except for those that are a CPU's."""
    return "cuda" if torch.cuda.is_available() and kernels.name != "numba" else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN, so that a result which reads what nobody wrote shows it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
