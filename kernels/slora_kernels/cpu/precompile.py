"""Compiles the workers of the CPU kernels ahead of their first use. It needs numba, and no torch.

    python -P -m slora_kernels.cpu.precompile float32 bfloat16 float32/fp8

compiles into numba's cache in a checkout. Each argument is a dtype, a dtype and a KV format, or a worker and a dtype,
as in `attend_worker:bfloat16`. `fastest` is the dtype in which this CPU is fastest. Without this step, the first start
of a server compiles the workers that it needs.

    SLORA_CPU_ISA=neon python -P -m slora_kernels.cpu.precompile --library FILE

compiles all workers for an instruction set, which this machine need not have, and links them to a library for a wheel.
`--worker NAME` selects workers.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from slora_kernels.cpu.machine_code import WORKERS, Worker, find_worker, list_model_workers
from slora_kernels.cpu.workers.compiler import emit_object
from slora_kernels.cpu_isa import CPU_ISAS, find_cpu_isa, multiplies_bfloat16
from slora_kernels.kv_format import KVFormat
from slora_kernels.machine_limits import machine_limits

_Job = tuple[Worker, str]


def _list_jobs(argument: str) -> list[_Job]:
    name, _, own = argument.rpartition(":")
    if name:
        (worker,) = _choose_workers([name])
        if own not in worker.dtypes:
            raise SystemExit(f"{name} computes no {own}; choose one of {', '.join(worker.dtypes)}")
        return [(worker, own)] if worker.suits() else []
    dtype, _, kv_format = argument.partition("/")
    if dtype == "fastest":
        dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    # The last two depend on the KV format. Attention takes longest to compile, so it comes first.
    workers = list_model_workers(dtype, KVFormat(kv_format or "auto"))[-2 if kv_format else 0 :]
    return [*reversed(workers)]


def _choose_workers(names: Sequence[str]) -> list[Worker]:
    """All workers if there are no names."""
    unknown = sorted(set(names) - {worker.name for worker in WORKERS})
    if unknown:
        raise SystemExit(f"there is no worker {', '.join(unknown)}")
    return [worker for worker in WORKERS if worker.name in names or not names]


def _list_library_jobs(names: Sequence[str]) -> list[_Job]:
    return [(worker, dtype) for worker in _choose_workers(names) if worker.suits() for dtype in worker.dtypes]


def _emit(folder: str, worker: Worker, dtype: str) -> None:
    Path(folder, f"{worker.symbol(dtype)}.o").write_bytes(emit_object(worker, dtype))


def _link(objects: Sequence[Path], library: Path, machine: str) -> None:
    """Links object files for a kind of CPU to a library. Raises SystemExit if there is no linker."""
    paths = map(str, sorted(objects))
    options = ("-shared", "-o", str(library), "-z", "noexecstack", "--build-id=none", *paths)
    is_native = machine == platform.machine()
    names = (*(("ld",) if is_native else ()), f"{machine}-linux-gnu-ld", "ld.lld")
    for name in names:
        if shutil.which(name) is not None:
            # The calls of the C library stay undefined. Each process has loaded it, whatever its version is.
            subprocess.run([name, *options], check=True)
            return
    raise SystemExit(
        f"a wheel with machine code for {machine} needs one of the linkers {', '.join(names)}, and none is installed; "
        f"install the package binutils-{machine.replace('_', '-')}-linux-gnu or lld, or set "
        "SLORA_WHEEL_ISAS to an empty value for a wheel without machine code, which then needs numba"
    )


def _run_all(call: Callable[..., object], jobs: Sequence[tuple[object, ...]]) -> None:
    """Calls a function with the arguments of each job, in one process for each core, and prints the progress."""
    started_at = time.monotonic()
    # A forked process does not have to import numba again.
    with ProcessPoolExecutor(machine_limits().num_threads, mp_context=get_context("fork")) as pool:
        for num_done, done in enumerate(as_completed([pool.submit(call, *job) for job in jobs]), 1):
            done.result()
            is_last = num_done == len(jobs)
            line = f"  {num_done} of {len(jobs)} after {time.monotonic() - started_at:.0f} s"
            print(line, flush=True, end="\n" if is_last or not sys.stdout.isatty() else "\r")


def main() -> None:
    """Compiles what the command line names. Other workers are compiled when they are first used."""
    parser = argparse.ArgumentParser(description="Compiles the CPU kernels.")
    parser.add_argument("models", nargs="*", help="as in float32, float32/fp8 or int8_worker:float32")
    parser.add_argument("--library", type=Path, help="link all workers to this library")
    parser.add_argument("--worker", action="append", default=[], help="only this worker of the library")
    arguments = parser.parse_args()
    if arguments.library is None:
        # Models of several dtypes share some.
        jobs = list(dict.fromkeys(job for argument in arguments.models for job in _list_jobs(argument)))
        print(
            f"Compiling {len(jobs)} CPU kernels ({', '.join(arguments.models)}); about half a minute",
            flush=True,
        )
        _run_all(find_worker, jobs)
        return
    isa = find_cpu_isa()
    if isa not in CPU_ISAS:
        raise SystemExit(
            f"a library needs an instruction set; set SLORA_CPU_ISA to one of {', '.join(CPU_ISAS)}"
        )
    with tempfile.TemporaryDirectory(prefix="slora-kernels-") as folder:
        jobs = _list_library_jobs(arguments.worker)
        print(f"Compiling {len(jobs)} CPU kernels into {arguments.library}", flush=True)
        _run_all(_emit, [(folder, *job) for job in jobs])
        _link(list(Path(folder).iterdir()), arguments.library, CPU_ISAS[isa].machine)


if __name__ == "__main__":
    main()
