"""Tells an API process that another process on this host has committed a change to the database.

A client that has changed an alias through one process may send its next request to another process. That process reads
the change from the feed only some tens of milliseconds later. Until then, that process looks up keys and names in the
database instead of its caches. So the request sees the change.
"""

import time
from collections.abc import Callable

from slora_api.core.host_board import HostBoard

# The longest time for which the caches are bypassed. After this time, the caches are used again even if the feed could
# not be read, because the database may be unavailable.
_MAX_BEHIND_S = 1.0


class HostChanges:
    """Tracks the changes that the other API processes of this host have committed. clock: monotonic seconds."""

    def __init__(self, board: HostBoard, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._applied = board.changes_elsewhere()
        # The other processes' counts that the follower has not reached yet, and the time at which these counts were
        # first seen.
        self._missing: tuple[int, ...] = ()
        self._missing_since = 0.0

    def announce(self) -> None:
        """Tells the other processes that this process has committed a change. May be called from any thread."""
        self._board.count_change()

    def read(self) -> tuple[int, ...]:
        """Returns, for every other process, the number of changes that it has committed. Pass these numbers to `apply`
        after reading the feed.
        """
        return self._board.changes_elsewhere()

    def apply(self, committed: tuple[int, ...]) -> None:
        self._applied = committed

    def is_behind(self) -> bool:
        """Returns whether the caches may lack a change by another process of this host."""
        committed = self._board.changes_elsewhere()
        if committed == self._applied:
            return False
        if committed != self._missing:
            self._missing, self._missing_since = committed, self._clock()
        return self._clock() - self._missing_since < _MAX_BEHIND_S
