"""An engine process whose device fails for good after a few steps, as after a sticky CUDA error."""

import itertools
import sys

from slora.core.errors import DeviceFailed
from slora.engine import process
from slora.runner.runner import Runner, RunningStep
from slora.scheduler.step_plan import StepPlan

_NUM_STEPS = 3
_steps = itertools.count()
_launch = Runner.launch


def _launch_a_few(runner: Runner, plan: StepPlan) -> RunningStep:
    """Counts only steps with requests of clients. Their ids begin with the client's number and a colon."""
    has_clients = any(":" in chunk.sequence.request.request_id for chunk in plan.chunks)
    if has_clients and next(_steps) >= _NUM_STEPS:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return _launch(runner, plan)


def _probe(runner: Runner) -> None:
    raise DeviceFailed("the device is lost")


if __name__ == "__main__":
    Runner.launch, Runner.probe = _launch_a_few, _probe  # type: ignore[method-assign]
    sys.exit(process.main())
