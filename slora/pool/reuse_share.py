"""How likely it is that what nobody uses is wanted again: counted, and the recent past counts most."""

from slora.errors import ConfigError

# A thing that left or came back 1,000 things ago counts for about a third of the latest one.
_DECAY = 0.999


class ReuseShare:
    """Of things that fell idle, the share that was used again before it had to leave.

    weight: of the outset, a half, in outcomes: so many outcomes change it half of the way. Worked example: after 8
    things that left unused the share is 4 / 16 = a quarter, after 100 about 4%.
    """

    __slots__ = ("_num_used", "_total")

    def __init__(self, weight: float = 8.0) -> None:
        if not weight > 0:
            raise ConfigError(f"the weight of the outset is {weight!r}; it must be above 0")
        self._num_used, self._total = weight / 2, weight

    def count(self, *, was_used: bool) -> None:
        """One more was used again, or left."""
        self._num_used = self._num_used * _DECAY + was_used
        self._total = self._total * _DECAY + 1

    @property
    def value(self) -> float:
        """Above 0, at most 1."""
        return self._num_used / self._total
