"""A decayed average of the time to fetch adapters to the host, including fetches of cached adapters."""

# The average covers about the last 20 fetches.
_DECAY = 0.95


class FetchPace:
    """The decayed average of seconds per byte: the decayed sum of seconds divided by the decayed sum of bytes.

    Worked example: a fetch of 100 MB took 0.5 s. The next fetch of 100 MB was cached and took 0 s. The estimate for 20
    MB is then 0.95 * 0.5 s * 20 MB / 195 MB = 49 ms.
    """

    __slots__ = ("_num_bytes", "_seconds")

    def __init__(self) -> None:
        self._num_bytes = self._seconds = 0.0

    def count(self, num_bytes: int, seconds: float) -> None:
        """Adds one completed fetch to the average."""
        self._num_bytes = self._num_bytes * _DECAY + num_bytes
        self._seconds = self._seconds * _DECAY + seconds

    def fetch_s(self, num_bytes: int) -> float:
        """Returns the expected duration of a fetch of `num_bytes` in seconds; 0 before the first fetch."""
        return self._seconds * num_bytes / self._num_bytes if self._num_bytes else 0.0
