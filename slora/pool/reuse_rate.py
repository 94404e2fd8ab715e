"""An estimate of how likely an idle item is to be used again. Recent outcomes count most."""

from slora.errors import ConfigError

# An outcome that is 1,000 outcomes old has about a third of the weight of the latest one.
_DECAY = 0.999


class ReuseRate:
    """Of the items that became idle, the fraction that was used again before eviction.

    weight: the initial rate of one half counts as this many outcomes. After `weight` recorded outcomes, the initial
        rate contributes half of the value.

    Worked example: with weight 8, after 8 items that were evicted unused the rate is 4 / 16 = a quarter; after 100
    about 4%.
    """

    __slots__ = ("_num_used", "_total")

    def __init__(self, weight: float = 8.0) -> None:
        if not weight > 0:
            raise ConfigError(f"the weight of the initial rate is {weight!r}; it must be above 0")
        self._num_used, self._total = weight / 2, weight

    def record(self, *, was_used: bool) -> None:
        """Records one outcome: the item was used again, or it was evicted."""
        self._num_used = self._num_used * _DECAY + was_used
        self._total = self._total * _DECAY + 1

    @property
    def value(self) -> float:
        """The estimated rate, greater than 0 and at most 1."""
        return self._num_used / self._total
