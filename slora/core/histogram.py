"""Histograms of the engine, in the form that Prometheus expects."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Histogram", "HistogramCounts"]


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """The counts of a histogram at one moment.

    counts[i]: number of values above bounds[i - 1], up to bounds[i]. The last count is the number of values above all
        bounds.
    total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def cumulate(self) -> list[tuple[str, float]]:
        """Returns Prometheus' cumulative buckets: each upper bound as text, with the number of values up to it."""
        buckets, count = [], 0
        for bound, more in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            count += more
            buckets.append((bound, float(count)))
        return buckets


class Histogram:
    """Counts values. bounds: the upper bounds of its buckets, ascending."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def count(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)
