"""Compiles the CPU kernels into numba's cache on all cores, when the software is installed.

    python -P -m slora_kernels.cpu.precompile float32 bfloat16

Without this, the first start of a server compiles the kernels that it needs, one after the other.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from slora_kernels.cpu.kernels import NUM_KERNELS, compile_kernel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _compile(index: int, dtype: str) -> None:
    compile_kernel(index, _DTYPES[dtype])


def main() -> None:
    """Compiles for the dtypes on the command line. KV in fp8 is compiled at the first start that uses it."""
    started_at = time.monotonic()
    # Jobs are in reverse order because attention, the last kernel, takes longest to compile.
    jobs = [(index, dtype) for index in reversed(range(NUM_KERNELS)) for dtype in sys.argv[1:]]
    print(f"Compiling {len(jobs)} CPU kernels ({', '.join(sys.argv[1:])}); about half a minute", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_compile, *job) for job in jobs]
        for num_done, done in enumerate(as_completed(waiting), 1):
            done.result()
            print(f"  {num_done} of {len(jobs)} after {time.monotonic() - started_at:.0f} s", flush=True)


if __name__ == "__main__":
    main()
