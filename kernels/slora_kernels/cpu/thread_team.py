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
from functools import partial
from pathlib import Path

from tqdm import tqdm

from slora_kernels.cpu.machine_code import CHAIN, Worker, find_worker, is_shipped
from slora_kernels.cpu.worker_sizes import MAX_SHARES, NEXT_ITEM, NEXT_WORKER, NUM_PREPARED, NUM_WORDS

_RUNTIME = re.compile(r"/lib(g|i)?omp[^/]*\.so[^/]*$")
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Enter = Callable[[int, int, int], None]
_NONE_TAKEN = array("q", bytes(8 * MAX_SHARES))


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


def _enter_openmp(parallel: Callable[..., None], worker: int, job: int, threads: int) -> None:
    parallel(worker, job, threads, 0)


def _bind_openmp() -> tuple[Enter, int] | None:
    """Returns how to enter the threads, and the address of the function that tells how many have entered."""
    for path in _find_runtimes():
        runtime = ctypes.CDLL(path)
        parallel = getattr(runtime, "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            count = ctypes.cast(runtime.omp_get_num_threads, ctypes.c_void_p).value
            return partial(_enter_openmp, parallel), count or 0
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
        self._enter, self._count_threads = bound or (_bind_python_threads(), 0)

    def run(self, worker: int, job: "array[int]", threads: int, *operands: object) -> None:
        """Runs a job and returns when all of its items are done. Within `collecting_jobs`, the job waits instead.

        worker: address of `void worker(void *job)`. threads: number of threads. operands: the tensors whose addresses
        are in the job and that the caller may drop.
        """
        if _queue.jobs is None:
            self.run_now(worker, job, threads)
        else:
            _queue.jobs.append(self, worker, job, threads, operands)

    def run_now(self, worker: int, job: "array[int]", threads: int) -> None:
        """See `run`."""
        address = job.buffer_info()[0]
        if threads == 1:
            _WORKER(worker)(address)
        else:
            self._enter(worker, address, threads)

    def link(self, calls: "array[int]", finished: "array[int]") -> "array[int]":
        """Returns the job of `CHAIN`. calls, finished: see there. Only the threads of OpenMP can run it."""
        count = len(finished)
        fields = (calls, count, 3), (finished, 1, count)
        words = [word for numbers, *shape in fields for word in (numbers.buffer_info()[0], *shape)]
        return array("q", (*[0] * NUM_WORDS, *words, self._count_threads, 0, 0))


class JobList:
    """Jobs that run in order. Each may read what the jobs before it write. They can run more than once, on the thread
    that made them: they point to scratch memory that its other jobs use, too.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._jobs: list[tuple[ThreadTeam, int, array[int], int]] = []
        # The tensors whose addresses are in the jobs.
        self._operands: list[tuple[object, ...]] = []
        self._calls, self._finished, self._chain = array("q"), array("q"), array("q")
        self._can_link, self._num_threads = True, 1
        # What the jobs point to and `run_again` has to compute from new inputs.
        self.refresh: list[Callable[[], None]] = []

    def append(
        self, team: ThreadTeam, worker: int, job: "array[int]", threads: int, operands: tuple[object, ...]
    ) -> None:
        """See `ThreadTeam.run`."""
        self._jobs.append((team, worker, job, threads))
        self._can_link, self._num_threads = self._can_link and team.openmp, max(self._num_threads, threads)
        self._operands.append(operands)

    def run_again(self) -> None:
        """Runs all jobs after the content of tensors that they read has changed."""
        assert self._thread == threading.get_ident(), "another thread made these jobs"
        for refresh in self.refresh:
            refresh()
        self.run()

    def run(self) -> None:
        """Runs all jobs. Nothing may be appended afterwards."""
        if not self._can_link:
            for team, worker, job, threads in self._jobs:
                # Reset before and not after, because Ctrl-C may end the last run between two jobs.
                job[NEXT_WORKER] = job[NUM_PREPARED] = 0
                job[NEXT_ITEM : NEXT_ITEM + MAX_SHARES] = _NONE_TAKEN
                team.run_now(worker, job, threads)
        elif self._jobs:
            self._run_chain()

    def _run_chain(self) -> None:
        team = self._jobs[0][0]
        if not self._chain:
            for _, worker, job, threads in self._jobs:
                self._calls.extend((worker, job.buffer_info()[0], threads))
            self._finished = array("q", bytes(8 * len(self._jobs)))
            self._chain = team.link(self._calls, self._finished)
        address, count = self._finished.buffer_info()
        ctypes.memset(address, 0, 8 * count)
        self._chain[NEXT_WORKER] = 0
        team.run_now(find_worker(CHAIN, "float32"), self._chain, self._num_threads)


class _Queue(threading.local):
    """The list that the jobs of one thread join. None: jobs run at once."""

    jobs: JobList | None = None


_queue = _Queue()


def refresh_jobs(refresh: Callable[[], None]) -> None:
    """Calls `refresh` before the jobs that this thread collects, if it does, run again."""
    if _queue.jobs is not None:
        _queue.jobs.refresh.append(refresh)


@contextmanager
def collecting_jobs() -> Iterator[Callable[[], None]]:
    """Runs the jobs that this thread makes in the context at its end, in order. An error in the context drops them.

    Yields a function that runs them again, once the content of tensors that they read has changed.

    Until then, only further jobs may read what a job writes. A job that reads weights evicts Python's data from the
    CPU caches, and making the next job then takes twice as long: 3 ms of a step of 23 ms (0.65B in int4, one token).
    """
    assert _queue.jobs is None, "jobs are already collected"
    jobs = _queue.jobs = JobList()
    try:
        yield jobs.run_again
    finally:
        _queue.jobs = None
    jobs.run()
