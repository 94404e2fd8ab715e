"""Allocates the host pages that hold the KV of preempted sequences. The bytes of the pages are in `HostPages`.

This module does not depend on torch or sequences.
"""

from collections.abc import Iterable


class SwapSpace:
    """Allocates from `num_pages` host pages. Each page is free or belongs to one sequence.

    Callers check `num_free` before they allocate.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack: the page freed last is written next, while it is still resident in memory.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> list[int]:
        return list(self._free)

    def allocate(self, count: int) -> list[int]:
        free = self._free
        assert count <= len(free), (
            f"{count} host pages are requested, but only {len(free)} are free: check num_free first"
        )
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._is_free[page], f"host page {page} is already free"
            self._is_free[page] = True
            self._free.append(page)

    def check_invariants(self, held: Iterable[int]) -> None:
        """Asserts that every host page is either free or owned by exactly one sequence.

        held: every host page that a sequence owns.
        """
        pages = sorted([*self._free, *held])
        assert pages == list(range(self.num_pages)), (
            f"{len(self._free)} host pages are free and {len(pages) - len(self._free)} are held, of "
            f"{self.num_pages}: a page has no owner or two"
        )
        assert all(self._is_free[page] for page in self._free), "a host page in the free list is not free"
