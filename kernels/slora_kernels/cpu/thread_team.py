"""Runs one compiled worker on all the threads that torch itself uses.

A worker is a C function of one pointer, a job, from which every thread takes items until none are left; so a
thread that the machine holds up costs little, and results do not depend on who did what. The threads are those of
the OpenMP runtime that torch has loaded, entered through its GOMP_parallel. A second pool (numba's own, say) makes
two sets of threads fight for the cores: alternating a torch matmul with a kernel was 15 to 30% slower (2 cores,
shared; medians). Knows nothing of numba or of tensors.
"""

import ctypes
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_RUNTIME = re.compile(r"/lib(g|i)?omp[^/]*\.so[^/]*$")
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Enter = Callable[[int, int, int], None]


def _find_runtimes() -> list[str]:
    """OpenMP runtimes loaded into this process, torch's own before a system's."""
    lines = Path("/proc/self/maps").read_text().splitlines()
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
    """The fallback without OpenMP: ctypes lets go of the GIL while a worker runs."""
    pool = ThreadPoolExecutor(thread_name_prefix="slora-kernels")

    def enter(worker: int, job: int, threads: int) -> None:
        call = _WORKER(worker)
        others = [pool.submit(call, job) for _ in range(threads - 1)]
        call(job)
        for other in others:
            other.result()

    return enter


class ThreadTeam:
    """openmp: whether torch's own threads do the work."""

    def __init__(self, *, allow_openmp: bool = True) -> None:
        bound = _bind_openmp() if allow_openmp else None
        self.openmp = bound is not None
        self._enter = bound or _bind_python_threads()

    def run(self, worker: int, job: int, threads: int) -> None:
        """worker: address of `void worker(void *job)`; returns when all items of the job are done."""
        if threads == 1:
            _WORKER(worker)(job)
        else:
            self._enter(worker, job, threads)
