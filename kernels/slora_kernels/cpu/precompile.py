"""Compiles the CPU kernels into the compiler's cache, once, when the software is installed.

    python -P -m slora_kernels.cpu.precompile

Without this, the first start of a server compiles them, which takes about twenty seconds. This does nothing if the
kernels chosen for the CPU need no compiling.
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
    """Compiles for each dtype. Sizes do not matter, because they are run-time arguments.

    KV in fp8 is not compiled here. The first start of a server with that format compiles it.
    """
    started_at = time.monotonic()
    # Attention is the last kernel and takes longest, so it goes first.
    jobs = [(index, dtype) for index in reversed(range(NUM_KERNELS)) for dtype in sys.argv[1:]]
    print(f"Compiling {len(jobs)} CPU kernels ({', '.join(sys.argv[1:])}); about half a minute", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_compile, *job) for job in jobs]
        for num_done, done in enumerate(as_completed(waiting), 1):
            done.result()
            print(f"  {num_done} of {len(jobs)} after {time.monotonic() - started_at:.0f} s", flush=True)


if __name__ == "__main__":
    main()
