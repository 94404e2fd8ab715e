"""The share of each adapter in the recent tokens, without a clock."""

from slora_adapters.version import AdapterVersion


class TrafficShare:
    """Counts tokens in two windows of `window` requests each. The old window counts less as the new window fills.

    At most 2 * window adapters are remembered.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._num_requests = 0
        self._new: dict[AdapterVersion, int] = {}
        self._old: dict[AdapterVersion, int] = {}
        self._new_total = self._old_total = 0

    def add(self, version: AdapterVersion, tokens: int) -> None:
        if self._num_requests >= self.window:
            self._old, self._old_total = self._new, self._new_total
            self._new, self._new_total, self._num_requests = {}, 0, 0
        self._num_requests += 1
        self._new[version] = self._new.get(version, 0) + tokens
        self._new_total += tokens

    def share(self, version: AdapterVersion) -> float:
        """Returns the adapter's share of the recent tokens, from 0 to 1.

        Worked example: windows of 100 requests, one token each. The old window is full and has 40 tokens of this
        adapter. The new window has 50 tokens, 10 of them of this adapter. The share is
        (10 + 40 * 0.5) / (50 + 100 * 0.5) = 0.3.
        """
        weight = max(0.0, 1 - self._num_requests / self.window)
        total = self._new_total + weight * self._old_total
        return (self._new.get(version, 0) + weight * self._old.get(version, 0)) / total if total else 0.0
