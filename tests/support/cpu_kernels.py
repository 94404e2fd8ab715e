"""The kernels that a CPU can run here; numba's are an extra."""

import importlib.util

import pytest

CPU_KERNELS = ["torch"]
if importlib.util.find_spec("numba") and importlib.util.find_spec("slora_kernels.cpu.kernels"):
    CPU_KERNELS.append("numba")

# What tests use that are not about kernels.
KERNELS = CPU_KERNELS[-1]
# For tests of many cases, which say more of the engine than of kernels: the others in soak only.
MOSTLY_FASTEST = [*(pytest.param(name, marks=pytest.mark.soak) for name in CPU_KERNELS[:-1]), KERNELS]
