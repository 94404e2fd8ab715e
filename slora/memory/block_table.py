"""The block table of one sequence: the pages that hold its KV blocks, in order.

Forked sequences share the pages of their common tokens, and each sequence has its own reference. A shared page is never
written: it is copied first (copy-on-write). A page with a key is never written either, because other requests may read
it at any time.

With a sliding window, blocks that no later token attends to are freed while the sequence runs. Their entries stay in
the table. No result depends on these entries, but each must be the id of a page with finite values. So they point to
the first page that the sequence still holds.
"""

import numpy as np

from slora.memory.kv_cache import KVCache
from slora.memory.tenant_account import TenantAccount
from slora_kernels.layout import Int32Array


class BlockTable:
    """The pages of one sequence. Page `i` holds tokens `[i * block_tokens, (i + 1) * block_tokens)`.

    Worked example, 16 tokens per block: 33 tokens need 3 pages, and the third page has room for 15 more tokens.

    Entries [0, num_freed) were freed. The sequence has one reference to each page in [num_freed, num_pages).

    page_seconds: the number of held pages, integrated over time. It is valid only while the table holds no page,
        because the final reading of a page is added when the page is released.
    """

    __slots__ = ("_array", "block_tokens", "num_freed", "num_pages", "page_seconds")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.num_pages = 0
        self.num_freed = 0
        self.page_seconds = 0.0
        # An array, not a list: building a batch copies it row by row in each step.
        self._array: Int32Array = np.zeros(8, np.int32)

    @property
    def pages(self) -> Int32Array:
        """int32 [num_pages]: one entry per block, freed blocks included."""
        return self._array[: self.num_pages]

    @property
    def held_pages(self) -> list[int]:
        pages: list[int] = self._array[self.num_freed : self.num_pages].tolist()
        return pages

    def pages_missing(self, num_tokens: int) -> int:
        """Number of pages to allocate before the sequence can hold `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_tokens) - self.num_pages)

    def allocate(self, count: int, tenant: TenantAccount, kv: KVCache) -> None:
        """Appends `count` new pages that `tenant` owns. The caller has made room."""
        if count:
            pages = kv.allocate(count, tenant)
            self.page_seconds -= kv.read(pages)
            self.extend(pages)

    def extend(self, pages: list[int]) -> None:
        """Appends pages without measuring how long they are held."""
        end = self.num_pages + len(pages)
        if end > len(self._array):
            grown = np.zeros(max(end, 2 * len(self._array)), np.int32)
            grown[: self.num_pages] = self.pages
            self._array = grown
        self._array[self.num_pages : end] = pages
        self.num_pages = end
        self._fill_freed()

    def fork(self, kv: KVCache) -> "BlockTable":
        """Returns a new table of the same pages, with its own reference to each held page."""
        table = BlockTable(self.block_tokens)
        held = self.held_pages
        kv.retain(held)
        table.extend(self.pages.tolist())
        table.num_freed = self.num_freed
        table.page_seconds = -kv.read(held)
        return table

    def adopt(self, num_freed: int, pages: list[int], kv: KVCache) -> None:
        """Fills the empty table with `num_freed` freed blocks, followed by `pages`. Takes over the references to
        `pages`, which the caller has just acquired.

        Worked example: adopt(2, [7, 9], kv) gives the entries 7, 7, 7, 9; the last two are held.
        """
        assert self.num_pages == 0, f"a block table with {self.num_pages} pages cannot adopt other pages"
        self.num_freed = num_freed
        self.page_seconds -= kv.read(pages)
        self.extend([0] * num_freed + pages)

    def free_before(self, token: int, kv: KVCache) -> None:
        """Frees the blocks that lie completely before `token`."""
        end = min(token // self.block_tokens, self.num_pages)
        if end > self.num_freed:
            self._release(self._array[self.num_freed : end].tolist(), kv)
            self.num_freed = end
            self._fill_freed()

    def needs_copy(self, token: int, kv: KVCache) -> bool:
        """Whether the page of `token` is shared and must be copied before the KV of `token` is written."""
        index = token // self.block_tokens
        if not self.num_freed <= index < self.num_pages:
            return False
        page = int(self._array[index])
        if kv.is_shared(page):
            return True
        # Each token is written once, and a block is inserted only after its last token was written.
        assert not kv.has_key(page), f"token {token} would be written into page {page}, which has a key"
        return False

    def copy_on_write(self, token: int, kv: KVCache, tenant: TenantAccount) -> tuple[int, int]:
        """Replaces the shared page of `token` by a new page that `tenant` owns.

        Returns (source, target), whose bytes the caller copies. The source keeps its key; the target has none.
        """
        index = token // self.block_tokens
        source = int(self._array[index])
        (target,) = kv.allocate(1, tenant)
        self.page_seconds -= kv.read([target])
        self._release([source], kv)
        self._array[index] = target
        self._fill_freed()
        return source, target

    def release(self, kv: KVCache) -> None:
        """Releases every page and empties the table."""
        self._release(self.held_pages, kv)
        self.num_pages = self.num_freed = 0

    def _release(self, pages: list[int], kv: KVCache) -> None:
        self.page_seconds += kv.read(pages)
        kv.release(pages)

    def _fill_freed(self) -> None:
        # If no page is held, there is no page to point to. The next page is written before any entry is read.
        if 0 < self.num_freed < self.num_pages:
            self._array[: self.num_freed] = self._array[self.num_freed]
