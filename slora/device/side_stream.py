"""Work that runs beside the base's matmuls: shrink, which reads what they read and writes nothing of theirs.

In decode a linear is bound by reading its weights and leaves multiprocessors idle while it begins and ends; a shrink is
a few microseconds of latency, which is then gone from the step. In chunks both are bound by arithmetic, and there is
nothing to hide behind. Fork and join are events, so a graph records them as it does launches.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CudaSideStream", "SideStream"]


class SideStream(Protocol):
    """One fork at a time, joined before the next one."""

    def fork(self, work: Callable[[], Tensor]) -> Tensor:
        """Launches work that finds done all that was launched before, and runs beside what is launched from here on.
        Nobody may read its result, or write to what it reads, before `join`."""

    def join(self) -> None:
        """What is launched from here on finds the work done."""


class CudaSideStream:
    """See `SideStream`. Beside whatever stream of the device is current, and in whatever graph that records.

    What the work allocates is given back before the next fork, which waits for its last reader: so this stream's memory
    needs no record of the other's use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fork(self, work: Callable[[], Tensor]) -> Tensor:
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            result = work()
        self._done.record(self._stream)
        return result

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)
