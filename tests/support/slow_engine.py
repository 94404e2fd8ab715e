"""Slows an engine down while a file exists, so that a test can act in the middle of a stream."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slora.core.request import StepOutput
from slora.engine.engine import Engine

# The environment variable with the path of the file.
VARIABLE = "TESTS_SLOW_ENGINE"
# 250 tokens take 12 s.
_STEP_S = 0.05


def heed_slowness(environment: Mapping[str, str]) -> None:
    """Each step of an engine of this process sleeps while the file exists that the variable names."""
    if (path := environment.get(VARIABLE)) is None:
        return
    step = Engine.step

    def step_slowly(engine: Engine, tell_begun: Callable[[list[str]], None]) -> list[StepOutput]:
        if os.path.exists(path):
            time.sleep(_STEP_S)
        return step(engine, tell_begun)

    Engine.step = step_slowly  # type: ignore[method-assign, assignment]


@contextmanager
def slowed(path: Path) -> Iterator[None]:
    """Slows the engines down whose variable names this path."""
    path.touch()
    try:
        yield
    finally:
        path.unlink()
