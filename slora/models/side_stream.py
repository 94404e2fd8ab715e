"""Runs LoRA kernels in parallel with the base model's matmuls. They read the same input as the matmul beside them, and
do not write to the matmul's output.

A decode linear is bound by reading its weights and leaves multiprocessors idle at its beginning and end. The LoRA
kernels have a latency of a few microseconds each, which the matmul hides. With prefill chunks, the matmul is bound by
arithmetic and a shrink by memory, so they also run well in parallel. Fork and join are CUDA events, so a CUDA graph can
record them.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


class SideStream:
    """A CUDA stream beside the device's current stream. It can also be used while a CUDA graph records that stream.

    Each fork is joined before the next fork. Memory that the work allocates is freed before the next fork, and that
    fork waits for the last reader of this memory. So the allocator can reuse it safely without `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fork(self, work: Callable[[], _Result]) -> _Result:
        """Launches work that waits for all earlier work and runs in parallel with later work.

        Until `join`, do not read the result of the work, and do not write to its inputs.
        """
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            result = work()
        self._done.record(self._stream)
        return result

    def join(self) -> None:
        """Makes all later work wait for the forked work."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
