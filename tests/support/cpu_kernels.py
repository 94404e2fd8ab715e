"""The kernels that this machine's CPU can run. The kernels "cpu" need machine code, or numba to compile it."""

import pytest
import torch

from slora_kernels.cpu.machine_code import has_workers

CPU_KERNELS = ["torch"]
if has_workers():
    CPU_KERNELS.append("cpu")

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
# For tests of whole engines that also run on a GPU.
FASTEST = {"device": TRITON_DEVICE, "kernels": "triton" if torch.cuda.is_available() else KERNELS}
