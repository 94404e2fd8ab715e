"""How long adapters take to come to the host lately, whether they are there already or come from far away."""

# About the last 20 fetches count.
_DECAY = 0.95


class FetchPace:
    """Seconds over bytes, both decayed. Worked example: one fetch of 100 MB took 0.5 s, and then one as large, that was
    on the host, none: 20 MB should take 0.95 * 0.5 s * 20 MB / 195 MB = 49 ms."""

    __slots__ = ("_num_bytes", "_seconds")

    def __init__(self) -> None:
        self._num_bytes = self._seconds = 0.0

    def count(self, num_bytes: int, seconds: float) -> None:
        """One more has come."""
        self._num_bytes = self._num_bytes * _DECAY + num_bytes
        self._seconds = self._seconds * _DECAY + seconds

    def fetch_s(self, num_bytes: int) -> float:
        """What a fetch of so many bytes should take; 0 before any has come."""
        return self._seconds * num_bytes / self._num_bytes if self._num_bytes else 0.0
