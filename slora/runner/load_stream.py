"""Copies adapters to the GPU while it computes a step that does not need them.

The step is launched first. The copies are launched after it, on a stream of their own. The host may have to wait for
copies from pageable memory, but this does not delay the step. A copy starts when all work before the step is done,
because that work may still use the copy's target pages. The next step waits for the copies.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from slora.memory.residency import AdapterLoad
from slora.scheduler.step_plan import StepPlan

__all__ = ["CudaLoadStream", "LoadStream", "split_loads"]


class LoadStream(Protocol):
    """Runs copies in parallel with the steps.

    A step calls `mark`, and then `copy` if adapters load in parallel. The next step calls `wait` first.
    """

    def mark(self) -> None:
        """Marks the point in the device's work from which copies may start."""

    def copy(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Launches copies that wait for the mark, but not for later work.

        Returns an event that occurs when they are done; None if they are done already.
        """

    def wait(self) -> None:
        """Makes all later work wait for the copies."""


class CudaLoadStream:
    """A `LoadStream` that copies on a CUDA stream of its own, while steps run on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marked, self._copied = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._marked.record(torch.cuda.current_stream(self._device))

    def copy(self, work: Callable[[], None]) -> torch.cuda.Event:
        self._stream.wait_event(self._marked)
        with torch.cuda.stream(self._stream):
            work()
        # Each step has an event of its own, because the next step may record one before this step's is waited for.
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(self._stream)
        return self._copied

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)


def split_loads(plan: StepPlan) -> tuple[list[AdapterLoad], list[AdapterLoad]]:
    """Splits a step's loads into (loads of slots that the step uses, loads that may run in parallel)."""
    used = {slot for chunk in plan.chunks for slot, _, _ in chunk.slots}
    needed: list[AdapterLoad] = []
    beside: list[AdapterLoad] = []
    for load in plan.loads:
        (beside if plan.chunks and load.resident.slot not in used else needed).append(load)
    return needed, beside
