"""Compiles the CPU kernels into numba's cache on all cores, when the software is installed.

    python -P -m slora_kernels.cpu.precompile float32 bfloat16 float32/fp8

Each argument is a dtype, or a dtype and a KV format. `fastest` is the dtype in which this CPU is fastest. Without this
step, the first start of a server compiles the kernels that it needs, one after the other.
"""

import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch
from tqdm import tqdm

from slora_kernels.cpu.kernels import list_kernels
from slora_kernels.cpu_isa import multiplies_bfloat16
from slora_kernels.kv_format import KVFormat
from slora_kernels.machine_limits import machine_limits

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _compile(index: int, dtype: str, kv_format: KVFormat) -> None:
    list_kernels(_DTYPES[dtype], kv_format)[index]()


def _list_jobs(argument: str) -> list[tuple[int, str, KVFormat]]:
    dtype, _, kv_format = argument.partition("/")
    if dtype == "fastest":
        dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    if kv_format:
        # The others are the same for all formats.
        return [(index, dtype, KVFormat(kv_format)) for index in (-2, -1)]
    return [
        (index, dtype, KVFormat.MODEL) for index in range(len(list_kernels(_DTYPES[dtype], KVFormat.MODEL)))
    ]


def main() -> None:
    """Compiles the kernels that the command line names. Other kernels are compiled when they are first used."""
    started_at = time.monotonic()
    # Jobs are in reverse order because attention, the last kernel, takes longest to compile.
    jobs = sorted((job for argument in sys.argv[1:] for job in _list_jobs(argument)), reverse=True)
    print(f"Compiling {len(jobs)} CPU kernels ({', '.join(sys.argv[1:])}); about half a minute", flush=True)
    # A forked process does not have to import torch and numba again.
    with ProcessPoolExecutor(machine_limits().num_threads, mp_context=get_context("fork")) as pool:
        waiting = [pool.submit(_compile, *job) for job in jobs]
        shown = tqdm(
            as_completed(waiting), "CPU kernels", len(jobs), unit="kernel", leave=False, disable=None
        )
        for num_done, done in enumerate(shown, 1):
            done.result()
            if not sys.stderr.isatty():
                print(f"  {num_done} of {len(jobs)} after {time.monotonic() - started_at:.0f} s", flush=True)


if __name__ == "__main__":
    main()
