"""The kernels that a CPU can run here; numba's are an extra."""

import importlib.util

CPU_KERNELS = ["torch"]
if importlib.util.find_spec("numba") and importlib.util.find_spec("slora_kernels.numba_kernels"):
    CPU_KERNELS.append("numba")

# What tests use that are not about kernels.
KERNELS = CPU_KERNELS[-1]
