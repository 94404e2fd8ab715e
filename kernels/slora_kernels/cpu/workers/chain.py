"""Runs a list of jobs, one after the other, in a single call of the threads.

Between two jobs, the threads wait for each other. That takes less than a microsecond, and a call of its own for each
job from Python takes several: a step of a small model has a hundred jobs of a few microseconds each.
"""

from slora_kernels.cpu.workers.intrinsics import (
    Job,
    await_count,
    call_count,
    call_worker,
    increment_count,
    read_int,
    read_int64_matrix,
    reset_job,
    take_thread_index,
)

# Fields of a job: the calls, int64 [n, 3]; the threads that have finished each call, int64 [1, n]; the address of a
# function that returns the number of threads. A call has the address of a worker, that of its job, and the number of
# threads that may run it.
CALLS, FINISHED, COUNT_THREADS = range(3)


def chain_worker(job: Job) -> None:
    """Runs all calls. Their jobs can then be run again."""
    calls, finished = read_int64_matrix(job, CALLS), read_int64_matrix(job, FINISHED)[0]
    num_threads, thread = call_count(read_int(job, COUNT_THREADS)), take_thread_index(job)
    for place in range(calls.shape[0]):
        call = calls[place]
        if thread < call[2]:
            call_worker(call[0], call[1])
        if increment_count(finished, place) == num_threads - 1:
            reset_job(call[1])
        await_count(finished, place, num_threads)
