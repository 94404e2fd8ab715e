"""Fills every free page with 0xFF (NaN) before each step, so that a read of a free page shows up as NaN."""

import torch

from slora.core.request import StepOutput
from slora.engine.engine import Engine
from slora.runner.runner import RunningStep
from slora.scheduler.step_plan import StepPlan


def poison(engine: Engine, byte: int = 0xFF) -> None:
    """From now on, the free pages of the pool and of the host are filled in each step, before the step runs.

    These are the pages that were free before the step was scheduled, and those that are free afterwards. Pages that the
    plan still reads are spared: a page that is swapped out in a step is already free in its plan.
    """
    poisoner = _Poisoner(engine, byte)
    engine.step = poisoner.step  # type: ignore[method-assign]
    engine.runner.launch = poisoner.launch  # type: ignore[method-assign]


class _Poisoner:
    def __init__(self, engine: Engine, byte: int) -> None:
        self._pool, self._swapping = engine.scheduler.paging.pool, engine.scheduler.swapping
        self._memory = engine.runner.memory
        self._byte = byte
        self._step, self._launch = engine.step, engine.runner.launch
        self._free: set[int] = set()
        self._free_host: set[int] = set()

    def step(self) -> list[StepOutput]:
        self._free, self._free_host = set(self._pool.free_pages), set(self._swapping.free_pages)
        return self._step()

    def launch(self, plan: StepPlan) -> RunningStep:
        read = {source for source, _ in [*plan.swaps_out, *plan.copies]}
        free = torch.tensor(list(self._free.union(self._pool.free_pages) - read), dtype=torch.int64)
        self._memory.pages.index_fill_(0, free.to(self._memory.pages.device), self._byte)
        read_host = {host_page for host_page, _ in plan.swaps_in}
        for host_page in self._free_host.union(self._swapping.free_pages) - read_host:
            self._memory.host_pages[host_page].fill_(self._byte)
        # A step that failed runs again in parts. Pages that an earlier part wrote are no longer free.
        self._free, self._free_host = set(), set()
        return self._launch(plan)
