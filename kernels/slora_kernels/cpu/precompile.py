"""Compiles the CPU kernels into the compiler's cache, once, when the software is installed.

    python -P -m slora_kernels.cpu.precompile

Without it the first start of a server does the same, and takes some twenty seconds longer. Does nothing where the
kernels chosen for a CPU need no compiling.
"""

import torch

from slora_kernels.batch import KVGeometry
from slora_kernels.kernel_selector import select_kernels

_DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """Only dtypes decide what is compiled: sizes are arguments. KV in fp8 is left to the first start that wants it."""
    kernels = select_kernels("auto", torch.device("cpu"))
    for dtype in _DTYPES:
        kernels.warm_up(
            KVGeometry(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, block_tokens=16, dtype=dtype)
        )


if __name__ == "__main__":
    main()
