"""Fills every free page with 0xFF (NaN) before each step, so that a read of a free page shows up as NaN."""

import torch

from slora.engine.engine import Engine
from slora.request import StepOutput
from slora.scheduler.step_plan import SampledToken, StepPlan


def poison(engine: Engine, byte: int = 0xFF) -> None:
    """From now on, the free pages of the pool and of the host are filled twice in each step.

    The first fill runs before the step is scheduled, the second before it runs. The second one spares pages that the
    plan still reads: a page that is swapped out in a step is already free in its plan.
    """
    poisoner = _Poisoner(engine, byte)
    engine.step = poisoner.step  # type: ignore[method-assign]
    engine._runner.run = poisoner.run  # type: ignore[method-assign]


class _Poisoner:
    def __init__(self, engine: Engine, byte: int) -> None:
        self._pool, self._host = engine._scheduler.paging.pool, engine._scheduler.swapping._space
        self._memory = engine._runner.memory
        self._byte = byte
        self._step, self._run = engine.step, engine._runner.run

    def step(self) -> list[StepOutput]:
        self._fill(set(), set())
        return self._step()

    def run(self, plan: StepPlan) -> list[SampledToken]:
        moved = [*plan.swaps_out, *plan.copies]
        self._fill({source for source, _ in moved}, {host_page for host_page, _ in plan.swaps_in})
        return self._run(plan)

    def _fill(self, read: set[int], read_host: set[int]) -> None:
        free = torch.tensor(list(set(self._pool._free) - read), dtype=torch.int64)
        self._memory.pages.index_fill_(0, free.to(self._memory.pages.device), self._byte)
        for host_page in set(self._host._free) - read_host:
            self._memory.host_pages[host_page].fill_(self._byte)
