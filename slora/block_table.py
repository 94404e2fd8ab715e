"""The pages that hold one sequence's KV, in order. Knows no other sequence.

Sequences that forked from one share the pages of what they have in common, each with a reference of its own. A
shared page is never written: whoever comes to write there gets a copy first.
"""

import numpy as np

from slora.page_pool import PagePool
from slora_kernels.layout import Int32Array


class BlockTable:
    """Page `i` holds tokens `[i * block_tokens, (i + 1) * block_tokens)` of the sequence.

    Worked example, 16 tokens a block: 33 tokens take 3 pages, the third with 15 places left.
    """

    __slots__ = ("_array", "block_tokens", "num_pages")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.num_pages = 0
        # An array, not a list: batch building copies it row by row in each step.
        self._array: Int32Array = np.zeros(8, np.int32)

    @property
    def pages(self) -> Int32Array:
        return self._array[: self.num_pages]

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

    def fork(self, pool: PagePool) -> "BlockTable":
        """A table of the same pages, with references of its own."""
        table = BlockTable(self.block_tokens)
        pages = self.pages.tolist()
        pool.retain(pages)
        table.extend(pages)
        return table

    def must_copy(self, token: int, pool: PagePool) -> bool:
        """Whether others share the page where the KV of `token` would be written."""
        index = token // self.block_tokens
        return index < self.num_pages and pool.is_shared(int(self._array[index]))

    def copy_on_write(self, token: int, pool: PagePool) -> tuple[int, int]:
        """A page of its own in place of the shared one of `token`. Returns (source, target): the bytes to copy."""
        index = token // self.block_tokens
        source = int(self._array[index])
        (target,) = pool.allocate(1)
        pool.release([source])
        self._array[index] = target
        return source, target

    def release(self, pool: PagePool) -> None:
        """Gives every page back."""
        pool.release(self.pages.tolist())
        self.num_pages = 0
