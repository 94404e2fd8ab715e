"""Limits the time for which a peer may keep the server waiting, depending on the bytes that it sends or receives."""


class MinRateTimeout:
    """A timeout with a minimum rate: `left_s` is the time for which a slow peer may still keep the server waiting.

    `left_s` starts at `grace_s`. Waiting for the peer reduces it. Each byte that moves gives back 1 / `bytes_per_s`
    seconds, but `left_s` never exceeds `grace_s`. Three bounds follow. A peer that stops is disconnected after
    `grace_s`. A peer that is slower than `bytes_per_s` is disconnected somewhat later. N bytes never take more than
    `grace_s + N / bytes_per_s` seconds of waiting.

    Example with 20 s and 128 KiB/s: 512 MiB may take 20 + 4096 s. A client that sends 64 KiB/s is disconnected after 40
    s.
    """

    __slots__ = ("_bytes_per_s", "_grace_s", "left_s")

    def __init__(self, grace_s: float, bytes_per_s: float) -> None:
        self.left_s = grace_s
        self._grace_s = grace_s
        self._bytes_per_s = bytes_per_s

    def charge(self, waited_s: float, num_bytes: int) -> None:
        """Charges a wait of `waited_s` seconds in which `num_bytes` moved."""
        self.left_s = min(self._grace_s, self.left_s - waited_s + num_bytes / self._bytes_per_s)

    def credit(self, seconds: float) -> None:
        """Gives back `seconds` during which the server did not wait for the peer."""
        self.left_s = min(self._grace_s, self.left_s + seconds)
