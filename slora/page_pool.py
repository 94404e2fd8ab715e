"""The one pool: which pages are free, held or cached. Pages are numbers here; their bytes live in `PageMemory`.

A page is in exactly one state:

    free    nobody's; its bytes mean nothing
    held    at least one reference: KV of running sequences, or an adapter that a running sequence uses
    cached  no reference, but its bytes are worth keeping (an idle adapter); evicting it makes it free

      allocate          release (last reference)
free ---------> held --------------------------> free
                 |  ^
            park |  | unpark
                 v  |
                cached --- evict ---> free

Knows no torch, no adapter, no sequence.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum


class PageState(IntEnum):
    FREE = 0
    HELD = 1
    CACHED = 2


class PagePool:
    """Counts references to `num_pages` pages. The caller makes room first: running out here is a bug."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack: the page freed last is reused first, while it is warm in the caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._states = bytearray(num_pages)
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - self._num_cached

    def is_shared(self, page: int) -> bool:
        """Whether a held page has more than one reference: nobody may write to it then."""
        return self._references[page] > 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages, each with one reference."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free: make room first"
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._references[page] = 1
            self._states[page] = PageState.HELD
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each held page."""
        for page in pages:
            assert self._states[page] == PageState.HELD, f"page {page} is not held"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops a reference from each held page; a page that loses its last one is free."""
        for page in pages:
            assert self._states[page] == PageState.HELD, f"page {page} is not held"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._states[page] = PageState.FREE
                self._free.append(page)

    def park(self, pages: Sequence[int]) -> None:
        """The only reference goes, the bytes stay: held becomes cached."""
        for page in pages:
            assert self._references[page] == 1, f"page {page} has {self._references[page]} references, not 1"
            self._references[page] = 0
            self._states[page] = PageState.CACHED
        self._num_cached += len(pages)

    def unpark(self, pages: Sequence[int]) -> None:
        """Cached pages are wanted again: held, with one reference."""
        for page in pages:
            assert self._states[page] == PageState.CACHED, f"page {page} is not cached"
            self._references[page] = 1
            self._states[page] = PageState.HELD
        self._num_cached -= len(pages)

    def evict(self, pages: Sequence[int]) -> None:
        """Gives up cached pages."""
        for page in pages:
            assert self._states[page] == PageState.CACHED, f"page {page} is not cached"
            self._states[page] = PageState.FREE
            self._free.append(page)
        self._num_cached -= len(pages)

    def check(self, held: Iterable[int], cached: Iterable[int]) -> None:
        """Proves that every page is accounted for. Raises AssertionError with what does not add up.

        held: every reference that the owners have, a page once for each; cached: every page that they keep.
        """
        expected = [0] * self.num_pages
        for page in held:
            expected[page] += 1
        wrong = [p for p in range(self.num_pages) if expected[p] != self._references[p]]
        assert not wrong, f"pages {wrong[:8]}: counted references differ from the owners'"
        kept = list(cached)
        assert len(set(kept)) == len(kept), "a cached page has two owners"
        states = self._states
        assert all(states[p] == PageState.CACHED for p in kept), "an owner keeps a page that is not cached"
        assert len(kept) == self._num_cached, f"{self._num_cached} pages cached, owners know {len(kept)}"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert all(states[p] == PageState.FREE for p in self._free), "a page in the free list is not free"
        in_use = sum(1 for count in expected if count)
        total = len(self._free) + in_use + len(kept)
        assert total == self.num_pages, (
            f"{len(self._free)} free + {in_use} held + {len(kept)} cached != {self.num_pages}"
        )
