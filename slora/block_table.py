"""The pages that hold one sequence's KV, in order. Knows no other sequence."""

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

    def release(self, pool: PagePool) -> None:
        """Gives every page back."""
        pool.release(self.pages.tolist())
        self.num_pages = 0
