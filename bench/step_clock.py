"""Where the time of a step goes: the engine's own functions are timed in place, each less what it calls.

Patches what it is told to and puts it back. Knows no model and no workload.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

REST = "rest"


@dataclass(frozen=True, slots=True)
class Timed:
    """owner: a class or a module whose function `name` counts as `part`.

    is_whole: whether the timed functions that it calls count as `part`, too.
    """

    owner: Any
    name: str
    part: str
    is_whole: bool = False


@dataclass(slots=True)
class StepClock:
    """steps: seconds by part, of each step; their sum is the step's whole time."""

    clock: Callable[[], float] = time.perf_counter
    steps: list[dict[str, float]] = field(default_factory=list)
    _open: list[list[float]] = field(default_factory=list)
    _is_in_whole: bool = False
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def step(self) -> Iterator[None]:
        """What no part takes counts as the rest."""
        self._seconds = defaultdict(float)
        with self.part(REST):
            yield
        self.steps.append(dict(self._seconds))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        inner = [0.0]
        self._open.append(inner)
        start = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - start
            self._open.pop()
            self._seconds[name] += seconds - inner[0]
            if self._open:
                self._open[-1][0] += seconds

    @contextmanager
    def timing(self, functions: Sequence[Timed]) -> Iterator[None]:
        """About 1 us a call. Raises AttributeError for a function that is not there (any more)."""
        before = [(f.owner, f.name, vars(f.owner)[f.name]) for f in functions if _has(f)]
        for timed in functions:
            setattr(timed.owner, timed.name, self._wrap(timed))
        try:
            yield
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)

    def _wrap(self, timed: Timed) -> Any:
        original = vars(timed.owner)[timed.name]
        is_static = isinstance(original, staticmethod)
        call: Callable[..., Any] = original.__func__ if is_static else original

        @wraps(call)
        def timed_call(*args: Any, **named: Any) -> Any:
            if self._is_in_whole:
                return call(*args, **named)
            self._is_in_whole = timed.is_whole
            try:
                with self.part(timed.part):
                    return call(*args, **named)
            finally:
                self._is_in_whole = False

        return staticmethod(timed_call) if is_static else timed_call


def _has(timed: Timed) -> bool:
    if timed.name not in vars(timed.owner):
        raise AttributeError(
            f"{timed.owner.__name__} has no {timed.name}: the timed function was renamed or moved"
        )
    return True
