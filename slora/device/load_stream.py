"""Adapters that come in beside a step that does not need them: copied while the device computes for others.

The step is launched first, then the copies are, on a stream of their own: the host may wait for memory that is not
pinned, and the device goes on. They begin when all that came before the step is done, because their pages were somebody
else's until then, and the next step waits for them.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from slora.scheduler.step_plan import AdapterLoad, StepPlan

__all__ = ["CudaLoadStream", "LoadStream", "split_loads"]


class LoadStream(Protocol):
    """A step marks, and copies if something comes beside it; the next one waits first."""

    def mark(self) -> None:
        """Copies may begin when the device has come as far as this."""

    def copy(self, work: Callable[[], None]) -> None:
        """Launches copies that wait for the mark and for nothing later."""

    def wait(self) -> None:
        """What is launched from here on finds all copies done."""


class CudaLoadStream:
    """See `LoadStream`. Of the current stream of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marked, self._copied = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._marked.record(torch.cuda.current_stream(self._device))

    def copy(self, work: Callable[[], None]) -> None:
        self._stream.wait_event(self._marked)
        with torch.cuda.stream(self._stream):
            work()
        self._copied.record(self._stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)


def split_loads(plan: StepPlan) -> tuple[list[AdapterLoad], list[AdapterLoad]]:
    """(those into slots that the step computes with, those that may come beside it)."""
    used = {chunk.slot for chunk in plan.chunks}
    needed: list[AdapterLoad] = []
    beside: list[AdapterLoad] = []
    for load in plan.loads:
        (beside if plan.chunks and load.resident.slot not in used else needed).append(load)
    return needed, beside
