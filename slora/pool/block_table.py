"""The pages that hold one sequence's KV, in order. Knows no other sequence.

Sequences that forked from one share the pages of what they have in common, each with a reference of its own. A
shared page is never written: whoever comes to write there gets a copy first. Nor is one that has a name: others may
come to read it at any time.

Blocks that no token looks back on any more are given back while the sequence runs. What stands in their places is never
read into a result, but must be the id of a page that holds sound numbers, so it is another one of the sequence's own.
"""

import numpy as np

from slora.pool.kv_cache import KVCache
from slora.pool.tenant import Tenant
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

    def fork(self, kv: KVCache) -> "BlockTable":
        """A table of the same pages, with references of its own."""
        table = BlockTable(self.block_tokens)
        kv.retain(self.held)
        table.extend(self.pages.tolist())
        table.num_freed = self.num_freed
        return table

    def adopt(self, num_freed: int, pages: list[int]) -> None:
        """Takes over the references to `pages`, behind `num_freed` blocks that nothing looks back on any more. Only an
        empty table can.

        Worked example: adopt(2, [7, 9]) gives the entries 7, 7, 7, 9, of which the last two are held.
        """
        assert self.num_pages == 0, f"a table of {self.num_pages} pages can't adopt others"
        self.num_freed = num_freed
        self.extend([0] * num_freed + pages)

    def free_before(self, token: int, kv: KVCache) -> None:
        """Gives back the blocks that lie wholly before `token`."""
        end = min(token // self.block_tokens, self.num_pages)
        if end > self.num_freed:
            kv.release(self._array[self.num_freed : end].tolist())
            self.num_freed = end
            self._fill_freed()

    def must_copy(self, token: int, kv: KVCache) -> bool:
        """Whether others share the page where the KV of `token` would be written."""
        index = token // self.block_tokens
        if not self.num_freed <= index < self.num_pages:
            return False
        page = int(self._array[index])
        if kv.is_shared(page):
            return True
        # Tokens are written once, and a name is given when the last one of a block is there.
        assert not kv.is_named(page), f"token {token} would be written into page {page}, which has a name"
        return False

    def copy_on_write(self, token: int, kv: KVCache, tenant: Tenant) -> tuple[int, int]:
        """A page of its own, `tenant`'s, in place of the shared one of `token`. Returns (source, target): the bytes to
        copy. The source keeps its name, the copy has none."""
        index = token // self.block_tokens
        source = int(self._array[index])
        (target,) = kv.allocate(1, tenant)
        kv.release([source])
        self._array[index] = target
        self._fill_freed()
        return source, target

    def release(self, kv: KVCache) -> None:
        """Gives every page back."""
        kv.release(self.held)
        self.num_pages = self.num_freed = 0

    def _fill_freed(self) -> None:
        # Where nothing is held there is nothing to point at: the next page to come is written before anything is read.
        if 0 < self.num_freed < self.num_pages:
            self._array[: self.num_freed] = self._array[self.num_freed]
