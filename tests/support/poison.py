"""Bytes that hurt whoever reads what is nobody's: before each step, every free page holds 0xFF, which is NaN."""

from slora.engine.engine import Engine
from slora.request import StepOutput
from slora.scheduler.step_plan import Sampled, StepPlan


def poison(engine: Engine, byte: int = 0xFF) -> None:
    """From now on free pages of pool and host are filled before each step, so whoever gets one finds that there, and
    once more when the step is planned, less those that it still reads (a page that moves out in a step is free in its
    plan already)."""
    poisoner = _Poisoner(engine, byte)
    engine.step = poisoner.step  # type: ignore[method-assign]
    engine._runner.run = poisoner.run  # type: ignore[method-assign]


class _Poisoner:
    def __init__(self, engine: Engine, byte: int) -> None:
        self._pool, self._host = engine._scheduler.memory.pool, engine._scheduler.swapping._space
        self._memory = engine._runner.memory
        self._byte = byte
        self._step, self._run = engine.step, engine._runner.run

    def step(self) -> list[StepOutput]:
        self._fill(set(), set())
        return self._step()

    def run(self, plan: StepPlan) -> list[Sampled]:
        moved = [*plan.swaps_out, *plan.copies]
        self._fill({source for source, _ in moved}, {host_page for host_page, _ in plan.swaps_in})
        return self._run(plan)

    def _fill(self, read: set[int], read_host: set[int]) -> None:
        self._memory.pages[sorted(set(self._pool._free) - read)] = self._byte
        for host_page in set(self._host._free) - read_host:
            self._memory.host_pages[host_page].fill_(self._byte)
