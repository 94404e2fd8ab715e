"""The pages that hold one sequence's KV, in order. Knows no other sequence.

Sequences that forked from one share the pages of what they have in common, each with a reference of its own. A
shared page is never written: whoever comes to write there gets a copy first.

Blocks that no token looks back on any more are given back while the sequence runs. What stands in their places is never
read into a result, but must be the id of a page that holds sound numbers, so it is another one of the sequence's own.
"""

import numpy as np

from slora.page_pool import PagePool
from slora_kernels.layout import Int32Array


class BlockTable:
    """Page `i` holds tokens `[i * block_tokens, (i + 1) * block_tokens)` of the sequence.

    Worked example, 16 tokens a block: 33 tokens take 3 pages, the third with 15 places left.

    Entries [0, num_freed) were given back; the sequence has a reference to each of [num_freed, num_pages).
    """

    __slots__ = ("_array", "block_tokens", "num_freed", "num_pages")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.num_pages = 0
        self.num_freed = 0
        # An array, not a list: batch building copies it row by row in each step.
        self._array: Int32Array = np.zeros(8, np.int32)

    @property
    def pages(self) -> Int32Array:
        """An entry for each block, those that were given back included."""
        return self._array[: self.num_pages]

    @property
    def held(self) -> list[int]:
        pages: list[int] = self._array[self.num_freed : self.num_pages].tolist()
        return pages

    def pages_missing(self, num_tokens: int) -> int:
        """Pages to allocate before the sequence can hold `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_tokens) - self.num_pages)

    def extend(self, pages: list[int]) -> None:
        end = self.num_pages + len(pages)
        if end > len(self._array):
            grown = np.zeros(max(end, 2 * len(self._array)), np.int32)
            grown[: self.num_pages] = self.pages
            self._array = grown
        self._array[self.num_pages : end] = pages
        self.num_pages = end
        self._fill_freed()

    def fork(self, pool: PagePool) -> "BlockTable":
        """A table of the same pages, with references of its own."""
        table = BlockTable(self.block_tokens)
        pool.retain(self.held)
        table.extend(self.pages.tolist())
        table.num_freed = self.num_freed
        return table

    def free_before(self, token: int, pool: PagePool) -> None:
        """Gives back the blocks that lie wholly before `token`."""
        end = min(token // self.block_tokens, self.num_pages)
        if end > self.num_freed:
            pool.release(self._array[self.num_freed : end].tolist())
            self.num_freed = end
            self._fill_freed()

    def must_copy(self, token: int, pool: PagePool) -> bool:
        """Whether others share the page where the KV of `token` would be written."""
        index = token // self.block_tokens
        return self.num_freed <= index < self.num_pages and pool.is_shared(int(self._array[index]))

    def copy_on_write(self, token: int, pool: PagePool) -> tuple[int, int]:
        """A page of its own in place of the shared one of `token`. Returns (source, target): the bytes to copy."""
        index = token // self.block_tokens
        source = int(self._array[index])
        (target,) = pool.allocate(1)
        pool.release([source])
        self._array[index] = target
        self._fill_freed()
        return source, target

    def release(self, pool: PagePool) -> None:
        """Gives every page back."""
        pool.release(self.held)
        self.num_pages = self.num_freed = 0

    def _fill_freed(self) -> None:
        # Where nothing is held there is nothing to point at: the next page to come is written before anything is read.
        if 0 < self.num_freed < self.num_pages:
            self._array[: self.num_freed] = self._array[self.num_freed]
