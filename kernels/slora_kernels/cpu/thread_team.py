"""Loads workers, and runs one of them on all the threads that torch itself uses.

A worker is a C function with one argument, a pointer to a job. Every thread takes items from the job until none are
left. A thread that the operating system delays therefore costs little, and results do not depend on which thread
computed which item.

The threads belong to the OpenMP runtime that torch has loaded. The runtime's GOMP_parallel calls the worker on them. A
second thread pool, such as numba's own, would compete with torch's threads for the cores. With two pools, alternating a
torch matmul with a kernel was 15 to 30% slower (medians, two shared cores).

This module depends on neither numba nor tensors.
"""

import ctypes
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from slora_kernels.cpu.machine_code import Worker, find_worker, is_shipped

_RUNTIME = re.compile(r"/lib(g|i)?omp[^/]*\.so[^/]*$")
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Enter = Callable[[int, int, int], None]


def load_workers(workers: Iterable[tuple[Worker, str]]) -> None:
    """Loads workers for models of a dtype each, and compiles those that there are not, with a progress bar."""
    for worker, dtype in tqdm(
        [*workers], "CPU kernels", unit="kernel", leave=False, disable=is_shipped() or None
    ):
        find_worker(worker, dtype)


def _find_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes loaded into this process. The runtime that torch ships comes first."""
    lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if _RUNTIME.search(line)}
    return sorted(paths, key=lambda path: ("/torch" not in path, path))


def _bind_openmp() -> Enter | None:
    for path in _find_runtimes():
        parallel = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            return lambda worker, job, threads: parallel(worker, job, threads, 0)
    return None


def _bind_python_threads() -> Enter:
    """Returns a function that runs the worker on Python threads. It is the fallback without OpenMP.

    ctypes releases the GIL while a worker runs.
    """
    pool = ThreadPoolExecutor(thread_name_prefix="slora-kernels")

    def enter(worker: int, job: int, threads: int) -> None:
        call = _WORKER(worker)
        others = [pool.submit(call, job) for _ in range(threads - 1)]
        call(job)
        for other in others:
            other.result()

    return enter


class ThreadTeam:
    """The threads that run workers.

    openmp: whether the threads are torch's own.
    """

    def __init__(self, *, allow_openmp: bool = True) -> None:
        bound = _bind_openmp() if allow_openmp else None
        self.openmp = bound is not None
        self._enter = bound or _bind_python_threads()

    def run(self, worker: int, job: "array[int]", threads: int, *operands: object) -> None:
        """Runs a job and returns when all of its items are done. Within `collecting_jobs`, the job waits instead.

        worker: address of `void worker(void *job)`. threads: number of threads. operands: the tensors whose addresses
        are in the job and that the caller may drop.
        """
        if _queue.jobs is None:
            self._run(worker, job, threads)
        else:
            _queue.jobs.append((self, worker, job, threads, operands))

    def _run(self, worker: int, job: "array[int]", threads: int) -> None:
        address = job.buffer_info()[0]
        if threads == 1:
            _WORKER(worker)(address)
        else:
            self._enter(worker, address, threads)


class _Queue(threading.local):
    """The jobs of one thread that wait. None: jobs run at once."""

    jobs: "list[tuple[ThreadTeam, int, array[int], int, tuple[object, ...]]] | None" = None


_queue = _Queue()


@contextmanager
def collecting_jobs() -> Iterator[None]:
    """Runs the jobs that this thread makes in the context at its end, in order. An error in the context drops them.

    Until then, only further jobs may read what a job writes. A job that reads weights evicts Python's data from the
    CPU caches, and making the next job then takes twice as long: 3 ms of a step of 23 ms (0.65B in int4, one token).
    """
    assert _queue.jobs is None, "jobs are already collected"
    jobs = _queue.jobs = []
    try:
        yield
    finally:
        _queue.jobs = None
    for team, worker, job, threads, _ in jobs:
        team._run(worker, job, threads)
