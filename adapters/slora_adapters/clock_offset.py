"""Measures how far another machine's clock is ahead of this machine's clock."""

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ClockOffset", "measure_clock"]


class ClockOffset(NamedTuple):
    """The offset of another machine's clock. seconds: negative if that clock is behind. uncertainty_s: the largest
    possible error, half of the round-trip time.
    """

    seconds: float
    uncertainty_s: float


def measure_clock(read_other: Callable[[], float]) -> ClockOffset:
    """Measures the offset of another clock. read_other: returns the other machine's Unix time."""
    before = time.time()
    other = read_other()
    after = time.time()
    return ClockOffset(other - (before + after) / 2, (after - before) / 2)
