"""Checks memory, cores and open files of this machine against the settings."""

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from slora.byte_text import format_bytes
from slora.device.device_facts import DeviceFacts
from slora.engine_config import (
    CPU_POOL_SHARE,
    GPU_POOL_SHARE,
    SWAP_SHARE,
    cgroup_memory_limit,
    free_ram_bytes,
)
from slora_adapters.loader.host_cache import HostCache
from slora_api.doctor.finding import Finding, failure, fine, warning
from slora_api.doctor.model_files import Model
from slora_api.doctor.server_probe import ServerProbe
from slora_api.doctor.shared_fact import SharedFact
from slora_api.server.descriptors import explain_few_descriptors
from slora_api.settings import Settings

__all__ = ["check_cores", "check_memory", "check_open_files", "check_shared_memory"]

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_LOWER = "lower --pool-bytes, --swap-bytes or --host-cache-bytes, or choose a smaller model"


def check_memory(
    settings: Settings,
    device: SharedFact[DeviceFacts],
    model: SharedFact[Model],
    server: SharedFact[ServerProbe],
) -> Iterator[Finding]:
    limit, free = cgroup_memory_limit(), free_ram_bytes()
    within = f" (this control group may use {format_bytes(limit)})" if limit is not None else ""
    found_device, found_model = device.get_if_known(), model.get_if_known()
    weights = found_model.num_bytes if found_model else 0
    if server.get().is_slora:
        # A running server has already allocated its memory, so the free memory does not show whether these settings
        # fit.
        yield fine(f"{format_bytes(free)} of host memory are free beside the running server{within}")
        return
    is_gpu = found_device is not None and found_device.type == "cuda"
    # Each tensor-parallel rank has a page pool and swap space of its own.
    num_ranks = settings.engine.tensor_parallel_size
    pool = settings.engine.pool_bytes
    if is_gpu and found_device is not None and found_device.free_bytes is not None:
        of_rank = weights // num_ranks
        yield from _check_gpu_memory(found_device.free_bytes, of_rank, pool)
        on_host = 0
        likely_pool = num_ranks * (pool or int(max(0, found_device.free_bytes - of_rank) * GPU_POOL_SHARE))
    else:
        likely_pool = num_ranks * pool if pool else int(max(0, free - weights) * CPU_POOL_SHARE)
        on_host = weights + likely_pool
    swap = settings.engine.swap_bytes
    if settings.engine.preemption == "recompute":
        swap = 0
    elif swap is None:
        swap = int(min(likely_pool * SWAP_SHARE, max(0, free - on_host) * SWAP_SHARE))
    else:
        swap *= num_ranks
    needed = on_host + swap + settings.host_cache_bytes
    parts = [("page pool", likely_pool)] if not is_gpu else []
    if not is_gpu and found_model is not None:
        parts.insert(0, ("weights", weights))
    parts += [("swapped sequences", swap), ("host cache", settings.host_cache_bytes)]
    named = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    text = (
        f"{format_bytes(free)} of host memory are free{within}; {format_bytes(needed)} are needed ({named})"
    )
    if needed > free:
        yield failure(text, _LOWER)
    elif needed > 0.9 * free:
        yield warning(text, f"the processes need further memory: {_LOWER}")
    else:
        yield fine(text)
    if found_model is None:
        yield fine("the weights are not counted, because the model cannot be read")


def _check_gpu_memory(free: int, weights: int, pool: int | None) -> Iterator[Finding]:
    if weights + (pool or 0) > free:
        wanted = f"weights {format_bytes(weights)}" + (f", page pool {format_bytes(pool)}" if pool else "")
        yield failure(
            f"{format_bytes(free)} of GPU memory are free, but more is needed ({wanted})",
            "end other programs on the GPU, lower --pool-bytes, set --quantization or choose a smaller model",
        )
    else:
        yield fine(f"{format_bytes(free)} of GPU memory are free; weights take {format_bytes(weights)}")


def check_shared_memory(settings: Settings) -> Iterator[Finding]:
    """Checks that the host cache can be created. The cache is a memfd, which counts as memory of the control group."""
    try:
        cache = HostCache(settings.host_cache_bytes)
    except OSError as error:
        yield failure(
            f"shared memory of {format_bytes(settings.host_cache_bytes)} for the host cache cannot be created "
            f"({error.strerror})",
            "allow memfd_create, raise the limit of file sizes (ulimit -f), or lower --host-cache-bytes",
        )
        return
    os.close(cache.descriptor)
    shm = Path("/dev/shm")
    size = f", which is {format_bytes(_size_of(shm))} here" if shm.is_dir() else ""
    yield fine(
        f"the host cache of {format_bytes(settings.host_cache_bytes)} can be created; it does not use /dev/shm{size}"
    )


def _size_of(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def check_cores(settings: Settings, device: SharedFact[DeviceFacts]) -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    usable = num_cores if quota is None else min(num_cores, max(1, math.ceil(quota)))
    within = f" ({num_cores} without the limit of the control group)" if usable < num_cores else ""
    found = device.get_if_known()
    if found is None or found.type != "cpu":
        yield fine(f"{usable} cores{within}")
    elif found.num_threads > usable:
        yield warning(
            f"{usable} cores{within}, but the engine would compute with {found.num_threads} threads, which wait for "
            "each other",
            f"set OMP_NUM_THREADS={usable}",
        )
    elif found.num_threads < usable // 2:
        yield warning(
            f"the engine would compute with {found.num_threads} threads on {usable} cores{within}",
            f"unset OMP_NUM_THREADS, or set it to {usable}",
        )
    else:
        yield fine(f"{usable} cores{within}; the engine computes with {found.num_threads} threads")
    if settings.api_workers > usable:
        yield warning(
            f"{settings.api_workers} API workers share {usable} cores",
            "lower --api-workers to the number of cores",
        )


def _cpu_quota() -> float | None:
    """Returns how many cores the control group may use; None without a limit."""
    if not _CPU_LIMIT.exists():
        return None
    quota, period = _CPU_LIMIT.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def check_open_files(settings: Settings) -> Iterator[Finding]:
    # A server raises the soft limit to the hard limit.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    connections = -(-settings.max_connections // settings.api_workers)
    if shortage := explain_few_descriptors(connections, limit):
        yield warning(shortage)
    else:
        yield fine(f"each process may open {limit} files; {connections} connections are allowed")
    if explain_few_descriptors(-(-settings.max_concurrent_requests // settings.api_workers), limit):
        yield failure(
            f"{settings.max_concurrent_requests} answers at once, each on a connection, need more files"
        )
