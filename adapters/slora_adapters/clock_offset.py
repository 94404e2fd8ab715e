"""How far another machine's clock is ahead of this one's."""

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ClockOffset", "measure_clock"]


class ClockOffset(NamedTuple):
    """seconds: negative if the other clock is behind. uncertainty_s: half of the round trip, the largest error."""

    seconds: float
    uncertainty_s: float


def measure_clock(read_other: Callable[[], float]) -> ClockOffset:
    """read_other: asks the other machine for its Unix time."""
    before = time.time()
    other = read_other()
    after = time.time()
    return ClockOffset(other - (before + after) / 2, (after - before) / 2)
