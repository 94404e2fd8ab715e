"""The kernels that this machine's CPU can run. The numba kernels are an optional extra."""

import importlib.util

import pytest
import torch

CPU_KERNELS = ["torch"]
if importlib.util.find_spec("numba") and importlib.util.find_spec("slora_kernels.cpu.kernels"):
    CPU_KERNELS.append("numba")

# For a few tests of the whole engine that run natively on a GPU, too.
ENGINE_KERNELS = [
    *CPU_KERNELS,
    pytest.param("triton", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]
# Used by tests that do not test kernels.
KERNELS = CPU_KERNELS[-1]
# For tests with many cases that test the engine more than the kernels. The other kernels run in soak only.
MOSTLY_FASTEST = [*(pytest.param(name, marks=pytest.mark.soak) for name in CPU_KERNELS[:-1]), KERNELS]
# Where Triton's kernels run: a CPU interprets them.
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
