"""How long the device takes for some work, by its own clock where it has one."""

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 20
_WARM_UP_S = 0.05


def time_device(work: Callable[[], object], device: torch.device, *, graph: bool = True) -> float:
    """Median seconds. On a GPU `work` is replayed as a graph, so that the host's time is no part of it; without `graph`
    it may wait for the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    work()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        work = captured.replay
    # The clocks of an idle GPU are low: the first copies of a run were measured at two thirds of their rate.
    end_s = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end_s:
        work()
        torch.cuda.synchronize(device)
    spans = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in spans) / 1e3
