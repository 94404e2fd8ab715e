"""A buddy allocator of token places, as the PagedAttention paper gives to its Orca baselines."""

from collections import defaultdict


class Buddy:
    """Blocks are powers of two, split in halves and joined again. Any number of places is a sum of such blocks: 14,500
    are 8,192 + 4,096 + 2,048 + 128 + 32 + 4.
    """

    def __init__(self, num_places: int) -> None:
        self._free: dict[int, set[int]] = defaultdict(set)  # by size: where blocks of it begin
        self._sizes: dict[int, int] = {}  # of the taken blocks, by where they begin
        start = 0
        while num_places:
            size = 1 << (num_places.bit_length() - 1)
            self._free[size].add(start)
            start, num_places = start + size, num_places - size
        self._largest = max(self._free, default=0)

    def allocate(self, num_places: int) -> int | None:
        """Where a block of at least so many places begins; None if there is none."""
        wanted = size = 1 << (num_places - 1).bit_length()
        while size <= self._largest and not self._free[size]:
            size *= 2
        if size > self._largest:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        self._sizes[start] = size
        return start

    def release(self, start: int) -> None:
        size = self._sizes.pop(start)
        while start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), size * 2
        self._free[size].add(start)

    def size(self, start: int) -> int:
        return self._sizes[start]

    @property
    def num_taken(self) -> int:
        return sum(self._sizes.values())
