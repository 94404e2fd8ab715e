"""Places that are taken and given back, and when some will be free again, judged by those that were given back so far.

Each place is taken to be given back at the same rate, whenever it was taken. That rate is places given back by the
seconds that places were held (the likeliest rate for lifetimes that are partly still running): idle time teaches
nothing, and answers that take longer than those before count at once. Old ones are forgotten by number, not by age.

Worked example: places were held for 20 s each so far, and 40 are held now: one is expected back every 0.5 s.

Knows no tenant and no HTTP. Runs on one event loop and needs no lock.
"""

from collections.abc import Callable

__all__ = ["Places"]

# How much each place that is given back still counts when the next one is: about the last 64 decide.
_MEMORY = 1 - 1 / 64


class Places:
    """`num_taken` places are taken now. clock: seconds, from any start, that only grow."""

    __slots__ = ("_clock", "_given_back", "_held_s", "_seen_at", "num_taken")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_taken = 0
        self._clock = clock
        self._seen_at = clock()
        self._held_s = 0.0
        self._given_back = 0.0

    def take(self, count: int) -> None:
        self._pass_time()
        self.num_taken += count

    def give_back(self, count: int) -> None:
        self._pass_time()
        self.num_taken -= count
        kept = _MEMORY**count
        self._held_s *= kept
        self._given_back = (self._given_back + count) * kept

    def wait_s(self, count: int) -> float | None:
        """Seconds until `count` of those that are taken are expected back; None while none ever was."""
        self._pass_time()
        if not self._given_back or not self.num_taken:
            return None
        return count * self._held_s / (self._given_back * self.num_taken)

    def _pass_time(self) -> None:
        now = self._clock()
        self._held_s += (now - self._seen_at) * self.num_taken
        self._seen_at = now
