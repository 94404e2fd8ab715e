"""How long a peer may keep the server waiting, given the bytes that it moves meanwhile."""

__all__ = ["Allowance"]


class Allowance:
    """Seconds that a slow peer has left.

    The allowance starts at `grace_s`. Waiting for the peer uses it up. Each byte that moves gives back
    1 / `bytes_per_s` seconds, and the allowance never exceeds `grace_s`. One rule thus gives three bounds: a peer that
    stops is given up after `grace_s`, a peer below `bytes_per_s` a little later, and N bytes never take longer than
    `grace_s + N / bytes_per_s` seconds of waiting.

    Example: with 20 s and 128 KiB/s, 512 MiB may take 20 + 4096 s, and a client that sends 64 KiB/s is given up after
    40 s.
    """

    __slots__ = ("_bytes_per_s", "_grace_s", "left_s")

    def __init__(self, grace_s: float, bytes_per_s: float) -> None:
        self.left_s = grace_s
        self._grace_s = grace_s
        self._bytes_per_s = bytes_per_s

    def spend(self, waited_s: float, num_bytes: int) -> None:
        """Charges a wait that ended with `num_bytes` moved."""
        self.left_s = min(self._grace_s, self.left_s - waited_s + num_bytes / self._bytes_per_s)

    def rest(self, seconds: float) -> None:
        """Gives back time in which the server did not wait for the peer."""
        self.left_s = min(self._grace_s, self.left_s + seconds)
