"""The pages of the pool that hold KV: pages that sequences use, and cached prefix blocks kept for reuse.

A block that is computed completely is inserted under the key of its content (`prefix_key`). When a page with a key
loses its last reference it becomes cached; a page without a key becomes free. A later request with the same content
finds the block by its key.

       allocate        insert                release (last)            evict, remove_adapter
    ------------> held -------> held with key -------------> cached ----------------------> free
                   |             |        ^                   |
    free <---------+<------------+        +------ acquire ----+
           release    invalidate

A cached block can be evicted only while no cached block follows it. So a prefix is evicted from its end, the rest of it
stays usable, and eventually every cached page can be evicted. With a sliding window a sequence frees early blocks, so a
block may outlive the block before it. Requests find such a block again once the block before it has been recomputed.

The recurrent state after the last token of a block can be inserted too, under `state_key`. It follows that block, as
the next block does.

This module handles pages and keys. It does not depend on tokens, sequences or torch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count as count_up
from typing import ClassVar

import numpy as np

from slora.memory.evictor import Evictor
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import Int32Array

# The next value of `BlockTable.stamp`.
_stamps = count_up(1)


def state_key(key: bytes) -> bytes:
    """The key of the recurrent state after the last token of the block with this key."""
    return key + b" state"


@dataclass(slots=True, eq=False, repr=False)
class PrefixBlock:
    """A block of KV or a recurrent state whose content has a key, in use or idle."""

    is_pinned: ClassVar[bool] = False
    pages: list[int]  # A block has one page. References to the pages of a state are always to all of them.
    key: bytes
    parent: bytes | None  # Key of the block before it, inserted or not; None for a first block.
    tenant: TenantAccount  # Owner of the pages; other tenants may use them if the scope is public.
    adapters: tuple[AdapterVersion, ...]
    rank: int = 0  # Set for the evictor, as is `ticket`.
    ticket: int = 0

    def __repr__(self) -> str:
        return f"PrefixBlock({self.key.hex()[:8]}, page {self.page} of {self.tenant.name!r})"

    @property
    def page(self) -> int:
        """The first page. The block is in use or idle as this page is."""
        return self.pages[0]


class KVCache:
    """Manages the pages that hold KV. Every reference to a KV page is acquired and released here.

    enabled: whether prefixes are cached; if not, no block is inserted.
    public_owner: with a public prefix cache, the tenant that owns the idle blocks of the base model. If a tenant with
        a floor owned them, its protected blocks could hide evictable blocks of other tenants.
    num_evictions: blocks and states evicted to free their pages.
    """

    def __init__(
        self,
        pool: PagePool,
        evictor: Evictor,
        *,
        enabled: bool = True,
        public_owner: TenantAccount | None = None,
    ) -> None:
        self.public_owner = public_owner
        self.enabled = enabled
        self.num_evictions = 0
        self._pool = pool
        self._evictor = evictor
        self._by_key: dict[bytes, PrefixBlock] = {}
        self._by_page: dict[int, PrefixBlock] = {}
        # A dict keeps the order of insertion. The order of a set would differ between runs, and so would the pages that
        # are allocated next.
        self._by_adapter: dict[AdapterVersion, dict[bytes, PrefixBlock]] = {}
        # Number of idle blocks that directly follow the block with this key. It is stored by key because the block
        # itself may be evicted and recomputed.
        self._num_idle_children: dict[bytes, int] = {}

    # -- references ---------------------------------------------------------------------------------------------

    def allocate(self, count: int, tenant: TenantAccount) -> list[int]:
        """Allocates pages without a key, each with one reference. The caller has made room."""
        return self._pool.allocate(count, tenant)

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page; every page must be held."""
        self._pool.retain(pages)

    def release(self, pages: list[int]) -> None:
        """Drops one reference from each page.

        `pages` are in token order, after those of the state. A page with a key and without references becomes cached;
        one without a key becomes free.
        """
        without_key = []
        # Start at the end: only a block that no idle block follows is a candidate for eviction. In token order each
        # block would be added and immediately removed again.
        for page in reversed(pages):
            block = self._by_page.get(page)
            if block is None:
                without_key.append(page)
            elif page != block.page:
                continue  # The first page of a state is released with all others.
            elif self._pool.is_shared(page):
                self._pool.release(block.pages)
            else:
                self._pool.cache(block.pages)
                self._become_idle(block)
        self._pool.release(without_key)

    def read(self, pages: Iterable[int]) -> float:
        """The sum of the readings of held pages, in page-seconds; see `PagePool`."""
        return self._pool.read(pages)

    def is_shared(self, page: int) -> bool:
        """Whether a held page has more than one reference. A shared page must not be written."""
        return self._pool.is_shared(page)

    def has_key(self, page: int) -> bool:
        """Whether other requests can find the page by its content. Such a page must not be written."""
        return page in self._by_page

    # -- keys ---------------------------------------------------------------------------------------------------

    def insert(
        self, pages: list[int], key: bytes, parent: bytes | None, adapters: tuple[AdapterVersion, ...]
    ) -> None:
        """Inserts the completely computed block in a held page, or the recurrent state in several.

        Does nothing if the key already has pages: one copy is enough.

        parent: key of the block before it.
        adapters: the adapters in the block's key, each once.
        """
        if not self.enabled or key in self._by_key:
            return
        for page in pages:
            assert page not in self._by_page, f"{self._by_page[page]!r} already has a key"
            assert not self._pool.is_cached(page), f"page {page} is cached without a key"
        block = PrefixBlock(pages, key, parent, self._pool.owner(pages[0]), adapters)
        self._by_key[key] = block
        self._by_page.update(dict.fromkeys(pages, block))
        for adapter in adapters:
            self._by_adapter.setdefault(adapter, {})[key] = block

    def match(
        self, keys: list[bytes], first_needed: Callable[[int], int], *, needs_state: bool = False
    ) -> int:
        """Returns the largest n such that blocks [first_needed(n), n) are all present.

        keys: keys of all leading blocks.

        first_needed(n): the first of the n leading blocks to which any later token attends. It is less than n and never
            decreases as n grows. Without a window it is 0. With a window, the blocks before it may be missing.

        needs_state: whether the recurrent state after n blocks must be present as well.

        Worked example: of 5 blocks the third is missing. Without a window n is 2. If only the last two blocks before n
        are needed, n is 5.
        """
        longest, num_present = 0, 0  # num_present: the length of the run of present blocks that ends here.
        first_of_all = first_needed(len(keys))
        for index, key in enumerate(keys):
            if key in self._by_key:
                num_present += 1
                has_state = not needs_state or state_key(key) in self._by_key
                if has_state and first_needed(index + 1) > index - num_present:
                    longest = index + 1
            elif first_of_all <= index:
                break  # Every longer match needs this block.
            else:
                num_present = 0
        return longest

    def acquire(self, keys: list[bytes]) -> list[int]:
        """Adds a reference to each block or state and returns the pages.

        keys: keys of exactly the blocks and states that are needed.
        """
        blocks = [self._by_key[key] for key in keys]
        for block in blocks:
            if self._is_idle(block):
                self._pool.acquire(block.pages)
                self._leave_idle(block)
            else:
                self._pool.retain(block.pages)
        return [page for block in blocks for page in block.pages]

    def invalidate(self, keys: Iterable[bytes]) -> None:
        """Removes the keys of blocks whose content is invalid, and of the states after them, so that no later request
        finds them.

        Sequences that use them keep their pages.
        """
        for key in keys:
            for block in (self._by_key.get(state_key(key)), self._by_key.get(key)):
                if block is not None:
                    self._remove(block)

    def remove_key(self, page: int) -> None:
        """Removes the key of a page that has one, and of the other pages of its state."""
        self._remove(self._by_page[page])

    def remove_adapter(self, adapter: AdapterVersion) -> None:
        """Removes the keys of all blocks that a deleted adapter helped to compute. Idle blocks become free."""
        # The newest blocks are removed first, because they are at the ends of their prefixes.
        for block in list(self._by_adapter.get(adapter, {}).values())[::-1]:
            self._remove(block)

    def remove_tenant(self, tenant: TenantAccount) -> None:
        """Removes the keys of all blocks that the tenant owns. Idle blocks become free."""
        for block in [block for block in self._by_key.values() if block.tenant is tenant][::-1]:
            self._remove(block)

    # -- invariants ---------------------------------------------------------------------------------------------

    def cached_pages(self) -> Iterator[int]:
        """The cached KV pages, for `PagePool.check_invariants`."""
        return (page for page, block in self._by_page.items() if self._is_idle(block))

    def check_invariants(self) -> None:
        """Asserts that keys, idle blocks and eviction candidates are consistent.

        Raises AssertionError with the first mismatch.
        """
        self._check_keys()
        idle = [block for block in self._by_key.values() if self._is_idle(block)]
        counted = Counter(block.parent for block in idle if block.parent is not None)
        assert counted == self._num_idle_children, "the number of idle child blocks is wrong"
        for block in self._by_key.values():
            is_end = self._is_idle(block) and not counted[block.key]
            assert bool(block.ticket) == is_end, (
                f"{block!r} is {'the end of a prefix and not ' * is_end}a candidate for eviction"
            )

    def _check_keys(self) -> None:
        num_pages = sum(len(block.pages) for block in self._by_key.values())
        assert num_pages == len(self._by_page), "two keys share a page"
        keyed = Counter(adapter for block in self._by_key.values() for adapter in block.adapters)
        assert keyed == {adapter: len(blocks) for adapter, blocks in self._by_adapter.items()}, (
            "the blocks of an adapter are not all listed under it"
        )
        for page, block in self._by_page.items():
            assert page in block.pages and self._by_key.get(block.key) is block, (
                f"{block!r} is stored under the wrong key or page"
            )
            assert self._pool.owner(page) is block.tenant, f"the page of {block!r} belongs to another tenant"
            for adapter in block.adapters:
                assert block.key in self._by_adapter[adapter], (
                    f"{block!r} belongs to an adapter that was removed"
                )

    # -- idle blocks --------------------------------------------------------------------------------------------

    def _is_idle(self, block: PrefixBlock) -> bool:
        return self._pool.is_cached(block.page)

    def _become_idle(self, block: PrefixBlock) -> None:
        """Ranks a block whose page was just cached, and makes it a candidate if no idle block follows it.

        The block is ranked now, even if the idle blocks that follow it delay its eviction for a long time.
        """
        if self.public_owner is not None and not block.adapters:
            for page in block.pages:
                self._pool.transfer(page, self.public_owner)
            block.tenant = self.public_owner
        block.rank = self._evictor.next_rank()
        if block.key not in self._num_idle_children:
            self._add_candidate(block)
        if block.parent is None:
            return
        count = self._num_idle_children.get(block.parent, 0)
        self._num_idle_children[block.parent] = count + 1
        parent = self._by_key.get(block.parent)
        if parent is not None:
            self._evictor.remove(parent)

    def _leave_idle(self, block: PrefixBlock) -> None:
        """Removes a block whose page is no longer cached from the candidates. Its parent may become a candidate."""
        self._evictor.remove(block)
        if block.parent is None:
            return
        count = self._num_idle_children[block.parent] - 1
        if count:
            self._num_idle_children[block.parent] = count
            return
        del self._num_idle_children[block.parent]
        parent = self._by_key.get(block.parent)
        if parent is not None and self._is_idle(parent):
            self._add_candidate(parent)

    def _add_candidate(self, block: PrefixBlock) -> None:
        self._evictor.add(block, partial(self._evict, block))

    def _evict(self, block: PrefixBlock, requester: TenantAccount) -> None:
        self.num_evictions += 1
        block.tenant.num_prefix_evictions += 1
        self._remove(block)

    def _remove(self, block: PrefixBlock) -> None:
        """Removes the block's key, and frees its pages if the block is idle."""
        del self._by_key[block.key]
        for page in block.pages:
            del self._by_page[page]
        for adapter in block.adapters:
            blocks = self._by_adapter[adapter]
            del blocks[block.key]
            if not blocks:
                del self._by_adapter[adapter]
        if self._is_idle(block):
            self._pool.evict(block.pages)
            self._leave_idle(block)


class BlockTable:
    """The block table of one sequence: the pages that hold its KV blocks, in order.

    Page `i` holds tokens `[i * block_tokens, (i + 1) * block_tokens)`.

    Worked example, 16 tokens per block: 33 tokens need 3 pages, and the third page has room for 15 more tokens. With a
    recurrent state of 2 pages they need 5.

    Entries [0, num_freed) were freed. The sequence has one reference to each page in [num_freed, num_pages).

    Forked sequences share the pages of their common tokens, and each sequence has its own reference. A shared page is
    never written: it is copied first (copy-on-write). A page with a key is never written either, because other requests
    may read it at any time.

    With a sliding window, blocks that no later token attends to are freed while the sequence runs. Their entries stay
    in the table. No result depends on these entries, but each must be the id of a page with finite values. So they
    point to the first page that the sequence still holds.

    A model with recurrent layers keeps a state for each sequence, which every step overwrites. Its bytes fill whole
    pages that belong to the same table. Forks share them until one of them computes its next token. If these pages have
    a key, the sequence computes its next token on a copy, and the prefix cache keeps them.

    num_state_pages: number of pages that the recurrent state takes. 0 if the model has none.
    state_pages: these pages, in order. They are allocated together with the first block.

    stamp: a number that no other table has, and that changes with the entries.
    page_seconds: the number of held pages, integrated over time. It is valid only while the table holds no page,
        because the final reading of a page is added when the page is released.
    """

    __slots__ = (
        "_array",
        "block_tokens",
        "num_freed",
        "num_pages",
        "num_state_pages",
        "page_seconds",
        "stamp",
        "state_pages",
    )

    def __init__(self, block_tokens: int, num_state_pages: int = 0) -> None:
        self.block_tokens = block_tokens
        self.num_state_pages = num_state_pages
        self.state_pages: list[int] = []
        self.num_pages = 0
        self.num_freed = 0
        self.page_seconds = 0.0
        self.stamp = next(_stamps)
        # An array, not a list: building a batch copies it row by row.
        self._array: Int32Array = np.zeros(8, np.int32)

    @property
    def pages(self) -> Int32Array:
        """int32 [num_pages]: one entry per block, freed blocks included."""
        return self._array[: self.num_pages]

    @property
    def held_pages(self) -> list[int]:
        """The pages of the recurrent state, and then those of the blocks in order."""
        pages: list[int] = self._array[self.num_freed : self.num_pages].tolist()
        return [*self.state_pages, *pages] if self.state_pages else pages

    def filled_pages(self, num_tokens: int) -> list[int]:
        """The first of `held_pages`: those with content once `num_tokens` tokens are computed."""
        if not num_tokens:
            return []
        num_blocks = -(-num_tokens // self.block_tokens) - self.num_freed
        return self.held_pages[: len(self.state_pages) + max(0, num_blocks)]

    def pages_missing(self, num_tokens: int) -> int:
        """Number of pages to allocate before the sequence can hold `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_tokens) - self.num_pages
        num_state_pages = self.num_state_pages - len(self.state_pages)
        return num_blocks + num_state_pages if num_blocks > 0 else num_state_pages

    def allocate(self, count: int, tenant: TenantAccount, kv: KVCache) -> None:
        """Appends `count` new pages that `tenant` owns. The caller has made room."""
        if count:
            pages = kv.allocate(count, tenant)
            self.page_seconds -= kv.read(pages)
            self.extend(pages)

    def extend(self, pages: list[int]) -> None:
        """Appends pages without measuring how long they are held. The pages of the recurrent state come first."""
        num_state_pages = self.num_state_pages - len(self.state_pages)
        if num_state_pages:
            self.state_pages = [*self.state_pages, *pages[:num_state_pages]]
            pages = pages[num_state_pages:]
        self._append(pages)

    def _append(self, pages: list[int]) -> None:
        end = self.num_pages + len(pages)
        if end > len(self._array):
            grown = np.zeros(max(end, 2 * len(self._array)), np.int32)
            grown[: self.num_pages] = self.pages
            self._array = grown
        self._array[self.num_pages : end] = pages
        self.num_pages = end
        self._complete_change()

    def fork(self, kv: KVCache) -> "BlockTable":
        """Returns a new table of the same pages, with its own reference to each held page."""
        table = BlockTable(self.block_tokens, self.num_state_pages)
        held = self.held_pages
        kv.retain(held)
        table.state_pages = self.state_pages
        table._append(self.pages.tolist())
        table.num_freed = self.num_freed
        table.page_seconds = -kv.read(held)
        return table

    def adopt(self, num_freed: int, pages: list[int], kv: KVCache) -> None:
        """Fills the empty table with `num_freed` freed blocks, followed by `pages`. Takes over the references to
        `pages`, which the caller has just acquired. They begin with the pages of the recurrent state.

        Worked example: adopt(2, [7, 9], kv) gives the entries 7, 7, 7, 9; the last two are held.
        """
        assert self.num_pages == 0, f"a block table with {self.num_pages} pages cannot adopt other pages"
        self.num_freed = num_freed
        self.page_seconds -= kv.read(pages)
        self.state_pages, pages = pages[: self.num_state_pages], pages[self.num_state_pages :]
        self._append([0] * num_freed + pages)

    def free_before(self, token: int, kv: KVCache) -> None:
        """Frees the blocks that lie completely before `token`."""
        end = min(token // self.block_tokens, self.num_pages)
        if end > self.num_freed:
            self._release(self._array[self.num_freed : end].tolist(), kv)
            self.num_freed = end
            self._complete_change()

    def count_shared(self, token: int, kv: KVCache) -> int:
        """Number of shared pages that must be copied before the KV of `token` and the state after it are written."""
        count = len(self.state_pages) if self.state_pages and self._shares_state(kv) else 0
        return count + self._shares_block(token, kv)

    def claim_state(self, kv: KVCache) -> bool:
        """Takes the key of the state away, if the table has the only reference to its pages, which then need not be
        copied. Returns whether it did.
        """
        if not self.state_pages or kv.is_shared(self.state_pages[0]) or not kv.has_key(self.state_pages[0]):
            return False
        kv.remove_key(self.state_pages[0])
        return True

    def copy_on_write(self, token: int, kv: KVCache, tenant: TenantAccount) -> list[tuple[int, int]]:
        """Replaces the pages that `count_shared` counts by new pages that `tenant` owns.

        Returns (source, target) of each, whose bytes the caller copies. A source keeps its key; the targets have none.
        """
        index, shares_block = token // self.block_tokens, self._shares_block(token, kv)
        sources = self.state_pages if self._shares_state(kv) else []
        num_state_pages = len(sources)
        if shares_block:
            sources = [*sources, int(self._array[index])]
        targets = kv.allocate(len(sources), tenant)
        self.page_seconds -= kv.read(targets)
        self._release(sources, kv)
        if num_state_pages:
            self.state_pages = targets[:num_state_pages]
        if shares_block:
            self._array[index] = targets[-1]
            self._complete_change()
        return list(zip(sources, targets, strict=True))

    def release(self, kv: KVCache) -> None:
        """Releases every page and empties the table."""
        self._release(self.held_pages, kv)
        self.num_pages = self.num_freed = 0
        self.state_pages = []
        self._complete_change()

    def _shares_state(self, kv: KVCache) -> bool:
        return bool(self.state_pages) and (
            kv.is_shared(self.state_pages[0]) or kv.has_key(self.state_pages[0])
        )

    def _shares_block(self, token: int, kv: KVCache) -> bool:
        index = token // self.block_tokens
        if not self.num_freed <= index < self.num_pages:
            return False
        page = int(self._array[index])
        if kv.is_shared(page):
            return True
        # Each token is written once, and a block is inserted only after its last token was written.
        assert not kv.has_key(page), f"token {token} would be written into page {page}, which has a key"
        return False

    def _release(self, pages: list[int], kv: KVCache) -> None:
        self.page_seconds += kv.read(pages)
        kv.release(pages)

    def _complete_change(self) -> None:
        """Lets freed entries point to a held page."""
        self.stamp = next(_stamps)
        # If no page is held, there is no page to point to. The next page is written before any entry is read.
        if 0 < self.num_freed < self.num_pages:
            self._array[: self.num_freed] = self._array[self.num_freed]
